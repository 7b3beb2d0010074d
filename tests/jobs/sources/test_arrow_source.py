import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from batchgen.errors import SourceError
from batchgen.jobs.row import RowPosition


def write(path, batches, *, as_file=False, **options):
    make = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, batches[0].schema, **options) as writer:
        for batch in batches:
            writer.write_batch(batch)


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_streams_and_files_are_told_apart_and_read_from_any_row(
    tmp_path, opened, read_rows, as_file, compression
):
    batches = [pa.record_batch({"n": range(start, start + 1500)}) for start in (0, 1500)]
    options = pa.ipc.IpcWriteOptions(compression=compression)
    write(tmp_path / "a.arrow", batches, as_file=as_file, options=options)
    source = opened(path="a.arrow")
    assert source.num_rows == 3000
    everything = read_rows(source)
    assert [row[3]["n"] for row in everything] == list(range(3000))
    for start in (1, 1023, 1024, 1499, 1500, 2999):
        assert read_rows(source, 0, start, start) == everything[start:]
    assert read_rows(source, 0, 3000, 3000) == []


def test_every_arrow_type_comes_through_unchanged(tmp_path, opened, read_batches):
    columns = {
        "view": pa.array(["a", None], pa.string_view()),
        "list_view": pa.array([[1], None], pa.list_view(pa.int64())),
        "interval": pa.array([pa.MonthDayNano([1, 2, 3]), None], pa.month_day_nano_interval()),
        "run_ends": pa.RunEndEncodedArray.from_arrays([2], ["x"]),
        "union": pa.UnionArray.from_sparse(
            pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
        ),
        "ordered": pa.DictionaryArray.from_arrays(pa.array([1, None], pa.int8()), ["a", "b"], ordered=True),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None])),
        "null": pa.nulls(2),
        "decimal256": pa.array([1, None], pa.decimal256(60, 2)),
        "zoned": pa.array([1, None], pa.timestamp("ns", tz="+02:00")),
        "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
    }
    batch = pa.record_batch(columns)
    write(tmp_path / "a.arrow", [batch])
    source = opened(path="a.arrow")
    assert source.schema.equals(batch.schema)
    (read,) = read_batches(source)
    assert read.columns.equals(batch)


def test_unknown_extension_types_keep_their_name(tmp_path, opened, read_batches):
    metadata = {"ARROW:extension:name": "acme.thing", "ARROW:extension:metadata": "v1"}
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"x"])], schema=pa.schema([pa.field("thing", pa.binary(), metadata=metadata)])
    )
    write(tmp_path / "a.arrow", [batch])
    (read,) = read_batches(opened(path="a.arrow"))
    assert read.columns.schema.equals(batch.schema, check_metadata=True)


def test_hugging_face_features_stay_on_the_schema(tmp_path, opened):
    features = Features({"label": ClassLabel(names=["no", "yes"]), "text": Value("string")})
    Dataset.from_dict({"label": [1], "text": ["x"]}, features=features).save_to_disk(tmp_path / "saved")
    source = opened(path="saved")
    assert Features.from_arrow_schema(source.schema) == features


def test_pandas_notes_do_not(tmp_path, opened):
    batch = pa.record_batch({"n": [1]}).replace_schema_metadata({"pandas": "{}"})
    write(tmp_path / "a.arrow", [batch])
    assert opened(path="a.arrow").schema.metadata is None


def test_one_huge_batch_is_cut(tmp_path, opened):
    write(tmp_path / "a.arrow", [pa.record_batch({"t": ["x" * 100_000] * 1000})])
    lengths = [len(batch) for batch in opened(path="a.arrow").batches(RowPosition(0, 0, 0))]
    assert sum(lengths) == 1000
    assert max(lengths) <= 42


def test_what_is_no_arrow_file_is_named(tmp_path, opened):
    (tmp_path / "a.arrow").write_bytes(b"no")
    with pytest.raises(SourceError, match=r"a\.arrow is not a readable Arrow file"):
        opened(path="a.arrow")
    (tmp_path / "b.arrow").write_bytes(b"")
    with pytest.raises(SourceError, match=r"b\.arrow is not a readable Arrow file"):
        opened(path="b.arrow")


def test_a_stream_that_was_cut_is_an_error(tmp_path, opened, read_rows):
    write(tmp_path / "a.arrow", [pa.record_batch({"t": ["x" * 100] * 1000})] * 3)
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=r"a\.arrow is not a readable Arrow file"):
        read_rows(opened(path="a.arrow"))
