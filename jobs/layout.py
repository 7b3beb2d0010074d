"""OutputFolder: the names of everything in an output folder, and which of them are ours."""

import re
from pathlib import Path

# Wide enough that names sort as numbers up to 10**5 shards; more digits follow naturally.
_DATA = re.compile(r"data-(\d{5,})\.arrow")
_SEGMENT = re.compile(r"(\d{8,})-(\d+)-([0-9a-f]{64})\.segment")
_SIDECAR = re.compile(r"data-(\d{5,})\.g(\d+)\.json")


class OutputFolder:
    """The files of one job.

    `data-00000.arrow` and on, `state.json` and `dataset_info.json` are what other programs read. All the
    rest is in `.batchgen/`, which loaders skip: `lock`, `manifest.json`, `source_rows.json`, `segments/`,
    `shards/` (sidecars), `events/`, `scratch/` (temporary names), `damaged/` (shards unlike their checksum).
    """

    def __init__(self, root: Path):
        self.root = root
        self.hidden = root / ".batchgen"
        self.lock = self.hidden / "lock"
        self.manifest = self.hidden / "manifest.json"
        self.source_rows = self.hidden / "source_rows.json"
        self.segments = self.hidden / "segments"
        self.sidecars = self.hidden / "shards"
        self.events = self.hidden / "events"
        self.scratch = self.hidden / "scratch"
        self.damaged = self.hidden / "damaged"
        self.state = root / "state.json"
        self.dataset_info = root / "dataset_info.json"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders to make, parents first."""
        return (self.root, self.hidden, self.segments, self.sidecars, self.events, self.scratch, self.damaged)

    def data_file(self, shard: int) -> Path:
        """A shard's file."""
        return self.root / f"data-{shard:05d}.arrow"

    def sidecar(self, shard: int, generation: int) -> Path:
        """The description of one generation of a shard."""
        return self.sidecars / f"data-{shard:05d}.g{generation}.json"

    def segment(self, number: int, num_rows: int, sha256: str) -> Path:
        """A journal segment; its name carries row count and checksum."""
        return self.segments / f"{number:08d}-{num_rows}-{sha256}.segment"

    def data_files(self) -> dict[int, Path]:
        """Shard number -> file, for every file with such a name."""
        return {int(match[1]): path for path, match in _matching(self.root, _DATA)}

    def segment_files(self) -> list[tuple[int, int, str, Path]]:
        """(number, rows, sha256, path) of every segment, in the order of their commits."""
        found = _matching(self.segments, _SEGMENT)
        return sorted((int(match[1]), int(match[2]), match[3], path) for path, match in found)

    def sidecar_files(self) -> list[tuple[int, int, Path]]:
        """(shard, generation, path) of every sidecar, sorted."""
        return sorted(
            (int(match[1]), int(match[2]), path) for path, match in _matching(self.sidecars, _SIDECAR)
        )

    def scratch_files(self) -> list[Path]:
        """What a killed run left half-written."""
        return sorted(self.scratch.iterdir()) if self.scratch.is_dir() else []


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return []
    return [(path, match) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
