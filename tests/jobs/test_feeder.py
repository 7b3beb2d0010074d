"""Rows ahead of the engine: in order, bounded, overlapped, and whole when the source breaks off."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import batchgen.jobs.feeder as feeder_module
from batchgen.engine.messages import EngineRequest
from batchgen.errors import SourceError
from batchgen.jobs.columns import OutputColumns
from batchgen.jobs.feeder import Item, RowFeeder
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.row import Row, RowPosition, RowResult, Sample, SourceBatch
from batchgen.jobs.row_reader import RowReader
from batchgen.jobs.store import ShardStore
from batchgen.jobs.testing import eventually
from batchgen.jobs.window import Ready, Window
from batchgen.outputs import FailureCode, RowFailure
from batchgen.sampling_params import SamplingParams

PARAMS = SamplingParams()
SCHEMA = pa.schema([("n", pa.int64())])


class Numbers:
    """A source of two files with `sizes` rows in batches of seven; may break off."""

    def __init__(self, *sizes: int, breaks_at: int | None = None):
        self.sizes, self.breaks_at = sizes, breaks_at
        self.num_read = 0

    def batches(self, start: RowPosition) -> Iterator[SourceBatch]:
        index, row = start.index, start.row
        for file in range(start.file, len(self.sizes)):
            while row < self.sizes[file]:
                if self.breaks_at is not None and index >= self.breaks_at:
                    raise SourceError("the file is gone")
                count = min(7, self.sizes[file] - row)
                numbers = pa.array(range(index, index + count), pa.int64())
                self.num_read += count
                yield SourceBatch(RowPosition(file, row, index), pa.RecordBatch.from_arrays([numbers], ["n"]))
                index, row = index + count, row + count
            row = 0


def make_store(root: Path, shard_rows: int = 10) -> ShardStore:
    folder = OutputFolder(root)
    for path in folder.folders:
        path.mkdir(parents=True, exist_ok=True)
    return ShardStore(folder, OutputColumns(SCHEMA, ("a", "b")), shard_rows)


def ready(row: Row, num_tokens: int = 5) -> Ready:
    request = EngineRequest(request_id=str(row.index), prompt_token_ids=b"", params=PARAMS)
    return Ready(row, request, num_tokens)


def take_all(feeder: RowFeeder) -> list[Item]:
    items: list[Item] = []
    while not feeder.is_exhausted:
        items += feeder.take(5, wait_s=1.0)
    return items


def test_rows_come_in_order_though_threads_render_them(tmp_path: Path) -> None:
    def render(row: Row) -> Item:
        time.sleep(0.002 if row.index % 32 < 16 else 0)
        failed = RowFailure(FailureCode.NULL_PROMPT, "null")
        return RowResult(row, failure=failed) if row.index % 10 == 3 else ready(row)

    feeder = RowFeeder(RowReader(Numbers(40, 60), make_store(tmp_path)), render, num_threads=3)
    items = take_all(feeder)
    feeder.close()
    assert [item.row.index for item in items] == list(range(100))
    assert [item.row.file for item in items] == [0] * 40 + [1] * 60
    assert [item.row.index for item in items if isinstance(item, RowResult)] == list(range(3, 100, 10))
    assert (feeder.num_taken, feeder.rows_total) == (100, 100)


def test_reading_ahead_is_bounded_by_rows_and_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Numbers(1_000_000)
    feeder = RowFeeder(RowReader(source, make_store(tmp_path)), ready)
    try:
        eventually(lambda: source.num_read > 300)
        time.sleep(0.1)
        assert source.num_read < 1500
    finally:
        feeder.close()
    monkeypatch.setattr(feeder_module, "_MAX_TOKENS", 1000)
    source = Numbers(1_000_000)
    feeder = RowFeeder(RowReader(source, make_store(tmp_path)), lambda row: ready(row, 100))
    try:
        eventually(lambda: source.num_read >= 14)
        time.sleep(0.1)
        # Chunks that were on their way when the bound was reached may come on top.
        assert source.num_read <= 100
        assert len(feeder.take(12, wait_s=1.0)) > 0
    finally:
        feeder.close()


def test_reading_ahead_is_bounded_by_the_bytes_of_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch of these has 56 bytes; one that is larger than the bound by itself still comes through.
    for max_bytes, most_rows in ((560, 13 * 7), (10, 3 * 7)):
        monkeypatch.setattr(feeder_module, "_MAX_BYTES", max_bytes)
        source = Numbers(140)
        feeder = RowFeeder(RowReader(source, make_store(tmp_path)), ready)
        try:
            eventually(lambda source=source: source.num_read >= 14)
            time.sleep(0.1)
            assert source.num_read <= most_rows
            assert [item.row.index for item in take_all(feeder)] == list(range(140))
        finally:
            feeder.close()


def test_rows_before_a_break_are_given_before_the_error(tmp_path: Path) -> None:
    feeder = RowFeeder(RowReader(Numbers(50, breaks_at=21), make_store(tmp_path)), ready)
    indices: list[int] = []
    with pytest.raises(SourceError, match="gone"):
        while True:
            indices += [item.row.index for item in feeder.take(4, wait_s=1.0)]
    feeder.close()
    assert indices == list(range(21))


def test_an_error_of_rendering_reaches_the_caller(tmp_path: Path) -> None:
    def render(row: Row) -> Item:
        raise ZeroDivisionError

    feeder = RowFeeder(RowReader(Numbers(50), make_store(tmp_path)), render)
    with pytest.raises(ZeroDivisionError):
        take_all(feeder)
    feeder.close()


def test_nothing_ready_is_no_reason_to_wait(tmp_path: Path) -> None:
    go_on = threading.Event()

    def render(row: Row) -> Item:
        go_on.wait(10)
        return ready(row)

    feeder = RowFeeder(RowReader(Numbers(5), make_store(tmp_path)), render)
    assert feeder.take(5) == [] and feeder.take(5, wait_s=0.01) == [] and not feeder.is_exhausted
    go_on.set()
    assert len(take_all(feeder)) == 5
    feeder.close()


def test_only_undone_rows_are_read_and_sealed_shards_not_at_all(tmp_path: Path) -> None:
    # Shards of ten: the second is sealed, the third has three rows done.
    store = make_store(tmp_path)
    batches = list(Numbers(25, 25).batches(RowPosition(0, 0, 0)))
    rows = [Row(batch, offset) for batch in batches for offset in range(len(batch))]
    for index in (*range(10, 20), 21, 22, 28):
        store.append(RowResult(rows[index], (Sample("t", "stop", 1),), 1))
    store.commit()
    source = Numbers(25, 25)
    reader = RowReader(source, make_store(tmp_path))
    found = [batch.start.index + offset for batch, offsets in reader for offset in offsets]
    assert found == [*range(10), 20, *range(23, 28), *range(29, 50)]
    assert reader.num_rows == 50
    # Read: the batches that touch the first shard (14 rows), then from row 20 on (30).
    assert source.num_read == 44


@pytest.mark.parametrize(
    ("limit", "end"), [(1, None), (10, None), (24, None), (50, None), (51, 50), (None, 50)]
)
def test_limit(tmp_path: Path, limit: int | None, end: int | None) -> None:
    reader = RowReader(Numbers(25, 25), make_store(tmp_path), limit)
    assert reader.peek()
    found = [batch.start.index + offset for batch, offsets in reader for offset in offsets]
    assert found == list(range(min(limit or 50, 50)))
    assert reader.num_rows == end


def test_peek_at_nothing(tmp_path: Path) -> None:
    reader = RowReader(Numbers(0, 0), make_store(tmp_path))
    assert not reader.peek() and reader.num_rows == 0


def test_window_is_bounded_and_knows_its_oldest_rows() -> None:
    now = 0.0
    window = Window(3, lambda: now)
    batch = next(Numbers(7).batches(RowPosition(0, 0, 0)))
    for offset in range(3):
        window.admit(ready(Row(batch, offset)))
        now += 1
    assert (len(window), window.room) == (3, 0)
    assert window.oldest(2) == [(0, 3.0), (1, 2.0)]
    assert window.finish("1").row.index == 1
    assert window.room == 1
    with pytest.raises(KeyError):
        window.finish("1")
