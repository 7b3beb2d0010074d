"""open_source: an input section -> the Source that reads it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.errors import SourceError
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources.base import FORMATS, Source
from batchgen.jobs.sources.dataset import PACKAGED, open_dataset
from batchgen.jobs.sources.file_source import FileSource
from batchgen.jobs.sources.paths import data_suffix, expand_paths, format_of, is_glob
from batchgen.jobs.sources.saved_folder import open_saved, pick_split, read_saved_folder

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DATASET = "dataset"


def open_source(options: InputSpec, base_dir: Path, stored: Mapping[str, Any] | None = None) -> Source:
    """Open a job's input: look at its files, hash them, and settle its schema. No rows are read yet.

    Args:
        options: the job file's `input` section.
        base_dir: folder that relative paths start from.
        stored: the source's `identity` at the first run, whose dataset commit a resume keeps.

    Raises:
        SourceError: nothing there, several formats, schemas that cannot be joined, a missing column.
        UnknownNameError: an unknown `format`.
    """
    if options.format not in (None, _DATASET, *FORMATS.names()):
        FORMATS.get(str(options.format), "input.format")
    only = options.path[0] if len(options.path) == 1 else None
    if only is not None and options.data_files is not None:
        if only not in PACKAGED:
            return open_dataset(only, options, stored)
        return _open_files(_split_files(options), PACKAGED[only], options, base_dir)
    if only is not None and _is_hub_id(only, options, base_dir):
        return open_dataset(only, options, stored)
    if only is not None and options.format in (None, _DATASET):
        saved = read_saved_folder(base_dir / Path(only).expanduser())
        if saved is not None:
            return open_saved(saved, options)
    if options.format == _DATASET:
        raise SourceError(f"input.path: {only or options.path} is neither a hub id nor a save_to_disk folder")
    for key in ("name", "split", "revision"):
        if getattr(options, key) is not None:
            raise SourceError(
                f"input.{key} is for hub datasets, save_to_disk folders and data_files; leave it out"
            )
    if options.streaming:
        raise SourceError("input.streaming is for hub datasets; files are always streamed")
    return _open_files(options.path, options.format, options, base_dir)


def _open_files(
    patterns: tuple[str, ...], format_name: str | None, options: InputSpec, base_dir: Path
) -> FileSource:
    known = {suffix: name for name in FORMATS for suffix in FORMATS.get(name).suffixes}
    suffixes = FORMATS.get(format_name).suffixes if format_name else tuple(known)
    paths = expand_paths(patterns, base_dir, suffixes)
    return FileSource(paths, format_name or format_of(paths, known), options)


def _split_files(options: InputSpec) -> tuple[str, ...]:
    """The files of the wanted split of `input.data_files`."""
    splits = options.data_files or {}
    return splits[pick_split(options.split, tuple(splits), "input.data_files")]


def _is_hub_id(path: str, options: InputSpec, base_dir: Path) -> bool:
    if (base_dir / Path(path).expanduser()).exists() or is_glob(path) or not _HUB_ID.fullmatch(path):
        return False
    if options.format == _DATASET:
        return True
    suffixes = {suffix for name in FORMATS for suffix in FORMATS.get(name).suffixes}
    return options.format is None and data_suffix(Path(path)) not in suffixes
