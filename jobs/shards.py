"""Shards: output files sealed from the journal, described by sidecars, held against them by content."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.errors import SinkError
from batchgen.jobs.arrays import join_batches, take_rows
from batchgen.jobs.atomic import Disk, sha256_of
from batchgen.jobs.columns import OutputColumns
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.row import RowPosition
from batchgen.jobs.shard_plan import ShardRange
from batchgen.jobs.tally import Tally

# Rows in a record batch of a shard: fixed, so that a shard's bytes depend on nothing but its rows.
BATCH_ROWS = 1024
# A stretch of more bytes is halved: in a batch a column of texts holds at most 2 GiB, and memory is bounded.
_MAX_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What is known of one generation of a shard.

    Args:
        sources: (ordinal of the file, first row in it, number of rows) of each stretch of source rows.
    """

    shard: int
    generation: int
    first_row: int
    num_rows: int
    num_bytes: int
    sha256: str
    sources: tuple[tuple[int, int, int], ...]
    tally: Tally

    @property
    def range(self) -> ShardRange:
        """Its rows."""
        return ShardRange(self.shard, self.first_row, self.first_row + self.num_rows)

    @property
    def end(self) -> RowPosition:
        """The position after its last row, in the file of that row."""
        # Only the shard of an input without rows has no sources.
        file, first, count = self.sources[-1] if self.sources else (0, 0, 0)
        return RowPosition(file=file, row=first + count, index=self.first_row + self.num_rows)

    def to_mapping(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self) | {"tally": self.tally.to_mapping(), "format": 1}

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> "Sidecar":
        """The sidecar of `to_mapping`; KeyError, TypeError or ValueError when it is none."""
        values = {name: data[name] for name in cls.__slots__}
        values["sources"] = tuple(tuple(map(int, stretch)) for stretch in data["sources"])
        values["tally"] = Tally.from_mapping(data["tally"])
        return cls(**values)

    def matches(self, path: Path, *, by_content: bool) -> bool:
        """Whether this describes that file: by all of its content, or at a glance by its size."""
        try:
            if path.stat().st_size != self.num_bytes:
                return False
            return not by_content or sha256_of(path) == self.sha256
        except FileNotFoundError:
            return False


@dataclass(frozen=True, slots=True)
class FoundShards:
    """What the sidecars and files of an output folder amount to.

    Args:
        sealed: the sidecar that its file matches, by shard.
        described: ranges of all readable sidecars, those without a matching file too.
        damaged: files that match no sidecar, or are missing though sealed once; by shard.
        stale: sidecars that describe nothing that is there, while another one does.
        next_generation: by shard.
    """

    sealed: dict[int, Sidecar]
    described: list[ShardRange]
    damaged: dict[int, Path]
    stale: list[Path]
    next_generation: dict[int, int]


class ShardFolder:
    """The sealed shards of an output folder.

    Args:
        folder: where.
        disk: the hand that writes.
        columns: what a row is made of.
    """

    def __init__(self, folder: OutputFolder, disk: Disk, columns: OutputColumns):
        self._folder, self._disk, self._columns = folder, disk, columns
        self._ordinals = {name: ordinal for ordinal, name in enumerate(columns.source_files)}

    def seal(
        self, shard_range: ShardRange, generation: int, stretches: Iterable[Sequence[pa.RecordBatch]]
    ) -> Sidecar:
        """Write a shard, describe it, and give it its name: in this order, each step brought to the disk.

        Args:
            shard_range: its rows.
            generation: above that of every sidecar it has.
            stretches: for each BATCH_ROWS rows, all copies of these rows in the order of their commits.

        Raises:
            SinkError: rows are missing: the journal was changed from outside.
        """
        temporary = self._folder.scratch / f"data-{shard_range.shard:05d}.tmp"
        tally, sources, first = Tally(), _SourceRanges(), shard_range.first_row
        schema = self._columns.schema
        with self._disk.create(temporary) as file, pa.ipc.new_stream(file.stream, schema) as writer:
            for pieces in stretches:
                stop = min(first + BATCH_ROWS, shard_range.stop_row)
                for batch in self._batches(pieces, first, stop):
                    writer.write_batch(batch)
                    tally.count_batch(batch, self._columns)
                    sources.add(*self._positions(batch))
                first = stop
        sidecar = Sidecar(
            shard=shard_range.shard,
            generation=generation,
            first_row=shard_range.first_row,
            num_rows=len(shard_range),
            num_bytes=file.num_bytes,
            sha256=file.sha256,
            sources=sources.ranges(),
            tally=tally,
        )
        path = self._folder.sidecar(shard_range.shard, generation)
        self._disk.write_json(path, sidecar.to_mapping(), self._folder.scratch)
        self._disk.publish(temporary, self._folder.data_file(shard_range.shard))
        return sidecar

    def find(self, *, by_content: bool = True) -> FoundShards:
        """Read the sidecars and hold the files against them, see `Sidecar.matches`."""
        found = FoundShards({}, [], dict(self._folder.data_files()), [], {})
        paths: dict[int, list[Path]] = {}
        for shard, generation, path in self._folder.sidecar_files():
            found.next_generation[shard] = generation + 1
            paths.setdefault(shard, []).append(path)
            sidecar = _read_sidecar(path)
            if sidecar is None:
                continue
            found.described.append(sidecar.range)
            file = self._folder.data_file(shard)
            if sidecar.matches(file, by_content=by_content):
                found.sealed[shard] = sidecar
                found.damaged.pop(shard, None)
        for shard, sidecar in found.sealed.items():
            current = self._folder.sidecar(shard, sidecar.generation)
            found.stale.extend(path for path in paths[shard] if path != current)
        ranges = {known.shard: known for known in found.described}
        ranges |= {shard: sidecar.range for shard, sidecar in found.sealed.items()}
        found.described[:] = ranges.values()
        return found

    def tally_before(self, sidecar: Sidecar, row: int) -> Tally:
        """Counts over a sealed shard's rows below a row number."""
        if sidecar.range.stop_row <= row:
            return sidecar.tally
        tally = Tally()
        with pa.memory_map(str(self._folder.data_file(sidecar.shard))) as file:
            table = pa.ipc.open_stream(file).read_all().select(self._columns.counted)
        for batch in table.slice(0, max(0, row - sidecar.first_row)).to_batches():
            tally.count_batch(batch, self._columns)
        return tally

    def remove_older(self, shard: int, generation: int) -> None:
        """Drop the sidecars of generations before this one."""
        for other, older, path in self._folder.sidecar_files():
            if other == shard and older < generation:
                self._disk.remove(path)

    def _batches(self, pieces: Sequence[pa.RecordBatch], first: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows in order, as one batch or, where that would be too large, as several."""
        middle = (first + stop) // 2
        if middle == first or sum(piece.nbytes for piece in pieces) <= _MAX_BATCH_BYTES:
            yield self._ordered(pieces, first, stop)
            return
        cuts = [int(np.searchsorted(piece.column(self._columns.row_index), middle)) for piece in pieces]
        halves = [(piece.slice(0, cut), piece.slice(cut)) for piece, cut in zip(pieces, cuts, strict=True)]
        yield from self._batches([low for low, _ in halves], first, middle)
        yield from self._batches([high for _, high in halves], middle, stop)

    def _ordered(self, pieces: Sequence[pa.RecordBatch], first: int, stop: int) -> pa.RecordBatch:
        """The rows in order, the first copy of each."""
        if not pieces:
            raise _missing_rows(first, stop)
        joined = join_batches(pieces)
        indices = joined.column(self._columns.row_index).to_numpy()
        order = np.argsort(indices, kind="stable")
        in_order = indices[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = in_order[1:] != in_order[:-1]
        if not np.array_equal(in_order[is_first], np.arange(first, stop)):
            raise _missing_rows(first, stop)
        return take_rows(joined, order[is_first])

    def _positions(self, batch: pa.RecordBatch) -> tuple[Any, Any]:
        files = batch.column(self._columns.source_file).dictionary_encode()
        ordinals = np.array([self._ordinals[name] for name in files.dictionary.to_pylist()])
        return ordinals[files.indices.to_numpy()], batch.column(self._columns.source_row).to_numpy()


class _SourceRanges:
    """Joins positions to stretches of consecutive rows of one file."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []

    def add(self, files: Any, rows: Any) -> None:
        breaks = np.flatnonzero((np.diff(files) != 0) | (np.diff(rows) != 1)) + 1
        edges = [0, *breaks.tolist(), len(rows)]
        for start, stop in pairwise(edges):
            file, row, count = int(files[start]), int(rows[start]), stop - start
            last = self._ranges[-1] if self._ranges else None
            if last is not None and last[0] == file and last[1] + last[2] == row:
                last[2] += count
            else:
                self._ranges.append([file, row, count])

    def ranges(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((file, row, count) for file, row, count in self._ranges)


def _read_sidecar(path: Path) -> Sidecar | None:
    """The sidecar, or None when its content is damaged: then its shard is sealed again from what is left."""
    try:
        return Sidecar.from_mapping(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError):
        return None


def _missing_rows(first: int, stop: int) -> SinkError:
    return SinkError(
        f"the journal lacks some of the rows {first} to {stop - 1}: its files were changed while the job "
        f"ran; run the same command again to redo what is missing"
    )
