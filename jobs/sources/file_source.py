"""FileSource: files of one format as one source."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError
from batchgen.jobs.row import RowPosition, SourceBatch
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources.arrow_types import parse_type
from batchgen.jobs.sources.base import FORMATS, Chunk
from batchgen.jobs.sources.identity import identify, schema_identity, verify_identity
from batchgen.jobs.sources.paths import common_root
from batchgen.jobs.sources.schema import conform, join_schemas, rename_columns, select_columns


class FileSource:
    """Rows of files of one format, one file open at a time; a `Source`.

    Args:
        paths: the files, in order.
        format_name: an entry of `FORMATS`.
        options: the input section, for `columns`, `rename` and `schema`.
        root: folder that the files' names start from; by default the deepest common one.
        pinned: more that fixes the rows, such as a dataset's commit.

    Raises:
        SourceError: a file cannot be read or is damaged, schemas cannot be joined, a column is not there.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        format_name: str,
        options: InputSpec,
        *,
        root: Path | None = None,
        pinned: Mapping[str, Any] | None = None,
        remarks: tuple[str, ...] = (),
    ):
        self._format = FORMATS.get(format_name, "input.format")
        self._format_name = format_name
        self._options = options
        self._pinned = dict(pinned or {})
        self.remarks = remarks
        self.is_typed = self._format.is_typed
        if options.declared_schema and not self._format.declares:
            raise SourceError(
                f"input.schema: {format_name} files declare their types themselves; leave it out"
            )
        declared = {
            name: parse_type(text, f"input.schema.{name}") for name, text in options.declared_schema.items()
        }
        self.files = identify(paths, root or common_root(paths))
        self._read_schema = self._joined_schema(declared)
        self.schema = rename_columns(self._read_schema, options.rename)
        counts = [self._format.num_rows(file.path) for file in self.files]
        self.num_rows = None if None in counts else sum(count for count in counts if count is not None)

    def batches(self, start: RowPosition) -> Iterator[SourceBatch]:
        """All rows from `start` on, in order. See `Source.batches`."""
        index, row = start.index, start.row
        for ordinal in range(start.file, len(self.files)):
            path, is_projection = self.files[ordinal].path, self._options.columns is not None
            for chunk in self._format.read(path, self._read_schema, row, is_projection=is_projection):
                if chunk.columns.num_rows:
                    yield self._batch(chunk, RowPosition(ordinal, chunk.row, index))
                    index += chunk.columns.num_rows
            row = 0

    def identity(self) -> dict[str, Any]:
        """What fixes the rows. See `Source.identity`."""
        return {
            "kind": "files",
            "format": self._format_name,
            **self._pinned,
            "files": [file.to_mapping() for file in self.files],
            **schema_identity(self.schema, self._options.rename),
        }

    def verify(self, stored: Mapping[str, Any]) -> None:
        """Check that this is the input of a first run. See `Source.verify`."""
        verify_identity(stored, self.identity())

    def _joined_schema(self, declared: Mapping[str, pa.DataType]) -> pa.Schema:
        schemas = []
        for file in self.files:
            schema = self._format.schema(file.path, declared)
            if not self._format.is_json:
                schema = select_columns(schema, self._options.columns, file.name)
            schemas.append(schema)
        joined = join_schemas(schemas, [file.name for file in self.files], as_json=self._format.is_json)
        joined = select_columns(joined, self._options.columns, "the input")
        if not joined.names:
            raise SourceError(
                f"the input has no columns (looked in {', '.join(file.name for file in self.files)})"
            )
        return self._format.finish_schema(joined)

    def _batch(self, chunk: Chunk, start: RowPosition) -> SourceBatch:
        columns = conform(chunk.columns, self._read_schema, self.schema)
        renames = self._options.rename
        json_text = {renames.get(name, name): rows for name, rows in chunk.json_text.items()}
        return SourceBatch(start, columns, chunk.failures, chunk.warnings, json_text)
