import pytest

from batchgen.errors import SourceError, UnknownNameError
from batchgen.jobs.sources.paths import common_root, data_suffix, expand_paths, format_of, natural_key


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")


def names(paths, folder):
    return [path.relative_to(folder).as_posix() for path in paths]


def test_numbers_in_names_count_as_numbers():  # BS-03
    given = ["part-10", "part-2", "b", "a10b2", "a10b10", "a9", "part-02", "", "10", "9"]
    assert sorted(given, key=natural_key) == [
        "",
        "9",
        "10",
        "a9",
        "a10b2",
        "a10b10",
        "b",
        "part-02",
        "part-2",
        "part-10",
    ]


def test_a_glob_comes_in_natural_order(tmp_path):  # BS-03
    touch(
        tmp_path,
        "part-10.jsonl",
        "part-2.jsonl",
        "part-1.jsonl",
        "_hidden.jsonl",
        ".part-0.jsonl",
        "other.txt",
    )
    found = expand_paths(["part-*.jsonl"], tmp_path, ())
    assert names(found, tmp_path) == ["part-1.jsonl", "part-2.jsonl", "part-10.jsonl"]
    assert len(expand_paths(["*.jsonl"], tmp_path, ())) == 3


def test_a_folder_means_its_data_files_at_any_depth(tmp_path):
    touch(
        tmp_path,
        "d/10/b.jsonl",
        "d/2/a.jsonl",
        "d/a.jsonl.gz",
        "d/README.md",
        "d/.git/x.jsonl",
        "d/_tmp/y.jsonl",
    )
    found = expand_paths(["d"], tmp_path, (".jsonl",))
    assert names(found, tmp_path) == ["d/2/a.jsonl", "d/10/b.jsonl", "d/a.jsonl.gz"]


def test_the_output_of_a_job_inside_its_input_folder_is_left_out(tmp_path):
    touch(tmp_path, "d/a.arrow", "d/out/data-00000.arrow", "d/out/.batchgen/lock")
    assert names(expand_paths(["d"], tmp_path, (".arrow",)), tmp_path) == ["d/a.arrow"]
    assert names(expand_paths(["d/out"], tmp_path, (".arrow",)), tmp_path) == ["d/out/data-00000.arrow"]


def test_a_list_keeps_its_order(tmp_path):
    touch(tmp_path, "b.jsonl", "a.jsonl", "c1.jsonl", "c0.jsonl")
    found = expand_paths(["b.jsonl", "c*.jsonl", "a.jsonl"], tmp_path, ())
    assert names(found, tmp_path) == ["b.jsonl", "c0.jsonl", "c1.jsonl", "a.jsonl"]


def test_a_file_whose_name_has_wildcards_is_itself(tmp_path):
    touch(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert names(expand_paths(["a[1].jsonl"], tmp_path, ()), tmp_path) == ["a[1].jsonl"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["nothing-*.jsonl"], r"input\.path: nothing matches 'nothing-\*\.jsonl'"),
        (["a.jsonl", "missing.jsonl"], r"input\.path: no such file or folder: .*missing\.jsonl"),
        (["empty"], r"input\.path: no file in .*empty ends in \.jsonl"),
        (["*.jsonl", "a.jsonl"], r"input\.path: .*a\.jsonl is meant twice"),
    ],
)
def test_patterns_that_mean_nothing_are_named(tmp_path, patterns, message):  # BS-03
    touch(tmp_path, "a.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=message):
        expand_paths(patterns, tmp_path, (".jsonl",))


def test_the_format_is_seen_from_the_names(tmp_path):
    formats = {".jsonl": "jsonl", ".csv": "csv"}
    assert data_suffix(tmp_path / "A.JSONL.GZ") == ".jsonl"
    assert format_of([tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst"], formats) == "jsonl"
    with pytest.raises(SourceError, match=r"several formats \(csv: .*b\.csv; jsonl: .*a\.jsonl\)"):
        format_of([tmp_path / "a.jsonl", tmp_path / "b.csv"], formats)
    with pytest.raises(
        SourceError, match=r"cannot tell the format of .*a\.dat by its name; set input\.format to one of"
    ):
        format_of([tmp_path / "a.dat"], formats)


def test_the_common_root_is_a_folder(tmp_path):
    assert common_root([tmp_path / "a.jsonl"]) == tmp_path
    assert common_root([tmp_path / "x" / "a.jsonl", tmp_path / "y" / "a.jsonl"]) == tmp_path


def test_names_are_relative_to_the_common_root(tmp_path, opened):
    touch(tmp_path, "d/x/a.jsonl", "d/y/a.jsonl")
    (tmp_path / "d/x/a.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "d/y/a.jsonl").write_text('{"n": 2}\n')
    assert [file.name for file in opened(path="d").files] == ["x/a.jsonl", "y/a.jsonl"]


def test_a_format_may_be_named(tmp_path, opened):
    (tmp_path / "a.dat").write_text('{"n": 1}\n')
    assert opened(path="a.dat", format="jsonl").schema.names == ["n"]
    assert opened(path="a.dat", format="json").schema.names == ["n"]
    with pytest.raises(
        UnknownNameError, match=r"input\.format: unknown input format 'jsnl'; did you mean 'jsonl'"
    ):
        opened(path="a.dat", format="jsnl")


@pytest.mark.parametrize(
    "section", [{"split": "train"}, {"name": "x"}, {"revision": "main"}, {"streaming": True}]
)
def test_keys_of_hub_datasets_are_refused_for_files(tmp_path, opened, section):
    touch(tmp_path, "a.jsonl")
    with pytest.raises(SourceError, match=f"input.{next(iter(section))} is for hub datasets"):
        opened(path="a.jsonl", **section)
