import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import ResumeError
from batchgen.jobs.sources.identity import hash_content


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, values in files.items():
        pq.write_table(pa.table({"n": values}), folder / f"{name}.parquet")


def test_a_small_file_is_hashed_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"hello")
    assert hash_content(path) == "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def test_a_large_file_is_hashed_in_pieces_that_see_head_tail_and_between(tmp_path):
    path = tmp_path / "a"
    content = bytearray(os.urandom(100_000))
    limits = {"whole_bytes": 50_000, "piece_bytes": 100, "num_pieces": 64}
    path.write_bytes(content)
    original = hash_content(path, **limits)
    assert original.startswith("sha256-pieces:")
    assert original == hash_content(path, **limits)
    last = len(content) - 100
    for changed in (0, 99, len(content) - 1, last, last * 32 // 65, last * 1 // 65):
        other = bytearray(content)
        other[changed] ^= 1
        path.write_bytes(other)
        assert hash_content(path, **limits) != original, changed
    path.write_bytes(content + b"\x00")
    assert hash_content(path, **limits) != original


def test_an_input_elsewhere_or_touched_is_the_same_input(tmp_path, opened):
    write(tmp_path / "here", a=[1], b=[2])
    identity = opened(path="here").identity()
    (tmp_path / "here").rename(tmp_path / "there")
    os.utime(tmp_path / "there" / "a.parquet", (1, 1))
    for path in (
        "there",
        "there/*.parquet",
        str(tmp_path / "there"),
        ["there/a.parquet", "./there/b.parquet"],
    ):
        source = opened(path=path)
        assert source.identity() == identity
        source.verify(identity)


def test_a_resume_names_the_file_that_is_not_as_it_was(tmp_path, opened):  # BG-33
    folder = tmp_path / "data"
    write(folder, a=[1, 2], b=[3, 4])
    identity = opened(path="data").identity()
    write(folder, b=[3, 5])
    with pytest.raises(ResumeError, match=r"b\.parquet has changed since the first run: other content"):
        opened(path="data").verify(identity)
    write(folder, b=list(range(500)))
    with pytest.raises(
        ResumeError, match=r"b\.parquet has changed since the first run: \d+ bytes then, \d+ now"
    ):
        opened(path="data").verify(identity)
    write(folder, b=[3, 4], c=[6])
    with pytest.raises(ResumeError, match=r"c\.parquet was not there at the first run"):
        opened(path="data").verify(identity)
    (folder / "c.parquet").unlink()
    (folder / "b.parquet").unlink()
    # A file that is gone must be named even where the others lie alone in their folder now.
    with pytest.raises(ResumeError, match=r"b\.parquet of the first run is missing"):
        opened(path="data").verify(identity)
    write(folder, b=[3, 4])
    with pytest.raises(ResumeError, match="another order"):
        opened(path=["data/b.parquet", "data/a.parquet"]).verify(identity)
    opened(path="data").verify(identity)


def test_a_resume_names_an_option_that_differs(tmp_path, opened):
    write(tmp_path / "data", a=[1])
    identity = opened(path="data").identity()
    with pytest.raises(ResumeError, match=r"columns was \{'n': 'int64'\}, now \{'m': 'int64'\}"):
        opened(path="data", rename={"n": "m"}).verify(identity)
    (tmp_path / "x.csv").write_text("n\n1\n")
    plain = opened(path="x.csv").identity()
    with pytest.raises(ResumeError, match="columns was"):
        opened(path="x.csv", schema={"n": "int64"}).verify(plain)
