"""What an output folder holds before a run: nothing, a job of ours, or files of somebody else."""

import json
from collections.abc import Callable
from pathlib import Path

from batchgen.errors import ResumeError
from batchgen.jobs.atomic import Disk
from batchgen.jobs.layout import OutputFolder
from batchgen.quantities import counted


def make_folders(folder: OutputFolder, disk: Disk) -> None:
    """Make the output folder and what is in it, if it is not there.

    Raises:
        SinkError: it cannot be made or written.
    """
    for path in folder.folders:
        disk.make_folder(path)


def refuse_strangers(folder: OutputFolder) -> None:
    """Refuse an output that no run of ours began but that holds files with names that we would write.

    Raises:
        ResumeError: names one of them.
    """
    segments = [path for *_, path in folder.segment_files()]
    found = [*folder.data_files().values(), folder.state, folder.dataset_info, *segments]
    strangers = sorted(path for path in found if path.exists())
    if strangers:
        raise ResumeError(
            f"{folder.root} holds {strangers[0].relative_to(folder.root)} but no {folder.manifest.name} of a "
            f"job that wrote it; choose another output or move it away"
        )


def start_over(folder: OutputFolder, disk: Disk, say: Callable[[str], None]) -> None:
    """Remove what earlier runs wrote, and nothing else.

    The manifest goes last: until then the folder is ours, and this can be done again.
    """
    if not folder.manifest.exists():
        return
    shards = folder.data_files()
    if shards:
        say(f"starting over: removing {counted(len(shards), 'shard')} in {folder.root}")
    places = (folder.sidecars, folder.segments, folder.scratch, folder.damaged, folder.events)
    inner = [path for place in places if place.is_dir() for path in sorted(place.iterdir())]
    for path in (folder.state, folder.dataset_info, *shards.values(), *inner, folder.source_rows):
        disk.remove(path)
    disk.sync_folder(folder.root)
    disk.remove(folder.manifest)


def read_source_rows(folder: OutputFolder) -> int | None:
    """Rows of the whole source, if a run has come to its end."""
    try:
        return int(json.loads(folder.source_rows.read_bytes())["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_source_rows(folder: OutputFolder, disk: Disk, num_rows: int) -> None:
    """Note how many rows the source has: costly to find, and never another number for the same source."""
    if read_source_rows(folder) != num_rows:
        disk.write_json(folder.source_rows, {"rows": num_rows}, folder.scratch)


def display_path(path: Path) -> Path:
    """The path as a user would write it: relative to the working directory when it is below."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
