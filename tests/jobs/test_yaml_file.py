import pytest

from batchgen.errors import ConfigError
from batchgen.jobs.yaml_file import parse_yaml, read_yaml


def test_scalars_mean_what_yaml_1_2_says():  # BG-39
    document = parse_yaml(
        "small: 1e-5\nbig: 1e5\nword: no\non: on\nzeros: 0123\ntime: 12:30:45\ndate: 2026-11-29\n"
        "octal: 0o17\n"
        "spaced: 1_000\nyes: true\nnothing:\nquoted: '64'\n",
        "job.yaml",
    )
    assert document.data == {
        "small": 1e-5,
        "big": 1e5,
        "word": "no",
        "on": "on",
        "zeros": 123,
        "time": "12:30:45",
        "date": "2026-11-29",
        "octal": 15,
        "spaced": 1000,
        "yes": True,
        "nothing": None,
        "quoted": "64",
    }
    assert document.written[("zeros",)] == "0123"


def test_places_are_lines_from_one_and_fall_back_to_the_closest_mapping():
    document = parse_yaml("a:\n  b:\n    - x\n    - y\n", "job.yaml")
    assert document.place(("a", "b", 1)) == "job.yaml:4"
    assert document.place(("a", "b")) == "job.yaml:2"
    assert document.place(("a", "missing")) == "job.yaml:1"
    assert document.place(("elsewhere",)) == "job.yaml"


def test_anchors_and_merged_mappings_are_plain_values():
    document = parse_yaml("base: &base {n: 1, m: 2}\nuse:\n  <<: *base\n  n: 3\nlist: [*base]\n", "job.yaml")
    assert document.data["use"] == {"n": 3, "m": 2}
    assert document.data["list"] == [{"n": 1, "m": 2}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "job.yaml:3: key 'a' is given twice; first on line 1"),
        ("a:\n  b: 1\n  b: 2\n", "job.yaml:3: key 'b' is given twice; first on line 2"),
        ("a: !secret x\n", "job.yaml:1: unknown tag !secret"),
        ("a: !!set {x}\n", "job.yaml:1: unknown tag !!set"),
        ("a: &a [*a]\n", "job.yaml:1: a value that holds itself"),
        ("a: [1\n", "job.yaml:"),
        ("a: *nowhere\n", "job.yaml:1: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2\n", "job.yaml:2: "),
        ("%YAML 1.1\n---\na: no\n", "job.yaml: only YAML 1.2 is read"),
        ("? [1, 2]\n: 3\n", "job.yaml:1: a key must be a plain word"),
        ("<<: 1\n", "job.yaml:1: '<<' merges mappings only"),
    ],
)
def test_what_is_no_plain_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "job.yaml")
    assert str(caught.value).startswith(message)


def test_a_missing_file_and_another_encoding_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        read_yaml(tmp_path / "nowhere.yaml", "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9t\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 \(byte 3\)"):
        read_yaml(tmp_path / "latin.yaml", "latin.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path, "folder")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(tmp_path / "bom.yaml", "bom.yaml").data == {"a": 1}
