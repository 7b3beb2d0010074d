import decimal
import resource
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import SourceError
from batchgen.jobs.row import RowPosition


def values(rows):
    return [row[3] for row in rows]


def test_rows_come_in_order_with_their_places(tmp_path, opened, read_rows):
    pq.write_table(pa.table({"n": [0, 1, 2]}), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"n": [3, 4]}), tmp_path / "b.parquet")
    source = opened(path=["a.parquet", "b.parquet"])
    assert source.num_rows == 5
    assert source.is_typed
    assert [file.name for file in source.files] == ["a.parquet", "b.parquet"]
    assert read_rows(source) == [
        (0, 0, 0, {"n": 0}),
        (0, 1, 1, {"n": 1}),
        (0, 2, 2, {"n": 2}),
        (1, 0, 3, {"n": 3}),
        (1, 1, 4, {"n": 4}),
    ]


def test_any_row_can_be_the_first(tmp_path, opened, read_rows):
    for file in range(3):
        table = pa.table({"n": range(10 * file, 10 * file + 10)})
        pq.write_table(table, tmp_path / f"{file}.parquet", row_group_size=3)
    source = opened(path="*.parquet")
    everything = read_rows(source)
    assert len(everything) == 30
    for file, row, index, _ in everything:
        assert read_rows(source, file, row, index) == everything[index:]
    assert read_rows(source, 2, 10, 30) == []


def test_row_groups_before_the_start_are_not_read(tmp_path, opened, read_rows):
    table = pa.table({"t": [f"{n:05d}" * 20 for n in range(2000)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
    metadata = pq.read_metadata(path)
    column = metadata.row_group(0).column(0)
    source = opened(path="a.parquet")
    # Destroy the first row group's pages.
    with path.open("r+b") as file:
        file.seek(column.data_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    assert [row[1] for row in read_rows(source, 0, 1500, 1500)] == list(range(1500, 2000))
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read after row 0"):
        read_rows(source)


def test_only_the_wanted_columns_are_read(tmp_path, opened, read_rows):
    table = pa.table({"a": [1, 2], "b": ["x", "y"], "c": [[1], [2]]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    column = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(1)
    source = opened(path="a.parquet", columns=["c", "a"])
    with (tmp_path / "a.parquet").open("r+b") as file:
        file.seek(column.data_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    assert values(read_rows(source)) == [{"c": [1], "a": 1}, {"c": [2], "a": 2}]
    assert source.schema.names == ["c", "a"]


def test_a_column_name_may_have_a_dot(tmp_path, opened, read_rows):
    table = pa.table({"a.b": [1], "a": [{"b": 2}]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert values(read_rows(opened(path="a.parquet", columns=["a.b"]))) == [{"a.b": 1}]


def test_renamed_columns_keep_their_values(tmp_path, opened, read_rows):
    pq.write_table(pa.table({"error": ["e"], "n": [1]}), tmp_path / "a.parquet")
    source = opened(path="a.parquet", rename={"error": "input_error"})
    assert values(read_rows(source)) == [{"input_error": "e", "n": 1}]
    with pytest.raises(SourceError, match=r"input\.rename: no column 'eror'; did you mean 'error'"):
        opened(path="a.parquet", rename={"eror": "x"})
    with pytest.raises(SourceError, match="two columns would be named 'n'"):
        opened(path="a.parquet", rename={"error": "n"})


def test_a_missing_column_is_named_with_the_nearest(tmp_path, opened):
    pq.write_table(pa.table({"text": ["e"]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet has no column 'txet'; did you mean 'text'"):
        opened(path="a.parquet", columns=["txet"])


def test_two_columns_of_one_name_are_refused_unless_left_out(tmp_path, opened, read_rows):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="two columns named 'a'"):
        opened(path="a.parquet")
    assert values(read_rows(opened(path="a.parquet", columns=["b"]))) == [{"b": 3}]


def test_all_null_columns_take_the_type_of_the_other_file(tmp_path, opened, read_rows):  # BG-01
    prompts = ["p", "q", "r"]
    pq.write_table(pa.table({"prompt": prompts, "note": pa.nulls(3)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": prompts, "note": ["x", None, "z"]}), tmp_path / "b.parquet")
    for order in (["a.parquet", "b.parquet"], ["b.parquet", "a.parquet"]):
        source = opened(path=order)
        assert source.schema.field("note").type == pa.string()
        notes = [row["note"] for row in values(read_rows(source))]
        assert sorted(notes, key=str) == [None] * 4 + ["x", "z"]


def test_types_that_cannot_be_joined_are_refused_with_both_files(tmp_path, opened):  # BG-01
    pq.write_table(pa.table({"note": ["x"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"note": [{"x": 1}]}), tmp_path / "b.parquet")
    with pytest.raises(SourceError) as caught:
        opened(path=["a.parquet", "b.parquet"])
    message = str(caught.value)
    assert "column 'note' is string in a.parquet but struct<x: int64> in b.parquet" in message


def test_large_and_dictionary_columns_join_with_plain_ones(tmp_path, opened, read_rows):  # BG-03
    fancy = pa.table(
        {
            "prompt": pa.array(["p", "q", "p"]).dictionary_encode(),
            "tags": pa.array([[1], [], None], pa.large_list(pa.int64())),
            "sys": pa.array(["s", None, "t"], pa.large_string()),
        }
    )
    plain = pa.table({"prompt": ["u", "v"], "tags": [[2], [3, 4]], "sys": ["w", "x"]})
    pq.write_table(fancy, tmp_path / "fancy.parquet")
    pq.write_table(plain, tmp_path / "plain.parquet")
    alone = opened(path="fancy.parquet")
    assert alone.schema.equals(fancy.schema)
    assert values(read_rows(alone)) == fancy.to_pylist()
    both = opened(path=["fancy.parquet", "plain.parquet"])
    assert both.schema.types == [pa.string(), pa.large_list(pa.int64()), pa.large_string()]
    assert values(read_rows(both)) == fancy.to_pylist() + plain.to_pylist()


def test_every_type_that_parquet_can_hold_comes_through_unchanged(tmp_path, opened, read_batches):
    table = pa.table(
        {
            "decimal": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "decimal256": pa.array([decimal.Decimal("1e30"), None], pa.decimal256(60, 4)),
            "zoned": pa.array([1, None], pa.timestamp("us", tz="Europe/Berlin")),
            "nanos": pa.array([1, None], pa.timestamp("ns")),
            "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
            "nested": pa.array([{"a": [{"b": "x"}]}, None]),
            "dictionary": pa.array(["a", None]).dictionary_encode(),
            "large_string": pa.array(["a", None], pa.large_string()),
            "large_binary": pa.array([b"\xff", None], pa.large_binary()),
            "large_list": pa.array([[1, None], None], pa.large_list(pa.int8())),
            "fixed_binary": pa.array([b"abc", None], pa.binary(3)),
            "fixed_list": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
            "half": pa.array([1.5, None], pa.float16()),
            "date": pa.array([1, None], pa.date32()),
            "time": pa.array([1, None], pa.time64("us")),
            "duration": pa.array([1, None], pa.duration("s")),
            "uuid": pa.array([b"0" * 16, None], pa.uuid()),
            "tensor": pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], None], pa.list_(pa.int32(), 2))
            ),
            "unsigned": pa.array([2**64 - 1, None], pa.uint64()),
            "null": pa.nulls(2),
        }
    )
    pq.write_table(table, tmp_path / "all.parquet")
    # What pyarrow itself reads is what the file holds.
    expected = pq.read_table(tmp_path / "all.parquet")
    source = opened(path="all.parquet")
    assert source.schema.equals(expected.schema, check_metadata=False)
    read = pa.Table.from_batches([batch.columns for batch in read_batches(source)])
    assert read.equals(expected)
    assert read.schema.types == table.schema.types


def test_memory_does_not_grow_with_a_row_group(tmp_path, opened):
    path = tmp_path / "big.parquet"
    table = pa.table({"text": [f"{n:08d}" * 128 for n in range(65_536)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=65_536)
    assert pq.read_metadata(path).num_row_groups == 1
    del table
    source = opened(path="big.parquet")
    before, highest = pa.total_allocated_bytes(), 0
    for batch in source.batches(RowPosition(0, 0, 0)):
        highest = max(highest, pa.total_allocated_bytes() - before)
        del batch
    assert highest < 16 << 20  # of 64 MiB


def test_long_rows_come_in_small_batches(tmp_path, opened, read_batches):
    pq.write_table(pa.table({"text": ["x" * (1 << 20)] * 32}), tmp_path / "a.parquet", use_dictionary=False)
    assert max(len(batch) for batch in read_batches(opened(path="a.parquet"))) <= 4


def test_what_is_no_parquet_file_is_named(tmp_path, opened):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SourceError, match=r"a\.parquet is not a readable Parquet file"):
        opened(path="a.parquet")


def test_a_thousand_files_need_few_handles(tmp_path):  # BS-03
    for number in range(1000):
        pq.write_table(pa.table({"n": [number]}), tmp_path / f"part-{number}.parquet")
    script = """
        import resource, sys
        from pathlib import Path
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        from batchgen.jobs.row import RowPosition
        from batchgen.jobs.sections import InputSpec
        from batchgen.jobs.sources import open_source
        source = open_source(InputSpec(path=("part-*.parquet",)), Path(sys.argv[1]))
        batches = source.batches(RowPosition(0, 0, 0))
        assert [value for batch in batches for value in batch.columns["n"].to_pylist()] == list(range(1000))
    """
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 256
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=60)
