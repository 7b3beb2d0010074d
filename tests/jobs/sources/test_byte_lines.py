import io

from hypothesis import given
from hypothesis import strategies as st

from batchgen.jobs.sources.byte_lines import read_lines


@given(content=st.binary(max_size=60).map(lambda raw: raw.replace(b"\x00", b"\n")))
def test_lines_are_the_parts_between_line_feeds(content):
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    lines = list(read_lines(io.BytesIO(content)))
    assert [line.content for line in lines] == expected
    assert [line.number for line in lines] == list(range(1, len(expected) + 1))


def test_a_line_beyond_the_limit_is_skipped_whole():
    content = b"ok\n" + b"x" * 100 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11
    lines = list(read_lines(io.BytesIO(content), max_bytes=10))
    assert [(line.content, line.is_too_long) for line in lines] == [
        (b"ok", False),
        (b"", True),
        (b"y" * 10, False),
        (b"", True),
    ]
