import csv
import io

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import SourceError
from batchgen.jobs.row import RowPosition
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources import open_source
from batchgen.outputs import FailureCode


def values(rows):
    return [row[3] for row in rows]


def as_python_reads(path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_quoted_newlines_are_kept_at_any_size(tmp_path, opened, read_rows):  # BG-05
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["id", "prompt"])
        writer.writerows((number, "ab\ncd") for number in range(50_000))
    assert path.stat().st_size > 800_000
    rows = values(read_rows(opened(path="a.csv")))
    assert rows == as_python_reads(path)
    assert len(rows) == 50_000


@pytest.mark.parametrize("padding", range(1_048_560, 1_048_580))
def test_a_crlf_inside_a_cell_survives_the_edges_of_buffers(tmp_path, opened, read_rows, padding):  # BG-05
    (tmp_path / "a.csv").write_bytes(b"p,q\r\n" + b"x" * (padding - 5) + b',"a\r\nb"\r\n"c\r\n","d"\r\n')
    first, second = values(read_rows(opened(path="a.csv")))
    assert first["q"] == "a\r\nb"
    assert second == {"p": "c\r\n", "q": "d"}


def test_crlf_row_endings_leave_nothing_in_the_last_column(tmp_path, opened, read_rows):  # BG-05
    (tmp_path / "a.csv").write_bytes(b"p,q\r\n1,2\r\n3,4\r\n")
    assert values(read_rows(opened(path="a.csv"))) == [{"p": "1", "q": "2"}, {"p": "3", "q": "4"}]


@pytest.mark.parametrize("header", [b"prompt,q", b'"prompt",q'])
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path, opened, read_rows, header):  # BS-01
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + header + b"\nx,y\n")
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + header + b"\nz,w\n")
    source = opened(path=["a.csv", "b.csv"])
    assert source.schema.names == ["prompt", "q"]
    assert [row["prompt"] for row in values(read_rows(source))] == ["x", "z"]


def test_utf_16_is_named(tmp_path, opened):  # BS-01
    (tmp_path / "a.csv").write_bytes("prompt\nx\n".encode("utf-16"))
    with pytest.raises(SourceError, match=r"a\.csv is UTF-16; convert it to UTF-8"):
        opened(path="a.csv")


def test_columns_are_text_unless_declared(tmp_path, opened, read_batches):
    (tmp_path / "a.csv").write_text("id,n,when\n007,1,2024-01-02\n008,,\n009,x,2024-01-03\n010,2,soon\n")
    assert opened(path="a.csv").schema.types == [pa.string()] * 3
    (batch,) = read_batches(opened(path="a.csv", schema={"n": "int64", "when": "date32"}))
    assert batch.columns["n"].to_pylist() == [1, None, None, None]
    assert batch.columns["id"].to_pylist() == ["007", "008", None, None]
    assert {offset: (failure.code, failure.message) for offset, failure in batch.failures.items()} == {
        2: (FailureCode.SCHEMA_MISMATCH, "line 4, column 'n': \"x\" is not int64"),
        3: (FailureCode.SCHEMA_MISMATCH, "line 5, column 'when': \"soon\" is not date32[day]"),
    }


def test_records_of_another_length_are_failed_rows(tmp_path, opened, read_batches):
    (tmp_path / "a.csv").write_text('p,q\n1,2\n3\n\n4,5,6\n"7\n",8\n')
    (batch,) = read_batches(opened(path="a.csv"))
    assert batch.columns.to_pylist() == [
        {"p": "1", "q": "2"},
        {"p": None, "q": None},
        {"p": None, "q": None},
        {"p": "7\n", "q": "8"},
    ]
    assert {offset: failure.message for offset, failure in batch.failures.items()} == {
        1: "line 3: 1 cells where the header has 2",
        2: "line 5: 3 cells where the header has 2",
    }


def test_bytes_that_are_no_utf8_fail_their_row(tmp_path, opened, read_batches):
    (tmp_path / "a.csv").write_bytes(b"p,q\nx,y\n\xff,z\nw,\xc3\xa9\n")
    (batch,) = read_batches(opened(path="a.csv"))
    assert batch.columns["q"].to_pylist() == ["y", None, "é"]
    assert batch.failures[1].code == FailureCode.INVALID_ENCODING
    assert batch.failures[1].message == "line 3, column 'p': not UTF-8"


def test_any_row_can_be_the_first(tmp_path, opened, read_rows):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["n"], *([f"{n}\nx"] for n in range(2100))])
    source = opened(path="a.csv")
    everything = read_rows(source)
    assert len(everything) == 2100
    for start in (0, 1, 1023, 1024, 1025, 2099):
        assert read_rows(source, 0, start, start) == everything[start:]
    assert read_rows(source, 0, 2100, 2100) == []


def test_cells_far_beyond_the_modules_default_limit_are_read(tmp_path, opened, read_rows):
    (tmp_path / "a.csv").write_text("p\n" + "x" * 1_000_000 + "\n")
    (row,) = values(read_rows(opened(path="a.csv")))
    assert len(row["p"]) == 1_000_000


def test_a_quote_that_is_never_closed_is_found(tmp_path, opened, read_rows, monkeypatch):
    from batchgen.jobs.sources import csv as module

    monkeypatch.setattr(module, "MAX_CELL_CHARS", 1000)
    before = csv.field_size_limit(1000)
    try:
        (tmp_path / "a.csv").write_text('p,q\n1,2\n3,"4\n' + "5,6\n" * 1000)
        with pytest.raises(SourceError, match=r"a\.csv, line \d+: .*is a closing quote missing before it\?"):
            read_rows(opened(path="a.csv"))
    finally:
        csv.field_size_limit(before)


def test_a_quote_that_is_open_at_the_end_of_the_file_fails_its_row(tmp_path, opened, read_batches):
    (tmp_path / "a.csv").write_text('p,q\n1,2\n\n3,"4\n5,6\n')
    (batch,) = read_batches(opened(path="a.csv"))
    assert batch.columns.to_pylist() == [{"p": "1", "q": "2"}, {"p": None, "q": None}]
    assert batch.failures[1].message.startswith("line 4: a quote that opens in this record is never closed")
    (tmp_path / "b.csv").write_text('p,"q\n1,2\n')
    with pytest.raises(SourceError, match=r"b\.csv: a quote in its line of column names is never closed"):
        opened(path="b.csv")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_has_no_columns(tmp_path, opened, content):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(SourceError, match=r"a\.csv is empty"):
        opened(path="a.csv")


def test_files_with_other_columns_are_refused(tmp_path, opened):
    (tmp_path / "a.csv").write_text("p,q\n1,2\n")
    (tmp_path / "b.csv").write_text("p\n1\n")
    with pytest.raises(SourceError, match=r"column 'q' is in a\.csv but not in b\.csv"):
        opened(path=["a.csv", "b.csv"])
    assert opened(path=["a.csv", "b.csv"], columns=["p"]).schema.names == ["p"]


def as_python_splits(path) -> list[list[str] | None]:
    """The records that are not blank, None for those of another length or with a quote left open."""
    text = path.read_bytes().decode()
    header, *records = non_blank(text)
    is_open = len(non_blank(text + "\nmore")) == 1 + len(records)
    rows = [cells if len(cells) == len(header) else None for cells in records]
    return [*rows[:-1], None] if is_open else rows


def non_blank(text: str) -> list[list[str]]:
    return [cells for cells in csv.reader(io.StringIO(text, newline="")) if cells]


def as_we_read(source) -> list[list[str] | None]:
    return [
        None if offset in batch.failures else list(row.values())
        for batch in source.batches(RowPosition(0, 0, 0))
        for offset, row in enumerate(batch.columns.to_pylist())
    ]


cells = st.text(st.sampled_from("ab\"',;\r\n \t\x00é\u2028"), max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=8),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_whatever_the_csv_module_writes_is_read_as_it_reads_it(tmp_path_factory, rows, quoting, ending):
    path = tmp_path_factory.mktemp("any") / "a.csv"
    buffer = io.StringIO()
    csv.writer(buffer, quoting=quoting, lineterminator=ending).writerows([("x", "y", "z"), *rows])
    path.write_text(buffer.getvalue(), encoding="utf-8", newline="")
    source = open_source(InputSpec(path=(str(path),)), path.parent)
    assert as_we_read(source) == as_python_splits(path)


@settings(max_examples=100, deadline=None)
@given(content=st.text(st.sampled_from('ab",\r\n'), max_size=60))
def test_any_text_is_split_into_records_as_the_csv_module_does(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "a.csv"
    path.write_text("x,y\n" + content, encoding="utf-8", newline="")
    source = open_source(InputSpec(path=(str(path),)), path.parent)
    assert as_we_read(source) == as_python_splits(path)
