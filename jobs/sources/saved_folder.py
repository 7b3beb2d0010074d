"""Folders that `save_to_disk` (or a batchgen job) wrote, read as their Arrow files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import SourceError, nearest
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources.base import Source
from batchgen.jobs.sources.dataset_rows import MapStyleSource
from batchgen.jobs.sources.file_source import FileSource


@dataclass(frozen=True, slots=True)
class SavedFolder:
    """A folder that holds a dataset, or one dataset for each split."""

    path: Path
    splits: tuple[str, ...] | None


def read_saved_folder(path: Path) -> SavedFolder | None:
    """The folder as a saved dataset, or None when it is none."""
    if (path / "dataset_dict.json").is_file():
        return SavedFolder(path, tuple(_read(path / "dataset_dict.json")["splits"]))
    if (path / "state.json").is_file() and "_data_files" in _read(path / "state.json"):
        return SavedFolder(path, None)
    return None


def open_saved(folder: SavedFolder, options: InputSpec) -> Source:
    """Open the wanted split.

    Raises:
        SourceError: no such split, or a key that only a hub dataset has.
    """
    for key in ("name", "revision", "data_files"):
        if getattr(options, key) is not None:
            raise SourceError(
                f"input.{key} does not apply to a save_to_disk folder ({folder.path}); leave it out"
            )
    if options.streaming:
        raise SourceError(
            "input.streaming does not apply to a save_to_disk folder; its files are always streamed"
        )
    path = folder.path
    if folder.splits is not None:
        path /= pick_split(options.split, folder.splits, str(folder.path))
    state = _read(path / "state.json")
    if folder.splits is None and options.split not in (None, state.get("_split")):
        raise SourceError(f"input.split: {path} is one dataset without splits; leave it out")
    if state.get("_indices_data_files"):
        from datasets import load_from_disk

        return MapStyleSource(load_from_disk(str(path)), path.name, options, pinned={})
    paths = [(path / file["filename"]).absolute() for file in state["_data_files"]]
    if not paths:
        raise SourceError(f"{path} holds no data")
    return FileSource(paths, "arrow", options, root=path.absolute())


def pick_split(wanted: str | None, splits: tuple[str, ...], name: str) -> str:
    """The wanted split, or the only one.

    Raises:
        SourceError: no such split, or several to choose from.
    """
    if wanted is None and len(splits) == 1:
        return splits[0]
    if wanted is None:
        raise SourceError(f"{name} has several splits; set input.split to one of {', '.join(splits)}")
    if wanted not in splits:
        guess = nearest(wanted, splits)
        mean = f"; did you mean {guess!r}?" if guess else ""
        raise SourceError(f"input.split: {name} has no split {wanted!r}{mean} (splits: {', '.join(splits)})")
    return wanted


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    return data
