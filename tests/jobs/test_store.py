"""The store under deaths at every write, damage, limits and several samples."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from batchgen.errors import ConfigError, SinkError
from batchgen.jobs.atomic import Disk, NewFile
from batchgen.jobs.columns import SURROGATES_REPLACED, OutputColumns
from batchgen.jobs.journal import Journal
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.row import Row, RowPosition, RowResult, Sample, SourceBatch
from batchgen.jobs.shards import Sidecar
from batchgen.jobs.store import ShardStore
from batchgen.jobs.tally import Tally
from batchgen.jobs.testing import DyingDisk, Killed, read_shards, visible
from batchgen.outputs import FailureCode, RowFailure

SHARD_ROWS = 10


class PowerLossDisk(DyingDisk):
    """Forgets, when the power goes, all that was not brought to the disk."""

    def __init__(self, dies_at: int | None = None):
        super().__init__(dies_at)
        self._unsynced: set[Path] = set()
        self._synced_inode = 0
        self._renamed: list[tuple[Path, Path, bytes | None]] = []
        self._removed: dict[Path, bytes] = {}

    @contextmanager
    def create(self, path: Path) -> Iterator[NewFile]:
        self._unsynced.add(path)
        with super().create(path) as file:
            yield file
        if path.stat().st_ino == self._synced_inode:
            self._unsynced.discard(path)

    def fsync(self, descriptor: int) -> None:
        self._synced_inode = os.fstat(descriptor).st_ino

    def publish(self, temporary: Path, final: Path) -> None:
        self._renamed.append((temporary, final, final.read_bytes() if final.exists() else None))
        if temporary in self._unsynced:
            self._unsynced.add(final)
        super().publish(temporary, final)

    def remove(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else None
        super().remove(path)
        if content is not None:
            self._removed[path] = content

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._renamed = [entry for entry in self._renamed if entry[1].parent != path]
        self._removed = {gone: content for gone, content in self._removed.items() if gone.parent != path}

    def lose_power(self) -> None:
        for temporary, final, before in reversed(self._renamed):
            if temporary.exists():
                continue  # it died before the rename
            temporary.write_bytes(final.read_bytes())
            final.unlink()
            if before is not None:
                final.write_bytes(before)
        for path in self._unsynced:
            if path.exists():
                path.write_bytes(b"")
        for path, content in self._removed.items():
            path.write_bytes(content)


def text_of(index: int) -> str | None:
    return f"text {index}" if index % 4 else None


def source_rows(num_rows: int, batch_rows: int = 7) -> list[Row]:
    """Rows of two files; the second begins in the middle."""
    rows, half, index = [], num_rows // 2, 0
    for file, size in enumerate((half, num_rows - half)):
        for start in range(0, size, batch_rows):
            count = min(batch_rows, size - start)
            columns = pa.record_batch(
                {
                    "text": pa.array((text_of(i) for i in range(index, index + count)), pa.string()),
                    "tag": pa.array(f"t{i % 3}" for i in range(index, index + count)).dictionary_encode(),
                }
            )
            batch = SourceBatch(RowPosition(file, start, index), columns)
            rows.extend(Row(batch, offset) for offset in range(count))
            index += count
    return rows


COLUMNS = OutputColumns(source_rows(2)[0].batch.columns.schema, ("a.parquet", "b.parquet"))


def result_of(row: Row) -> RowResult:
    if row.index % 9 == 4:
        return RowResult(row, failure=RowFailure(FailureCode.NULL_PROMPT, "null"), warnings=("careful",))
    sample = Sample(f"out {row.index}", "stop" if row.index % 2 else "length", 3 + row.index % 5)
    return RowResult(row, (sample,), num_input_tokens=row.index + 1)


def open_folder(root: Path) -> OutputFolder:
    folder = OutputFolder(root)
    for path in folder.folders:
        path.mkdir(parents=True, exist_ok=True)
    return folder


def out_of_order(rows: list[Row]) -> list[Row]:
    """The order in which an engine might finish them: the first row late, the others in stretches."""
    return rows[1:9] + rows[14:23] + rows[9:14] + rows[:1] + rows[23:]


def write_all(
    root: Path,
    rows: list[Row],
    disk: Disk | None = None,
    commit_every: int = 6,
    say: Callable[[str], None] = lambda line: None,
    kept: set[int] | None = None,
) -> ShardStore:
    """What a run does: finish the rows that are not done, committing now and then. `kept`: rows committed."""
    store = ShardStore(open_folder(root), COLUMNS, SHARD_ROWS, disk=disk or DyingDisk(), say=say)
    undone = set(store.undone(0, len(rows)).tolist())
    todo = [row for row in out_of_order(rows) if row.index in undone]
    for number, row in enumerate(todo, 1):
        store.append(result_of(row))
        if number % commit_every == 0:
            store.commit()
            if kept is not None:
                kept.update(done.index for done in todo[:number])
    store.end_at(len(rows))
    store.commit()
    return store


def undone(root: Path) -> set[int]:
    return set(ShardStore(open_folder(root), COLUMNS, SHARD_ROWS, disk=DyingDisk()).undone(0, 100).tolist())


def left_over(root: Path) -> list[Path]:
    folder = OutputFolder(root)
    return [path for place in (folder.segments, folder.scratch, folder.damaged) for path in place.iterdir()]


def test_rows_come_out_in_input_order_with_their_columns(tmp_path: Path) -> None:
    rows = source_rows(34)
    store = write_all(tmp_path, rows)
    written = read_shards(tmp_path)
    assert written.column("row_index").to_pylist() == list(range(34))
    assert written.column("source_file").to_pylist() == ["a.parquet"] * 17 + ["b.parquet"] * 17
    assert written.column("source_row").to_pylist() == [*range(17), *range(17)]
    assert written.column("text").to_pylist() == [text_of(i) for i in range(34)]
    assert written.column("tag").type == pa.dictionary(pa.int32(), pa.string())
    assert written.column("error").to_pylist()[4] == {"code": "null_prompt", "message": "null"}
    assert written.column("generated_text").to_pylist()[3:5] == ["out 3", None]
    assert written.column("finish_reason").to_pylist()[2:5] == ["length", "stop", "error"]
    assert written.column("num_input_tokens").to_pylist()[3:5] == [4, None]
    assert written.column("warnings").to_pylist()[3:5] == [[], ["careful"]]
    assert sorted(path.name for path in tmp_path.glob("data-*")) == [f"data-0000{k}.arrow" for k in range(4)]
    assert (store.tally.rows, store.tally.rows_failed, store.num_sealed) == (34, 4, 4)
    assert left_over(tmp_path) == []


def test_killed_before_any_write_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    # BG-31: rows finish out of order; what is done is known by row, never by count.
    rows = source_rows(34)
    counting = DyingDisk()
    reference = write_all(tmp_path / "whole", rows, counting)
    expected = visible(tmp_path / "whole")
    assert counting.num_steps > 80
    for dies_at in range(counting.num_steps):
        root = tmp_path / f"killed{dies_at}"
        kept: set[int] = set()
        with pytest.raises(Killed):
            write_all(root, rows, DyingDisk(dies_at), kept=kept)
        assert not kept & undone(root), dies_at
        resumed = write_all(root, rows)
        assert visible(root) == expected, dies_at
        assert resumed.tally == reference.tally, dies_at
        assert left_over(root) == [], dies_at


def test_power_lost_before_any_write_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = source_rows(23)
    counting = PowerLossDisk()
    write_all(tmp_path / "whole", rows, counting)
    expected = visible(tmp_path / "whole")
    for dies_at in range(counting.num_steps):
        root, disk = tmp_path / f"dark{dies_at}", PowerLossDisk(dies_at)
        kept: set[int] = set()
        with pytest.raises(Killed):
            write_all(root, rows, disk, kept=kept)
        disk.lose_power()
        assert not kept & undone(root), dies_at
        said: list[str] = []
        write_all(root, rows, DyingDisk(), say=said.append)
        assert visible(root) == expected, dies_at
        assert said == [], dies_at


def test_killed_again_while_resuming(tmp_path: Path) -> None:
    rows = source_rows(23)
    write_all(tmp_path / "whole", rows)
    expected = visible(tmp_path / "whole")
    for dies_at in (25, 45):
        root = tmp_path / f"killed{dies_at}"
        with pytest.raises(Killed):
            write_all(root, rows, DyingDisk(dies_at))
        for again in range(30):
            disk = DyingDisk(again)
            try:
                write_all(root, rows, disk, commit_every=3)
                break
            except Killed:
                continue
        write_all(root, rows)
        assert visible(root) == expected


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damaged_shard_is_reported_and_done_again(tmp_path: Path, damage) -> None:
    rows = source_rows(34)
    write_all(tmp_path, rows)
    expected = visible(tmp_path)
    damage(tmp_path / "data-00001.arrow")
    said: list[str] = []
    store = ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS, say=said.append)
    assert store.undone(0, 34).tolist() == list(range(10, 20))
    assert len(said) == 1 and "data-00001.arrow" in said[0] and "done again" in said[0]
    # The gap begins where the shard before it ended, in its file.
    gaps = list(store.gaps())
    assert (gaps[0].start, gaps[0].stop_row) == (RowPosition(file=0, row=10, index=10), 20)
    del store
    write_all(tmp_path, rows)
    assert visible(tmp_path) == expected
    sidecars = sorted(path.name for path in OutputFolder(tmp_path).sidecars.iterdir())
    assert sidecars[1] == "data-00001.g1.json" and len(sidecars) == 4


def test_a_copied_folder_is_checked_by_content(tmp_path: Path) -> None:
    rows = source_rows(34)
    write_all(tmp_path, rows)
    path = tmp_path / "data-00002.arrow"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS).undone(0, 34).tolist() == []


@pytest.mark.parametrize("damage", [cut, flip])
def test_damaged_segment_is_reported_and_its_rows_done_again(tmp_path: Path, damage) -> None:
    rows = source_rows(34)
    write_all(tmp_path / "whole", rows)
    root = tmp_path / "broken"
    store = ShardStore(open_folder(root), COLUMNS, SHARD_ROWS)
    for start in (0, 4):
        for row in rows[start : start + 4]:
            store.append(result_of(row))
        store.commit()
    damage(OutputFolder(root).segment_files()[0][3])
    said: list[str] = []
    store = ShardStore(open_folder(root), COLUMNS, SHARD_ROWS, say=said.append)
    assert store.undone(0, 10).tolist() == [0, 1, 2, 3, 8, 9]
    assert len(said) == 1 and ".segment is damaged" in said[0]
    write_all(root, rows)
    assert visible(root) == visible(tmp_path / "whole")


def test_the_first_committed_copy_of_a_row_counts(tmp_path: Path) -> None:
    rows = source_rows(10)
    store = ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS)
    journal = Journal(OutputFolder(tmp_path), Disk(), COLUMNS.row_index)
    for row in rows[:6]:
        store.append(result_of(row))
    store.commit()
    journal.load()
    # As after a repair: rows 4 to 7 again, with other texts.
    again = [RowResult(row, (Sample("again", "stop", 9),), 9) for row in rows[4:8]]
    journal.commit(COLUMNS.batch(again))
    store = ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS)
    assert store.undone(0, 10).tolist() == [8, 9]
    for row in rows[8:]:
        store.append(result_of(row))
    store.commit()
    texts = read_shards(tmp_path).column("generated_text").to_pylist()
    assert texts == ["out 0", "out 1", "out 2", "out 3", None, "out 5", "again", "again", "out 8", "out 9"]
    counted = Tally()
    for batch in read_shards(tmp_path).to_batches():
        counted.count_batch(batch, COLUMNS)
    assert store.tally == counted


def test_damaged_sidecar_is_made_again(tmp_path: Path) -> None:
    rows = source_rows(34)
    write_all(tmp_path, rows)
    expected = visible(tmp_path)
    cut(OutputFolder(tmp_path).sidecar(3, 0))
    write_all(tmp_path, rows)
    assert visible(tmp_path) == expected


def test_a_limit_ends_a_shard_short_and_the_next_run_goes_on_after_it(tmp_path: Path) -> None:
    rows = source_rows(34)
    store = ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS)
    for row in rows[:15]:
        store.append(result_of(row))
    store.end_at(15)
    store.commit()
    assert read_shards(tmp_path).num_rows == 15
    first = visible(tmp_path)["data-00001.arrow"]
    write_all(tmp_path, rows)
    sizes = [pa.ipc.open_stream(path).read_all().num_rows for path in sorted(tmp_path.glob("data-*.arrow"))]
    assert sizes == [10, 5, 10, 9]
    assert visible(tmp_path)["data-00001.arrow"] == first
    assert read_shards(tmp_path).column("row_index").to_pylist() == list(range(34))
    assert ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS).undone(0, 34).tolist() == []


def test_a_limit_below_what_is_done_ends_nothing_short(tmp_path: Path) -> None:
    rows = source_rows(34)
    store = ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS)
    for row in rows[:8]:
        store.append(result_of(row))
    store.end_at(5)
    store.commit()
    assert (store.num_sealed, store.count_done_before(5)) == (0, 5)
    write_all(tmp_path, rows)
    assert read_shards(tmp_path).num_rows == 34


def test_several_samples_a_row_are_lists(tmp_path: Path) -> None:
    rows = source_rows(10)
    columns = OutputColumns(rows[0].batch.columns.schema, ("a", "b"), num_samples=2, prefix="gen_")
    store = ShardStore(open_folder(tmp_path), columns, SHARD_ROWS)
    for row in rows:
        samples = (Sample("one", "stop", 1), Sample("two", "length", 2))
        failed = RowFailure(FailureCode.EMPTY_PROMPT, "empty")
        store.append(RowResult(row, failure=failed) if row.index == 3 else RowResult(row, samples))
    store.commit()
    written = read_shards(tmp_path).to_pylist()
    assert written[2]["gen_generated_text"] == ["one", "two"]
    assert written[2]["gen_num_generated_tokens"] == [1, 2]
    assert written[3]["gen_generated_text"] is None and written[3]["gen_error"]["code"] == "empty_prompt"
    reopened = ShardStore(open_folder(tmp_path), columns, SHARD_ROWS)
    assert reopened.tally == store.tally
    assert store.tally.finish_reasons == {"stop": 9, "length": 9, "error": 1}


def test_lone_surrogates_are_replaced_and_said(tmp_path: Path) -> None:
    # BS-21, storage side.
    rows = source_rows(10)
    store = ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS)
    for row in rows:
        failure = RowFailure(FailureCode.TEMPLATE_ERROR, "bad \udc00") if row.index == 6 else None
        samples = (Sample("half \ud83d" if row.index == 5 else "whole", "stop", 1),)
        store.append(RowResult(row, samples, failure=failure))
    store.commit()
    written = read_shards(tmp_path).to_pylist()
    assert written[5]["generated_text"] == "half \ufffd" and written[5]["warnings"] == [SURROGATES_REPLACED]
    assert written[6]["error"]["message"] == "bad \ufffd" and written[6]["warnings"] == []
    assert written[4]["generated_text"] == "whole" and written[4]["warnings"] == []


def test_an_input_column_with_a_name_of_ours_is_refused() -> None:
    schema = pa.schema([("text", pa.string()), ("error", pa.string())])
    with pytest.raises(ConfigError, match=r"'error'.*rename.*prefix"):
        OutputColumns(schema, ("a",))
    assert "gen_error" in OutputColumns(schema, ("a",), prefix="gen_").schema.names


def test_columns_that_wait_for_a_commit_are_bounded_too(tmp_path: Path) -> None:
    schema = pa.schema([("image", pa.large_binary())])
    store = ShardStore(open_folder(tmp_path), OutputColumns(schema, ("a",)), SHARD_ROWS)
    for index in range(100):
        batch = SourceBatch(RowPosition(0, index, index), pa.record_batch([[bytes(4 << 20)]], schema=schema))
        store.append(RowResult(Row(batch, 0), (Sample("", "stop", 1),), num_input_tokens=1))
        if store.is_full:
            break
    assert store.num_pending <= 16
    store.commit()
    assert not store.is_full and store.num_pending == 0


def test_a_batch_of_large_rows_is_cut_for_texts_hold_two_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.jobs.shards._MAX_BATCH_BYTES", 1)
    write_all(tmp_path / "cut", out_of_order(source_rows(25)))
    monkeypatch.undo()
    write_all(tmp_path / "whole", out_of_order(source_rows(25)))
    assert read_shards(tmp_path / "cut").to_pylist() == read_shards(tmp_path / "whole").to_pylist()
    with pa.ipc.open_stream((tmp_path / "cut" / "data-00000.arrow").read_bytes()) as reader:
        assert [batch.num_rows for batch in reader] == [1] * SHARD_ROWS


def test_rows_that_are_sealed_while_the_reader_asks_for_them_are_done(tmp_path: Path) -> None:
    store = ShardStore(open_folder(tmp_path), COLUMNS, SHARD_ROWS)
    for row in source_rows(SHARD_ROWS):
        store.append(result_of(row))

    class SealedMeanwhile(dict[int, Sidecar]):
        def __contains__(self, shard: object) -> bool:
            found = super().__contains__(shard)
            if not found and store.num_pending:
                store.commit()
            return found

    store._sealed = SealedMeanwhile()
    assert len(store.undone(0, SHARD_ROWS)) == 0
    assert store.num_sealed == 1


def test_a_full_disk_names_the_path_and_keeps_what_is_committed(tmp_path: Path) -> None:
    # BS-19, with a disk that refuses after a while.
    class FullDisk(Disk):
        def boundary(self, step: str, path: Path) -> None:
            if step == "write" and OutputFolder(tmp_path).segment_files():
                raise OSError(28, "No space left on device")

    rows = source_rows(34)
    with pytest.raises(SinkError, match=r"cannot write .*segment.tmp after 0 bytes: No space left"):
        write_all(tmp_path, rows, FullDisk())
    assert not list(tmp_path.glob("data-*"))
    write_all(tmp_path, rows)
    write_all(tmp_path / "whole", rows)
    expected = visible(tmp_path / "whole")
    assert {name: visible(tmp_path)[name] for name in expected} == expected
