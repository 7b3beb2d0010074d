"""Manifest: what the first run of a job stores, so that a later run does the same or says what differs."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa

from batchgen.errors import ResumeError
from batchgen.jobs.atomic import Disk
from batchgen.jobs.layout import OutputFolder

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The first run of a job.

    Args:
        source: `Source.identity()`: the ordered file list with sizes and hashes, and all that fixes the rows.
        num_rows: rows of the source, where they were known at the start.
        schema: of the output, as base64 of its Arrow message; `schema_text` is for the reader.
        shard_rows: rows in a whole shard.
        fingerprint: dotted key -> value of everything else that can change a row; see fingerprint.py.
        sampling: sampling parameter -> [value, where it came from].
        engine: the engine's arguments after "auto" was decided.
        environment: what a row's bytes may depend on beside the job: backend, instruction set, versions.
    """

    source: Mapping[str, Any]
    num_rows: int | None
    schema: str
    schema_text: str
    shard_rows: int
    fingerprint: Mapping[str, Any]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: OutputFolder, disk: Disk) -> None:
        """Store it; from then on the folder belongs to this job."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        disk.write_json(folder.manifest, values | {"format": _FORMAT}, folder.scratch)

    @classmethod
    def read(cls, folder: OutputFolder) -> "Manifest | None":
        """The stored manifest, or None when no run has come so far.

        Raises:
            ResumeError: it is damaged or of a later version.
        """
        try:
            data = json.loads(folder.manifest.read_bytes())
            version = data.pop("format")
            if version == _FORMAT:
                return cls(**data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ResumeError(
                f"{folder.manifest} cannot be read ({error}); start over with --restart"
            ) from error
        raise ResumeError(
            f"{folder.manifest} has format {version}, this batchgen knows {_FORMAT}: use the batchgen "
            f"that wrote it, or start over with --restart"
        )

    def read_schema(self) -> pa.Schema:
        """The output's schema."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))


def pack_schema(schema: pa.Schema) -> str:
    """The form in which a manifest holds a schema."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def json_form(value: Any) -> Any:
    """The value as it looks after a trip through JSON, so that stored and new values compare."""
    return json.loads(json.dumps(value, sort_keys=True, default=str))
