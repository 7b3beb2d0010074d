import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset

from batchgen.errors import ResumeError, SourceError
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources.dataset_rows import IterableSource, MapStyleSource
from batchgen.jobs.sources.file_source import FileSource

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def options(**section) -> InputSpec:
    return InputSpec.model_validate({"path": "unused", **section})


def values(rows):
    return [row[3] for row in rows]


@pytest.mark.parametrize("builder", ["parquet", "json", "csv", "arrow", "text"])
def test_packaged_builders_read_their_files_as_files(tmp_path, opened, read_rows, builder):
    dataset = Dataset.from_dict({"text": [f"row {n}" for n in range(5)]})
    path = tmp_path / "data"
    if builder == "arrow":
        dataset.save_to_disk(path)
        path = path / "data-00000-of-00001.arrow"
    elif builder == "text":
        path.write_text("".join(f"row {n}\n" for n in range(5)))
    else:
        getattr(dataset, f"to_{builder}")(path)
    relative = str(path.relative_to(tmp_path))
    expected = load_dataset(builder, data_files=str(path), split="train").to_list()
    for data_files in (relative, [relative], {"train": relative}):
        source = opened(path=builder, data_files=data_files)
        assert isinstance(source, FileSource)
        assert values(read_rows(source)) == expected == dataset.to_list()


def test_the_split_of_data_files_must_be_clear(tmp_path, opened, read_rows):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"t": name}) + "\n")
    files = {"train": "a.jsonl", "test": ["b.jsonl"]}
    assert values(read_rows(opened(path="json", data_files=files, split="test"))) == [{"t": "b"}]
    with pytest.raises(SourceError, match=r"several splits; set input\.split to one of train, test"):
        opened(path="json", data_files=files)
    with pytest.raises(SourceError, match=r"no split 'tset'; did you mean 'test'"):
        opened(path="json", data_files=files, split="tset")


def test_saved_datasets_are_read_as_their_files(tmp_path, opened, read_rows):
    dataset = Dataset.from_dict({"n": range(10)})
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    source = opened(path="saved")
    assert isinstance(source, FileSource)
    assert source.num_rows == 10
    assert [file.name for file in source.files] == [f"data-0000{n}-of-00003.arrow" for n in range(3)]
    assert values(read_rows(source)) == dataset.to_list()
    # A selection is written out by save_to_disk, so its order is that of the files.
    dataset.select([7, 2]).save_to_disk(tmp_path / "selected")
    assert values(read_rows(opened(path="selected"))) == [{"n": 7}, {"n": 2}]


def test_saved_splits_are_chosen_by_name(tmp_path, opened, read_rows):
    splits = DatasetDict(train=Dataset.from_dict({"n": [1]}), test=Dataset.from_dict({"n": [2]}))
    splits.save_to_disk(tmp_path / "saved")
    assert values(read_rows(opened(path="saved", split="test"))) == [{"n": 2}]
    with pytest.raises(
        SourceError, match=r"saved has several splits; set input\.split to one of train, test"
    ):
        opened(path="saved")
    with pytest.raises(SourceError, match="has no split 'dev'"):
        opened(path="saved", split="dev")
    with pytest.raises(SourceError, match=r"input\.streaming does not apply"):
        opened(path="saved", split="test", streaming=True)
    with pytest.raises(SourceError, match="is one dataset without splits"):
        opened(path="saved/test", split="train")


def test_a_map_style_dataset_is_addressed_by_fingerprint_and_index(read_rows):
    dataset = Dataset.from_dict({"n": range(2500)}).select(range(2499, -1, -1))
    source = MapStyleSource(
        dataset, "org/name/train", options(rename={"n": "m"}), pinned={"revision": COMMIT}
    )
    everything = read_rows(source)
    assert [row["m"] for row in values(everything)] == list(range(2499, -1, -1))
    assert (source.num_rows, source.files[0].name) == (2500, "org/name/train")
    for start in (1, 1024, 2047, 2499):
        assert read_rows(source, 0, start, start) == everything[start:]
    assert read_rows(source, 0, 2500, 2500) == []
    identity = source.identity()
    source.verify(identity)
    other = MapStyleSource(
        dataset.select([0]), "org/name/train", options(rename={"n": "m"}), pinned={"revision": COMMIT}
    )
    with pytest.raises(ResumeError, match=r"org/name/train has changed since the first run: other content"):
        other.verify(identity)


def test_a_stream_is_counted_from_its_start(tmp_path, read_rows):
    pq.write_table(pa.table({"n": range(3000)}), tmp_path / "a.parquet", row_group_size=700)
    stream = load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), split="train", streaming=True)
    source = IterableSource(stream, "org/name/train", options(), pinned={})
    everything = read_rows(source)
    assert [row["n"] for row in values(everything)] == list(range(3000))
    for start in (1, 700, 1024, 2999):
        assert read_rows(source, 0, start, start) == everything[start:]
    assert source.num_rows is None
    assert "reads it again from its start" in source.remarks[-1]


def test_a_stream_without_declared_columns_takes_those_of_its_rows(read_rows):
    stream = IterableDataset.from_generator(lambda: iter([{"a": 1, "b": None}, {"a": 2, "b": "x"}]))
    source = IterableSource(stream, "stream", options(columns=["b"]), pinned={})
    assert values(read_rows(source)) == [{"b": None}, {"b": "x"}]


def test_a_stream_shuffled_without_a_seed_is_refused(tmp_path):
    pq.write_table(pa.table({"n": range(10)}), tmp_path / "a.parquet")
    stream = load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), split="train", streaming=True)
    for shuffled in (stream.shuffle(), stream.shuffle().filter(lambda row: True)):
        with pytest.raises(SourceError, match="shuffled without a seed"):
            IterableSource(shuffled, "stream", options(), pinned={})
    IterableSource(stream.shuffle(seed=7), "stream", options(), pinned={})


@pytest.fixture
def cached_dataset(tmp_path, monkeypatch):
    """A dataset of the hub in a local cache, as `huggingface_hub` lays it out."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    repository = cache / "datasets--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    (folder / "data").mkdir(parents=True)
    for split, rows in (("train", [1, 2]), ("test", [3])):
        pq.write_table(pa.table({"n": rows}), folder / "data" / f"{split}-00000-of-00001.parquet")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return folder


def test_a_cached_hub_dataset_is_pinned_and_read_as_files_offline(cached_dataset, opened, read_rows):
    source = opened(path="org/name", split="train")
    assert isinstance(source, FileSource)
    assert values(read_rows(source)) == [{"n": 1}, {"n": 2}]
    assert [file.name for file in source.files] == ["data/train-00000-of-00001.parquet"]
    identity = source.identity()
    assert (identity["dataset"], identity["revision"], identity["split"]) == ("org/name", COMMIT, "train")
    assert source.remarks == (f"dataset org/name is pinned to commit {COMMIT}",)
    with pytest.raises(SourceError, match=r"several splits; set input\.split to one of"):
        opened(path="org/name")


def test_a_slice_of_a_hub_dataset_is_read_by_index(cached_dataset, opened, read_rows):
    source = opened(path="org/name", split="train[1:]+test")
    assert isinstance(source, MapStyleSource)
    assert values(read_rows(source)) == [{"n": 2}, {"n": 3}]


def test_a_hub_dataset_can_be_streamed(cached_dataset, opened, read_rows):
    source = opened(path="org/name", split="train", streaming=True)
    assert isinstance(source, IterableSource)
    assert values(read_rows(source, 0, 1, 1)) == [{"n": 2}]


def test_what_is_neither_a_path_nor_on_the_hub_is_said(tmp_path, opened):
    with pytest.raises(SourceError, match=r"'org/nowhere' is no local path; the hub is switched off"):
        opened(path="org/nowhere")
    with pytest.raises(SourceError, match=r"no such file or folder: .*nowhere\.parquet"):
        opened(path="org/nowhere.parquet")
