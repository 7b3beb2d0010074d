import gzip
import json

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import SourceError
from batchgen.jobs.row import RowPosition
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources import open_source
from batchgen.outputs import FailureCode


def lines(*values) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def failures(batches) -> dict[int, tuple[str, str]]:
    return {
        batch.start.row + offset: (failure.code, failure.message)
        for batch in batches
        for offset, failure in batch.failures.items()
    }


def values(rows):
    return [row[3] for row in rows]


def test_bad_lines_are_failed_rows_and_blank_ones_none(tmp_path, opened, read_rows, read_batches):  # BS-05
    (tmp_path / "a.jsonl").write_bytes(
        b'{"p": "first"}\n\n   \nnull\n[1]\n"x"\n{"p": "cut in ha\n{"p": "good"}\r\n{"p": "last"}'
    )
    source = opened(path="a.jsonl")
    assert [row["p"] for row in values(read_rows(source))] == [
        "first",
        None,
        None,
        None,
        None,
        "good",
        "last",
    ]
    found = failures(read_batches(source))
    assert {row: code for row, (code, _) in found.items()} == {
        1: FailureCode.NOT_AN_OBJECT,
        2: FailureCode.NOT_AN_OBJECT,
        3: FailureCode.NOT_AN_OBJECT,
        4: FailureCode.INVALID_JSON,
    }
    # Lines are numbered as in the file, blank ones included.
    assert found[1][1] == "line 4 is a JSON null, not an object"
    assert found[4][1].startswith("line 7 is not JSON: ")


def test_lines_end_at_line_feeds_only(tmp_path, opened, read_rows):
    text = "a\u2028b\u2029c\x85d\x0ce\x1cf"
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"p": text}, ensure_ascii=False).encode() + b"\n")
    assert values(read_rows(opened(path="a.jsonl"))) == [{"p": text}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson", "a.json"])
def test_compressed_files_read_as_plain_ones(tmp_path, opened, read_rows, name):
    content = lines(*({"n": n} for n in range(2500)))
    half = len(content) // 2
    packed = {
        # Two members or frames, as concatenated files have.
        ".gz": lambda: gzip.compress(content[:half]) + gzip.compress(content[half:]),
        ".zst": lambda: zstandard.compress(content[:half]) + zstandard.compress(content[half:]),
    }.get(name[name.rindex(".") :], lambda: content)()
    (tmp_path / name).write_bytes(packed)
    source = opened(path=name)
    everything = read_rows(source)
    assert [row["n"] for row in values(everything)] == list(range(2500))
    assert read_rows(source, 0, 2047, 2047) == everything[2047:]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_cut_compressed_file_is_an_error_and_no_shorter_input(tmp_path, opened, read_rows, name):
    content = b"".join(b'{"n": "%032x"}\n' % (n * 2654435761 % 2**64) for n in range(20_000))
    packed = gzip.compress(content) if name.endswith("gz") else zstandard.compress(content)
    (tmp_path / name).write_bytes(packed[: len(packed) - 1000])
    with pytest.raises(SourceError, match=r"a\.jsonl\.\w+ cannot be read"):
        read_rows(opened(path=name))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, opened, read_rows):  # BS-01
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines({"prompt": "x"}))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines({"prompt": "y"}))
    assert values(read_rows(opened(path=["a.jsonl", "b.jsonl"]))) == [{"prompt": "x"}, {"prompt": "y"}]
    (tmp_path / "c.jsonl").write_bytes('{"prompt": "x"}\n'.encode("utf-16"))
    with pytest.raises(SourceError, match="UTF-16; convert it"):
        opened(path="c.jsonl")


def test_lone_surrogates_become_the_replacement_character_and_are_said(
    tmp_path, opened, read_batches
):  # BS-21
    (tmp_path / "a.jsonl").write_bytes(
        b'{"p": "good", "q": "x"}\n{"p": "a\\ud83db", "q": "y"}\n{"p": "z", "q": "\\uDE00"}\n'
        b'{"p": "\\ud83d\\ude00", "q": "\\\\ud83d"}\n'
    )
    (batch,) = read_batches(opened(path="a.jsonl"))
    assert batch.columns.to_pylist() == [
        {"p": "good", "q": "x"},
        {"p": "a\ufffdb", "q": "y"},
        {"p": "z", "q": "\ufffd"},
        {"p": "\U0001f600", "q": "\\ud83d"},
    ]
    assert set(batch.warnings) == {1, 2}
    assert "U+FFFD" in batch.warnings[1][0]
    assert not batch.failures


def test_a_line_that_is_no_utf8_is_a_failed_row(tmp_path, opened, read_batches):
    (tmp_path / "a.jsonl").write_bytes(b'{"p": "x"}\n{"p": "\xff"}\n{"p": "y"}\n')
    batches = read_batches(opened(path="a.jsonl"))
    assert failures(batches)[1][0] == FailureCode.INVALID_ENCODING
    assert "line 2 is not UTF-8 (byte 8" in failures(batches)[1][1]


def test_a_column_of_nulls_takes_the_type_of_its_first_value(tmp_path, opened, read_rows):  # BG-01
    (tmp_path / "a.jsonl").write_bytes(lines(*[{"p": "x", "note": None}] * 5000, {"p": "y", "note": "late"}))
    source = opened(path="a.jsonl")
    assert source.schema.field("note").type == pa.string()
    assert values(read_rows(source))[-1] == {"p": "y", "note": "late"}


def test_a_column_of_nothing_but_nulls_is_text(tmp_path, opened):
    (tmp_path / "a.jsonl").write_bytes(lines({"a": None, "b": [], "c": {"d": None}}))
    assert opened(path="a.jsonl").schema.types == [
        pa.string(),
        pa.list_(pa.string()),
        pa.struct([("d", pa.string())]),
    ]


def test_a_value_after_the_schema_lines_that_does_not_fit(tmp_path, opened, read_batches):  # BG-01
    head = [{"n": 1, "t": "x", "s": {"a": 1}}] * 10_000
    tail = [
        {"n": "word", "t": "x", "s": {"a": 1}},
        {"n": 2, "t": {"k": [1, None]}, "s": {"a": 1}},
        {"n": 2, "t": "x", "s": {"a": 1, "b": 2}},
        {"n": 2, "t": "x", "s": {"a": 1}, "new": True},
        {"n": 2.0, "t": "x", "s": {"a": 1, "b": None}, "new": None},
        {"n": 2, "t": "x", "s": {"a": "deep"}},
    ]
    (tmp_path / "a.jsonl").write_bytes(lines(*head, *tail))
    batches = read_batches(opened(path="a.jsonl"))
    last = batches[-1]
    first = 10_000 - last.start.row
    assert last.columns.slice(first).to_pylist() == [
        {"n": None, "t": None, "s": None},
        {"n": 2, "t": '{"k":[1,null]}', "s": {"a": 1}},
        {"n": None, "t": None, "s": None},
        {"n": None, "t": None, "s": None},
        {"n": 2, "t": "x", "s": {"a": 1}},
        {"n": None, "t": None, "s": None},
    ]
    found = failures(batches)
    assert found == {
        10_000: (FailureCode.SCHEMA_MISMATCH, "line 10001, column 'n': \"word\" is not int64"),
        10_002: (
            FailureCode.SCHEMA_MISMATCH,
            "line 10003, column 's.b' (2) is not in the schema; declare it in input.schema",
        ),
        10_003: (
            FailureCode.SCHEMA_MISMATCH,
            "line 10004, column 'new' (true) is not in the schema; declare it in input.schema",
        ),
        10_005: (FailureCode.SCHEMA_MISMATCH, "line 10006, column 's.a': \"deep\" is not int64"),
    }
    assert last.json_text == {"t": frozenset({first + 1})}


def test_a_failed_row_is_null_in_every_column(tmp_path, opened, read_batches):
    (tmp_path / "a.jsonl").write_bytes(lines({"a": "x", "b": 1}, {"a": 5, "b": True}))
    (batch,) = read_batches(opened(path="a.jsonl", schema={"b": "int64"}))
    assert batch.columns.to_pylist() == [{"a": "x", "b": 1}, {"a": None, "b": None}]
    assert batch.json_text.get("a", frozenset()) == frozenset()


def test_mixed_kinds_are_kept_as_json_text(tmp_path, opened, read_batches):  # BG-35
    rows = [{"id": "a"}, {"id": "a"}, {"id": 1}, {"id": "1"}, {}, {"id": ""}, {"id": {"x": "é"}}]
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    (batch,) = read_batches(opened(path="a.jsonl"))
    assert batch.columns["id"].to_pylist() == ["a", "a", "1", "1", None, "", '{"x":"é"}']
    assert batch.json_text == {"id": frozenset({2, 6})}


def test_a_later_value_of_another_kind_inside_a_struct_is_no_silent_text(tmp_path, opened, read_batches):
    rows = [*[{"m": [{"content": "x"}]}] * 10_000, {"m": [{"content": [1]}]}]
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    batches = read_batches(opened(path="a.jsonl"))
    assert failures(batches) == {
        10_000: (FailureCode.SCHEMA_MISMATCH, "line 10001, column 'm[0].content': [1] is not string")
    }


def test_the_same_ids_in_two_files_are_different_rows(tmp_path, opened, read_rows):  # BG-35
    (tmp_path / "a.jsonl").write_bytes(lines({"id": "a", "p": "1"}, {"id": "a", "p": "2"}))
    (tmp_path / "b.jsonl").write_bytes(lines({"id": "a", "p": "3"}))
    rows = read_rows(opened(path=["a.jsonl", "b.jsonl"]))
    assert [(file, row, index, values["p"]) for file, row, index, values in rows] == [
        (0, 0, 0, "1"),
        (0, 1, 1, "2"),
        (1, 0, 2, "3"),
    ]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ([1, -5], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([2**63, 1], pa.uint64()),
        ([2**63, -1], pa.string()),
        ([2**64], pa.string()),
        ([2**53 + 1, 0.5], pa.string()),
        ([True, None], pa.bool_()),
        ([True, 1], pa.string()),
        ([[1], [2.5], None], pa.list_(pa.float64())),
        ([[1], "x"], pa.string()),
        ([{"a": 1}, {"b": [None]}], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
        ([{}], pa.string()),
        ([{"a": [{"b": 1}, {"b": "x"}]}, {"a": None}], pa.string()),
        ([[1, "x"]], pa.string()),
        ([{f"k{n}": n for n in range(1001)}], pa.string()),
    ],
)
def test_the_type_that_holds_all_values_without_loss(tmp_path, opened, read_batches, found, kind):
    (tmp_path / "a.jsonl").write_bytes(lines(*({"v": value} for value in found)))
    source = opened(path="a.jsonl")
    assert source.schema.field("v").type == kind
    (batch,) = read_batches(source)
    assert not batch.failures
    read = batch.columns["v"].to_pylist()
    if kind == pa.string():
        assert [
            value if value is None or isinstance(value, str) else json.loads(text)
            for value, text in zip(found, read, strict=True)
        ] == found


def test_keys_that_a_file_lacks_are_null(tmp_path, opened, read_rows):
    (tmp_path / "a.jsonl").write_bytes(lines({"p": "x", "extra": 1}))
    (tmp_path / "b.jsonl").write_bytes(lines({"p": "y"}))
    for order in (["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"]):
        rows = values(read_rows(opened(path=order)))
        assert sorted((row["p"], row["extra"]) for row in rows) == [("x", 1), ("y", None)]


def test_files_whose_types_disagree_are_refused(tmp_path, opened):
    (tmp_path / "a.jsonl").write_bytes(lines({"p": "x"}))
    (tmp_path / "b.jsonl").write_bytes(lines({"p": {"a": 1}}))
    with pytest.raises(
        SourceError, match=r"column 'p' is string in a\.jsonl but struct<a: int64> in b\.jsonl"
    ):
        opened(path=["a.jsonl", "b.jsonl"])


def test_whole_and_broken_numbers_join_across_files(tmp_path, opened, read_rows):
    (tmp_path / "a.jsonl").write_bytes(lines({"score": 1}))
    (tmp_path / "b.jsonl").write_bytes(lines({"score": 0.5}))
    for order in (["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"]):
        source = opened(path=order)
        assert source.schema.field("score").type == pa.float64()
        assert sorted(row["score"] for row in values(read_rows(source))) == [0.5, 1.0]


def test_declared_types_are_taken_and_held_to(tmp_path, opened, read_batches):
    (tmp_path / "a.jsonl").write_bytes(
        lines(
            {
                "when": "2024-05-01T10:00:00",
                "price": "1.50",
                "tags": ["a"],
                "n": 1,
                "day": "2024-05-01",
                "f": 1,
            },
            {"when": "yesterday", "price": None, "tags": None, "n": 1, "day": None, "f": 1},
            {"when": None, "price": 2.25, "tags": [1], "n": 300, "day": None, "f": 1},
            {"when": None, "price": None, "tags": None, "n": 3, "day": None, "f": 16777217},
            {"when": None, "price": None, "tags": None, "n": 300, "day": None, "f": None},
            {"when": None, "price": None, "tags": None, "n": "3", "day": None, "f": None},
        )
    )
    source = opened(
        path="a.jsonl",
        schema={
            "when": "timestamp[ns]",
            "price": "decimal128(9, 2)",
            "tags": "list<string>",
            "n": "uint8",
            "day": "date32",
            "f": "float32",
            "absent": "int64",
        },
    )
    assert source.schema.field("when").type == pa.timestamp("ns")
    (batch,) = read_batches(source)
    assert batch.columns["when"].cast(pa.int64()).to_pylist() == [1714557600 * 10**9] + [None] * 5
    assert str(batch.columns["price"][0].as_py()) == "1.50"
    assert batch.columns["absent"].null_count == 6
    messages = {offset: failure.message for offset, failure in batch.failures.items()}
    assert messages == {
        1: "line 2, column 'when': \"yesterday\" is not timestamp[ns]",
        2: "line 3, column 'tags[0]': 1 is not string",
        3: "line 4, column 'f': 16777217 is not float",
        4: "line 5, column 'n': 300 is not uint8",
        5: "line 6, column 'n': \"3\" is not uint8",
    }


def test_columns_that_are_not_wanted_may_hold_anything(tmp_path, opened, read_batches):
    (tmp_path / "a.jsonl").write_bytes(lines(*[{"p": "x"}] * 10_001, {"p": "y", "new": 1}))
    batches = read_batches(opened(path="a.jsonl", columns=["p"]))
    assert failures(batches) == {}
    assert sum(len(batch) for batch in batches) == 10_002


def test_a_json_array_is_refused_with_the_way_out(tmp_path, opened):
    (tmp_path / "a.json").write_text('[\n {"p": "x"}\n]\n')
    with pytest.raises(
        SourceError, match=r"one JSON array, not JSON lines; convert it: jq -c '\.\[\]' a\.json"
    ):
        opened(path="a.json")


def test_deep_nesting_and_huge_numbers_fail_only_their_row(tmp_path, opened, read_batches):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"p": "x"}\n{"p": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b'}\n{"p": '
        + b"9" * 5000
        + b'}\n{"p": "y"}\n'
    )
    batches = read_batches(opened(path="a.jsonl"))
    assert {row: code for row, (code, _) in failures(batches).items()} == {
        1: FailureCode.INVALID_JSON,
        2: FailureCode.INVALID_JSON,
    }


@pytest.mark.parametrize("depth", [40, 99, 101, 500, 960])
def test_nesting_that_arrow_has_no_file_for_is_json_text_or_a_failed_row(
    tmp_path, opened, read_batches, depth
):
    for value in ("[" * depth + "1" + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        (tmp_path / "a.jsonl").write_text(f'{{"p": {value}}}\n{{"p": "y"}}\n{{"p": [1]}}\n')
        (batch,) = read_batches(opened(path="a.jsonl"))
        assert set(batch.failures) == ({0} if depth > 100 else set())
        shown = None if depth > 100 else value
        assert batch.columns.column("p").to_pylist() == [shown, "y", "[1]"]
    (tmp_path / "a.jsonl").write_text('{"p": ' + "[" * 40 + "1" + "]" * 40 + "}\n")
    assert opened(path="a.jsonl").schema.field("p").type == pa.string()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), json_values), min_size=1, max_size=8))
def test_any_json_comes_back_equal(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes(lines(*rows))
    if not any(rows):
        with pytest.raises(SourceError, match="no columns"):
            open_source(InputSpec(path=(str(path),)), path.parent)
        return
    source = open_source(InputSpec(path=(str(path),)), path.parent)
    (batch,) = source.batches(RowPosition(0, 0, 0))
    assert not batch.failures
    for offset, row in enumerate(rows):
        for name, array in zip(batch.columns.schema.names, batch.columns.columns, strict=True):
            same(row.get(name), array[offset].as_py(), array.type)


def same(given, read, kind, is_column=True):
    """The value read is the one given: as it is, or whole as JSON text where the column is text."""
    if given is None or read is None:
        # An absent key in a struct, and null, are one.
        assert given is None or given == {}
        assert read is None or kind == pa.string()
    elif pa.types.is_struct(kind):
        assert set(given) <= set(read)
        for field in kind:
            same(given.get(field.name), read[field.name], field.type, is_column=False)
    elif pa.types.is_list(kind):
        assert len(given) == len(read)
        for one, other in zip(given, read, strict=True):
            same(one, other, kind.value_type, is_column=False)
    elif kind == pa.string() and not isinstance(given, str):
        assert is_column
        assert json.loads(read) == given
    else:
        # Surrogate halves are never drawn by st.text(), so text is equal too.
        assert read == given
