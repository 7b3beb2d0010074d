import gzip

import pytest

from batchgen.errors import SourceError
from batchgen.outputs import FailureCode


def test_each_line_is_a_row(tmp_path, opened, read_rows):
    (tmp_path / "a.txt").write_bytes("\ufefffirst\r\n\nthird\u2028still\n last".encode())
    rows = read_rows(opened(path="a.txt"))
    assert [row[3]["text"] for row in rows] == ["first", "", "third\u2028still", " last"]
    assert [row[1] for row in rows] == [0, 1, 2, 3]


def test_compressed_text_starts_at_any_row(tmp_path, opened, read_rows):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(3000))))
    source = opened(path="a.txt.gz")
    everything = read_rows(source)
    assert len(everything) == 3000
    assert read_rows(source, 0, 2048, 2048) == everything[2048:]


def test_a_line_that_is_no_utf8_is_a_failed_row(tmp_path, opened, read_batches):
    (tmp_path / "a.txt").write_bytes(b"x\na\xff\ny\n")
    (batch,) = read_batches(opened(path="a.txt"))
    assert batch.columns["text"].to_pylist() == ["x", None, "y"]
    assert batch.failures[1].code == FailureCode.INVALID_ENCODING
    assert batch.failures[1].message == "line 2 is not UTF-8 (byte 2 of the line)"


def test_its_one_column_has_its_type(tmp_path, opened):
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(SourceError, match="text files declare their types themselves"):
        opened(path="a.txt", schema={"text": "int64"})
