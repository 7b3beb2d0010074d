"""state.json and dataset_info.json: what `datasets.load_from_disk` reads beside the shards."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchgen.jobs.atomic import Disk
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.shards import Sidecar

_SPLIT = "train"


def write_dataset_files(folder: OutputFolder, disk: Disk, sealed: Sequence[Sidecar]) -> None:
    """Bring both files up to date with the sealed shards, if they are not.

    Args:
        folder: where.
        disk: the hand that writes.
        sealed: in the order of their rows.
    """
    info = {
        "citation": "",
        "description": "",
        "homepage": "",
        "license": "",
        "dataset_size": sum(sidecar.num_bytes for sidecar in sealed),
        "splits": {
            _SPLIT: {
                "name": _SPLIT,
                "num_bytes": sum(sidecar.num_bytes for sidecar in sealed),
                "num_examples": sum(sidecar.num_rows for sidecar in sealed),
            }
        },
    }
    state: dict[str, Any] = {
        "_data_files": [{"filename": folder.data_file(sidecar.shard).name} for sidecar in sealed],
        "_fingerprint": _fingerprint(sealed),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": _SPLIT,
    }
    for path, value in ((folder.dataset_info, info), (folder.state, state)):
        if sealed and _read(path) != value:
            disk.write_json(path, value, folder.scratch)
        elif not sealed and path.exists():
            disk.remove(path)


def _fingerprint(sealed: Sequence[Sidecar]) -> str:
    """A name for this content, by which `datasets` caches what is derived from it."""
    return hashlib.sha256("".join(sidecar.sha256 for sidecar in sealed).encode()).hexdigest()[:16]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
