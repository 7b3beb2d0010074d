"""Which files an input means: files, folders and globs, in a fixed order."""

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from batchgen.errors import SourceError

_COMPRESSIONS = (".gz", ".zst")
# The hidden folder that a job keeps in its output.
_OUTPUT_MARK = ".batchgen"
_GLOB = re.compile(r"[*?\[]")


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Order of names in which numbers count as numbers: part-2 before part-10; equals by their characters."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part), name


def data_suffix(path: Path) -> str:
    """The suffix that tells the format, without that of a compression: ".jsonl" of "a.jsonl.gz"."""
    name = path.name.lower()
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    return os.path.splitext(name)[1]


def expand_paths(patterns: Iterable[str], base_dir: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files that patterns mean, absolute.

    Patterns keep their order. The files of a glob, and all files in a folder and its sub-folders that have
    one of the suffixes, come in natural order (part-2 before part-10); names that begin with "." or "_" are
    left out.

    Raises:
        SourceError: a pattern that matches nothing, an empty folder, or a file meant twice; names it.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = base_dir / Path(pattern).expanduser()
        if path.is_dir():
            matches = _files_in(path, suffixes)
            if not matches:
                raise SourceError(f"input.path: no file in {path} ends in {', '.join(suffixes)}")
        elif path.exists():
            matches = [path]
        elif _GLOB.search(pattern):
            matches = _matching(path)
            if not matches:
                raise SourceError(f"input.path: nothing matches {pattern!r} (looked for {path})")
        else:
            raise SourceError(f"input.path: no such file or folder: {path}")
        found += [Path(os.path.abspath(match)) for match in matches]
    seen: set[Path] = set()
    for path in found:
        if path in seen:
            raise SourceError(f"input.path: {path} is meant twice")
        seen.add(path)
    return found


def is_glob(pattern: str) -> bool:
    """Whether the text has wildcards."""
    return _GLOB.search(pattern) is not None


def common_root(paths: Sequence[Path]) -> Path:
    """The deepest folder that holds all of the files."""
    return Path(os.path.commonpath([path.parent for path in paths]))


def format_of(paths: Sequence[Path], formats: Mapping[str, str]) -> str:
    """The one format of all files, by their suffixes.

    Args:
        paths: the files.
        formats: suffix -> format.

    Raises:
        SourceError: an unknown suffix, or files of several formats.
    """
    first: dict[str, Path] = {}
    for path in paths:
        suffix = data_suffix(path)
        if suffix not in formats:
            raise SourceError(
                f"cannot tell the format of {path} by its name; set input.format to one of "
                f"{', '.join(sorted(set(formats.values())))}"
            )
        first.setdefault(formats[suffix], path)
    if len(first) > 1:
        listed = "; ".join(f"{name}: {path}" for name, path in sorted(first.items()))
        raise SourceError(f"the input files are of several formats ({listed}); give one, or set input.format")
    return next(iter(first))


def _files_in(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        # The output of a job may lie inside its input folder.
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "_")) and not Path(parent, name, _OUTPUT_MARK).is_dir()
        ]
        visible = [Path(parent, name) for name in names if not name.startswith((".", "_"))]
        found += [path for path in visible if data_suffix(path) in suffixes]
    return sorted(found, key=lambda path: natural_key(path.relative_to(folder).as_posix()))


def _matching(pattern: Path) -> list[Path]:
    paths = [Path(match) for match in glob.glob(str(pattern), recursive=True)]
    files = [path for path in paths if path.is_file() and not path.name.startswith("_")]
    return sorted(files, key=lambda path: natural_key(path.as_posix()))
