"""Columns of every Arrow type come back as they came, to the same bytes in whatever order rows finish."""

import decimal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.jobs.columns import OutputColumns
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.row import Row, RowPosition, RowResult, Sample, SourceBatch
from batchgen.jobs.runner import run
from batchgen.jobs.spec import JobSpec
from batchgen.jobs.store import ShardStore

D = decimal.Decimal


class Celsius(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.int32(), "batchgen.test.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"v1"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> "Celsius":
        return cls()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    pa.register_extension_type(Celsius())
    yield
    pa.unregister_extension_type("batchgen.test.celsius")


PARQUET_COLUMNS = {
    "null": lambda: pa.nulls(5),
    "bool": lambda: pa.array([True, None, False, True, True]),
    "half": lambda: pa.array(np.arange(5, dtype=np.float16)),
    "decimal128": lambda: pa.array([D("1.23"), None, D("2.00"), D("9.99"), D("0.01")], pa.decimal128(10, 2)),
    "decimal256": lambda: pa.array([D("1.23"), None, D("2.00"), D("9.99"), D("0.01")], pa.decimal256(50, 2)),
    "timestamp": lambda: pa.array([1, None, 3, 4, 5], pa.timestamp("us", "Europe/Berlin")),
    "date": lambda: pa.array([1, None, 3, 4, 5], pa.date32()),
    "time": lambda: pa.array([1, None, 3, 4, 5], pa.time64("ns")),
    "duration": lambda: pa.array([1, None, 3, 4, 5], pa.duration("ns")),
    "map": lambda: pa.array(
        [[("a", 1)], None, [], [("b", 2), ("c", None)], [("d", 1)]], pa.map_(pa.string(), pa.int32())
    ),
    "nested": lambda: pa.array([{"a": [{"b": 1}]}, None, {"a": None}, {"a": []}, {"a": [{"b": None}]}]),
    "dictionary": lambda: pa.array(["a", "b", None, "a", "c"]).dictionary_encode(),
    "large_string": lambda: pa.array(["a", None, "", "ü", "c"], pa.large_string()),
    "large_binary": lambda: pa.array([b"a", None, b"", b"\xff", b"c"], pa.large_binary()),
    "large_list": lambda: pa.array([[1], None, [], [2, 3], [4]], pa.large_list(pa.int64())),
    "fixed_list": lambda: pa.array([[1, 2], None, [3, 4], [5, None], [7, 8]], pa.list_(pa.int32(), 2)),
    "fixed_binary": lambda: pa.array([b"ab", None, b"cd", b"ef", b"gh"], pa.binary(2)),
    "binary": lambda: pa.array([b"ab", None, b"", b"ef", b"gh"]),
    "extension": lambda: pa.ExtensionArray.from_storage(Celsius(), pa.array([1, None, 3, 4, 5], pa.int32())),
}
ONLY_ARROW_COLUMNS = {
    "small_dictionary": lambda: (
        pa.array(["a", "b", None, "a", "c"]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))
    ),
    "ordered_dictionary": lambda: pa.DictionaryArray.from_arrays(
        pa.array([2, 0, None, 1, 1], pa.int16()), pa.array(["low", "mid", "high", "never"]), ordered=True
    ),
    "list_of_dictionary": lambda: pa.array(
        [["a"], None, ["b", "a"], [], ["c"]], pa.list_(pa.dictionary(pa.int16(), pa.string()))
    ),
    "struct_of_dictionary": lambda: pa.array(
        [{"x": "a"}, None, {"x": "b"}, {"x": None}, {"x": "a"}],
        pa.struct([("x", pa.dictionary(pa.int16(), pa.string()))]),
    ),
    "map_of_dictionary": lambda: pa.array(
        [[("k", "a")], None, [], [("l", "b"), ("m", None)], [("n", "a")]],
        pa.map_(pa.string(), pa.dictionary(pa.int32(), pa.string())),
    ),
    "string_view": lambda: pa.array(["a", None, "", "longer than twelve bytes", "c"], pa.string_view()),
    "binary_view": lambda: pa.array([b"a", None, b"", b"longer than twelve bytes", b"c"], pa.binary_view()),
    "run_end": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array(["a", "b"])),
    "dense_union": lambda: pa.UnionArray.from_dense(
        pa.array([0, 1, 0, 1, 0], pa.int8()),
        pa.array([0, 0, 1, 1, 2], pa.int32()),
        [pa.array([1, 2, 3]), pa.array(["x", "y"])],
    ),
    "interval": lambda: pa.array([pa.MonthDayNano([1, 2, 3])] * 5),
    "list_view": lambda: pa.array([[1], None, [], [2, 3], [4]], pa.list_view(pa.int64())),
}
# Their values are kept, their bytes are not promised; see arrays.py.
FREE_BYTES = {"list_view"}
ALL_COLUMNS = PARQUET_COLUMNS | ONLY_ARROW_COLUMNS


def write(
    root: Path, columns: pa.RecordBatch, commits: list[list[int]], batches: list[tuple[int, int]]
) -> bytes:
    """The only shard, when its rows came in these source batches and were committed in these groups."""
    folder = OutputFolder(root)
    for path in folder.folders:
        path.mkdir(parents=True, exist_ok=True)
    rows: dict[int, Row] = {}
    for start, stop in batches:
        batch = SourceBatch(RowPosition(0, start, start), columns.slice(start, stop - start))
        rows |= {start + offset: Row(batch, offset) for offset in range(stop - start)}
    store = ShardStore(folder, OutputColumns(columns.schema, ("a",)), shard_rows=5)
    for group in commits:
        for index in group:
            store.append(RowResult(rows[index], (Sample("text", "stop", 1),), 1))
        store.commit()
    return folder.data_file(0).read_bytes()


@pytest.mark.parametrize("name", ALL_COLUMNS)
def test_values_and_types_are_kept(tmp_path: Path, name: str) -> None:
    array = ALL_COLUMNS[name]()
    field = pa.field("value", array.type, metadata={"z": "1", "a": "2"})
    columns = pa.RecordBatch.from_arrays([array], schema=pa.schema([field], metadata={"z": "1", "a": "2"}))
    whole = write(tmp_path / "whole", columns, [[0, 1, 2, 3, 4]], [(0, 5)])
    broken = write(tmp_path / "broken", columns, [[3, 0], [4], [2, 1]], [(0, 2), (2, 5)])
    for content in (whole, broken):
        written = pa.ipc.open_stream(content).read_all()
        assert written.schema.field("value").type == array.type
        assert written.schema.field("value").metadata == {b"a": b"2", b"z": b"1"}
        assert written.schema.metadata == {b"a": b"2", b"z": b"1"}
        assert written.column("value").to_pylist() == array.to_pylist()
    if name not in FREE_BYTES:
        assert whole == broken


def test_a_dictionary_keeps_only_what_is_used_unless_it_is_ordered(tmp_path: Path) -> None:
    plain = pa.DictionaryArray.from_arrays(pa.array([3, 1, 3, None, 1]), pa.array(["a", "b", "c", "d"]))
    columns = pa.record_batch({"plain": plain, "ordered": ONLY_ARROW_COLUMNS["ordered_dictionary"]()})
    written = pa.ipc.open_stream(write(tmp_path, columns, [[0, 1, 2, 3, 4]], [(0, 5)])).read_all()
    assert written.column("plain").chunk(0).dictionary.to_pylist() == ["d", "b"]
    assert written.column("ordered").chunk(0).dictionary.to_pylist() == ["low", "mid", "high", "never"]
    assert written.column("ordered").type.ordered


def test_a_parquet_file_with_every_type_comes_back_equal(tmp_path: Path) -> None:
    table = pa.table(
        {"prompt": ["a", "b", "c", "d", "e"]} | {name: make() for name, make in PARQUET_COLUMNS.items()}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    expected = pq.read_table(tmp_path / "in.parquet")
    spec = JobSpec.from_mapping(
        {
            "model": "echo:",
            "input": {"path": "in.parquet"},
            "prompt": {"column": "prompt"},
            "output": {"path": "out"},
        },
        tmp_path,
    )
    assert run(spec, quiet=True).exit_code == 0
    with pa.ipc.open_stream(tmp_path / "out" / "data-00000.arrow") as stream:
        written = stream.read_all()
    for name in table.column_names:
        assert written.schema.field(name).type == expected.schema.field(name).type, name
        assert written.column(name).to_pylist() == table.column(name).to_pylist(), name


def test_many_batches_with_changing_dictionaries(tmp_path: Path) -> None:
    # More rows than a record batch of a shard holds, and another dictionary in every source batch.
    num_rows, size = 2500, 100
    folder = OutputFolder(tmp_path)
    for path in folder.folders:
        path.mkdir(parents=True, exist_ok=True)
    kind = pa.dictionary(pa.int8(), pa.string())
    store = ShardStore(folder, OutputColumns(pa.schema([("tag", kind)]), ("a",)), shard_rows=num_rows)
    for start in range(0, num_rows, size):
        tags = pa.array([f"tag {start // size} {i % 3}" for i in range(size)]).dictionary_encode().cast(kind)
        batch = SourceBatch(RowPosition(0, start, start), pa.RecordBatch.from_arrays([tags], ["tag"]))
        for offset in range(size):
            store.append(RowResult(Row(batch, offset), (Sample("text", "stop", 1),), 1))
        if start % 300 == 0:
            store.commit()
    store.commit()
    with pa.ipc.open_stream(folder.data_file(0)) as stream:
        written = stream.read_all()
    assert [len(chunk) for chunk in written.column("tag").chunks] == [1024, 1024, 452]
    assert written.column("tag").to_pylist() == [f"tag {i // size} {i % size % 3}" for i in range(num_rows)]
