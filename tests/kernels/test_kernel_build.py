"""Compiling the C kernels: once, safely when many do it, and no harm done where there is no compiler."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchgen.kernels.cpu import build
from batchgen.kernels.cpu.library import Library

# A build that takes a fraction of a second.
QUICK = tuple(flag for flag in build.FLAGS if flag not in ("-O3", "-march=native"))

NO_COMPILER = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
import torch
from batchgen.errors import KernelError
from batchgen.kernels.ops import choose
kernels = choose("cpu", "float32", head_dim=64)
choose("cpu", "float32", head_dim=64)
print(kernels.choices["linear"])
packed = kernels.pack_linear(torch.eye(2))
print(kernels.linear(torch.tensor([[1.0, 2.0]]), packed).tolist())
for wish in ({"backend": "cpu"}, {"reproducible": True}):
    try:
        choose("cpu", "float32", head_dim=64, **wish)
    except KernelError as error:
        print(error)
"""


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


def test_second_build_is_found_in_the_cache(tmp_path):
    first = build.library_path(tmp_path, QUICK)
    before = first.stat()
    assert build.library_path(tmp_path, QUICK) == first
    after = first.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [first]
    Library(first)


def test_key_depends_on_all_that_can_change_the_library(tmp_path, monkeypatch):
    compiler = build.find_compiler()
    keys = {build.build_key(compiler, QUICK), build.build_key(compiler, (*QUICK, "-O1"))}
    monkeypatch.setattr(build, "cpu_features", lambda: "another processor")
    keys.add(build.build_key(compiler, QUICK))
    monkeypatch.setattr(build, "_compiler_version", lambda _: "another compiler")
    keys.add(build.build_key(compiler, QUICK))
    (tmp_path / "one.c").write_text("int one;")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    keys.add(build.build_key(compiler, QUICK))
    (tmp_path / "one.c").write_text("int two;")
    keys.add(build.build_key(compiler, QUICK))
    assert len(keys) == 6


def test_many_builders_at_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build.library_path(tmp_path, QUICK), range(4)))
    assert len(set(paths)) == 1
    assert list(tmp_path.iterdir()) == [paths[0]]
    Library(paths[0])


def test_failing_compiler_is_reported_and_leaves_nothing(tmp_path):
    with pytest.raises(build.BuildError, match=r"failed with status.*no-such-flag"):
        build.library_path(tmp_path, (*QUICK, "--no-such-flag"))
    assert not list(tmp_path.iterdir())


def test_cache_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    path = build.library_path(tmp_path / "file" / "kernels", QUICK)
    assert path.exists()
    assert path.parent.stat().st_mode & 0o077 == 0


def test_cache_folder_follows_the_xdg_rule(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.default_cache_dir() == tmp_path / "batchgen" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.default_cache_dir() == tmp_path / "home" / ".cache" / "batchgen" / "kernels"


def _run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_without_a_compiler_the_reference_runs_with_one_warning(tmp_path):
    # A C compiler in the PATH is the only way to one; an empty folder is a PATH without.
    out = _run(NO_COMPILER, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)).splitlines()
    assert [line.split()[0] for line in out].count("WARNING") == 1
    assert "no C compiler" in out[0]
    assert out[1].startswith("reference (the C kernels are not available: no C compiler")
    assert out[2] == "[[1.0, 2.0]]"
    assert out[3].startswith("kernel_backend='cpu' cannot serve linear")
    assert "no C compiler" in out[4]
    assert "reproducible" in out[4]


def test_damaged_library_is_made_again(tmp_path):
    path = build.library_path(tmp_path, QUICK)
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    # Loading it as it is would kill this process.
    again = build.library_path(tmp_path, QUICK)
    Library(again)
    assert again.stat().st_size > 5000
    assert list(tmp_path.iterdir()) == [again]


def test_the_openmp_runtime_is_torchs_own():
    """A second runtime would mean a second pool of threads on the same cores."""
    code = (
        "import torch; from batchgen.kernels.cpu.library import load; load()\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split('/')[-1]}))"
    )
    assert _run(code).strip() == "1"
