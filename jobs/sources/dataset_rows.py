"""Datasets that are not plain files: map-style ones by index, iterable ones by running number."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError
from batchgen.jobs.row import RowPosition, SourceBatch
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources.base import BATCH_BYTES, BATCH_ROWS
from batchgen.jobs.sources.identity import SourceFile, schema_identity, verify_identity
from batchgen.jobs.sources.schema import conform, rename_columns, select_columns

# A seed that a person gives is small; without one NumPy draws 128 random bits.
_LARGEST_SEED = 2**64


class _DatasetSource:
    """What the two kinds share; the dataset counts as one file."""

    kind: str
    files: tuple[SourceFile, ...]
    num_rows: int | None = None
    is_typed = True

    def __init__(
        self, name: str, content: str, schema: pa.Schema, options: InputSpec, pinned: Mapping[str, Any]
    ):
        self.files = (SourceFile(name, Path(name), 0, content),)
        self._read_schema = select_columns(schema, options.columns, name)
        self.schema = rename_columns(self._read_schema, options.rename)
        self._rename = options.rename
        self._pinned = dict(pinned)

    def identity(self) -> dict[str, Any]:
        """What fixes the rows. See `Source.identity`."""
        return {
            "kind": self.kind,
            **self._pinned,
            "files": [file.to_mapping() for file in self.files],
            **schema_identity(self.schema, self._rename),
        }

    def verify(self, stored: Mapping[str, Any]) -> None:
        """Check that this is the input of a first run. See `Source.verify`."""
        verify_identity(stored, self.identity())

    def _batches(self, table: pa.Table, start: RowPosition) -> Iterator[SourceBatch]:
        done = 0
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            position = RowPosition(0, start.row + done, start.index + done)
            yield SourceBatch(position, conform(batch, self._read_schema, self.schema))
            done += batch.num_rows


class MapStyleSource(_DatasetSource):
    """A `datasets.Dataset`: rows by (fingerprint, index).

    Args:
        dataset: the dataset.
        name: what its rows are called in `source_file`.
        options: for `columns` and `rename`.
        pinned: more that fixes the rows, such as a commit.
        remarks: what the user should know.
    """

    kind = "dataset"

    def __init__(
        self,
        dataset: Any,
        name: str,
        options: InputSpec,
        *,
        pinned: Mapping[str, Any],
        remarks: tuple[str, ...] = (),
    ):
        super().__init__(
            name, f"fingerprint:{dataset._fingerprint}", dataset.features.arrow_schema, options, pinned
        )
        self._dataset = dataset.with_format("arrow")
        self.num_rows = len(dataset)
        self.remarks = remarks
        row_bytes = dataset.data.nbytes // max(1, dataset.data.num_rows)
        self._step = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))

    def batches(self, start: RowPosition) -> Iterator[SourceBatch]:
        """All rows from `start` on, in order. See `Source.batches`."""
        for row in range(start.row, len(self._dataset), self._step):
            table = self._dataset[row : min(len(self._dataset), row + self._step)]
            yield from self._batches(table, RowPosition(0, row, start.index + row - start.row))


class IterableSource(_DatasetSource):
    """A `datasets.IterableDataset`: rows by running number, read again from the first one on a resume.

    Args:
        dataset: the dataset; a shuffled one must have a seed.
        name: what its rows are called in `source_file`.
        options: for `columns` and `rename`.
        pinned: more that fixes the rows, such as a commit.
        remarks: what the user should know.

    Raises:
        SourceError: it is shuffled without a seed, or has no columns.
    """

    kind = "stream"

    def __init__(
        self,
        dataset: Any,
        name: str,
        options: InputSpec,
        *,
        pinned: Mapping[str, Any],
        remarks: tuple[str, ...] = (),
    ):
        if _is_shuffled_without_seed(dataset):
            raise SourceError(
                f"{name} is shuffled without a seed, so its order would differ at each start; "
                f"give shuffle() a seed"
            )
        if dataset.features is None:
            dataset = dataset._resolve_features()
        if dataset.features is None:
            raise SourceError(f"{name} has no rows to tell its columns from")
        super().__init__(name, "stream", dataset.features.arrow_schema, options, pinned)
        self._dataset = dataset
        self.remarks = (
            *remarks,
            f"{name} is a stream: a resume reads it again from its start, skipping what is done",
        )

    def batches(self, start: RowPosition) -> Iterator[SourceBatch]:
        """All rows from `start` on, in order. See `Source.batches`."""
        row, index = start.row, start.index
        for table in self._tables(row):
            for batch in self._batches(table, RowPosition(0, row, index)):
                yield batch
                row += len(batch)
                index += len(batch)

    def _tables(self, row: int) -> Iterator[pa.Table]:
        rest = self._dataset.skip(row)
        if self._dataset._ex_iterable.iter_arrow is not None:
            yield from rest.with_format("arrow").iter(BATCH_ROWS)
            return
        # Rows of a Python generator; as Arrow tables each would have a type of its own making.
        for batch in rest.iter(BATCH_ROWS):
            wanted = {name: batch[name] for name in self._read_schema.names}
            yield pa.table(wanted, schema=self._read_schema)


def _is_shuffled_without_seed(dataset: Any) -> bool:
    """Whether any step of the stream draws from a generator that nobody seeded."""
    step = dataset._ex_iterable
    while step is not None:
        generator = getattr(step, "generator", None)
        sequence = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
        entropy = getattr(sequence, "entropy", None)
        if isinstance(entropy, int) and entropy > _LARGEST_SEED:
            return True
        step = getattr(step, "ex_iterable", None)
    return False
