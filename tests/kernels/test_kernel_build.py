"""Compiling the C kernels: once, safely when many do it, and no harm done where there is no compiler."""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchgen.errors import ConfigError
from batchgen.kernels.cpu import build
from batchgen.kernels.cpu.library import Library

# A build that takes a fraction of a second.
QUICK = tuple(flag for flag in build.FLAGS if flag not in ("-O3", "-march=native"))

NO_COMPILER = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
import torch
from batchgen.errors import KernelError
from batchgen.kernels.ops import Quantized, choose
kernels = choose("cpu", "float32", head_dim=64)
for kv_dtype in ("float32", "float16", "bfloat16", "int8", "fp8"):
    choices = choose("cpu", "float32", head_dim=64, kv_dtype=kv_dtype).choices
    assert {choice.backend for choice in choices.values()} == {"reference"}, choices
print(kernels.choices["linear"])
packed = kernels.pack_linear(torch.eye(2))
print(kernels.linear(torch.tensor([[1.0, 2.0]]), packed).tolist())
integers = kernels.pack_int8(torch.tensor([[3, 0], [0, 1]], dtype=torch.int8), torch.tensor([1.0, 0.5]))
rounded = kernels.quantize(torch.tensor([[127.0, 2.0]]), Quantized.empty(1, 2, 8))
print(kernels.linear(rounded, integers).tolist())
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


def test_compiling_is_said_once_and_without_a_log_set_up(tmp_path, caplog):
    for _ in range(2):
        build.library_path(tmp_path, QUICK)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "compiling the C kernels for this machine (once, ten seconds or more)" in record.message


def test_what_a_killed_build_left_is_removed_but_not_what_another_works_on(tmp_path):
    old, new = tmp_path / "kernels-0-a.tmp", tmp_path / "kernels-0-b.tmp"
    for folder in (old, new):
        folder.mkdir()
        (folder / "linear.o").write_bytes(b"half")
    os.utime(old, (0, 0))
    build.library_path(tmp_path, QUICK)
    assert not old.exists()
    assert new.exists()


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


def test_cache_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    path = build.library_path(tmp_path / "file" / "kernels", QUICK)
    Library(path)
    assert path.parent.stat().st_mode & 0o077 == 0
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "cannot be written" in caplog.text
    assert "compiling the C kernels for this machine (for this process, ten seconds or more)" in caplog.text
    assert "set XDG_CACHE_HOME" in caplog.text


@pytest.fixture
def one_source(tmp_path, monkeypatch):
    """Compiles one line in place of the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text("int one;")
    monkeypatch.setattr(build, "__file__", str(folder / "build.py"))
    return folder


def test_cache_folder_that_is_mounted_noexec(one_source, tmp_path, monkeypatch, caplog):
    noexec = SimpleNamespace(f_flag=os.ST_NOEXEC)
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: noexec if Path(path) == tmp_path else real(path))
    path = build.library_path(tmp_path, QUICK)
    assert path.parent != tmp_path
    assert "is mounted noexec" in caplog.text
    monkeypatch.setattr(os, "statvfs", lambda _: noexec)
    with pytest.raises(build.BuildError, match=r"no place for the compiled kernels: .* set XDG_CACHE_HOME"):
        build.library_path(tmp_path, QUICK)


def test_what_is_compiled_in_a_temporary_folder_goes_with_the_process(one_source, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    code = f"""
from pathlib import Path
from batchgen.kernels.cpu import build
build.__file__ = {build.__file__!r}
path = build.library_path(Path({str(tmp_path / "cache" / "kernels")!r}), {QUICK!r})
assert path.exists()
print(path)
"""
    assert not Path(_run(code).strip()).parent.exists()


def test_cc_names_the_compiler(one_source, tmp_path, monkeypatch):
    gcc = shutil.which("gcc") or shutil.which("cc")
    (tmp_path / "my compiler").write_text(f'#!/bin/sh\necho ran >> {tmp_path}/log\nexec {gcc} "$@"\n')
    (tmp_path / "my compiler").chmod(0o700)
    monkeypatch.setenv("CC", f"'{tmp_path}/my compiler' -O1")
    assert build.find_compiler() == (f"{tmp_path}/my compiler", "-O1")
    assert build.library_path(tmp_path / "cache", QUICK).exists()
    # Which version, the one source, the library.
    assert (tmp_path / "log").read_text().count("ran") == 3
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.BuildError, match="CC names 'no-such-compiler'"):
        build.find_compiler()


def _macros() -> set[str]:
    """What the compiler defines with the flags for this machine."""
    command = [*build.find_compiler(), *build.machine_flags(), "-dM", "-E", "-x", "c", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[1] for line in text.splitlines()}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of instruction sets are x86's")
def test_the_widest_instruction_set_can_be_named(monkeypatch):
    all_of_it = _macros()
    wide = re.compile("__(AVX512|AMX|AVXVNNI)")
    monkeypatch.setenv(build.ISA_VARIABLE, "avx512")
    assert _macros() == {name for name in all_of_it if not name.startswith("__AMX")}
    monkeypatch.setenv(build.ISA_VARIABLE, "avx2")
    assert not any(map(wide.match, _macros()))
    assert ("__AVX2__" in _macros()) == ("__AVX2__" in all_of_it)
    monkeypatch.setenv(build.ISA_VARIABLE, "sse2")
    assert "__SSE2__" in _macros()
    assert not {"__AVX__", "__SSE3__"} & _macros()
    monkeypatch.setenv(build.ISA_VARIABLE, "avx1024")
    with pytest.raises(
        ConfigError, match="BATCHGEN_CPU_ISA is 'avx1024'; on x86_64 it may be sse2, avx2, avx512"
    ):
        build.machine_flags()
    monkeypatch.setenv(build.ISA_VARIABLE, "")
    assert build.machine_flags() == build.FLAGS


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
    out = _run(NO_COMPILER, PATH=str(tmp_path), CC="", XDG_CACHE_HOME=str(tmp_path)).splitlines()
    assert [line.split()[0] for line in out].count("WARNING") == 1
    assert "no C compiler" in out[0]
    assert out[1].startswith("reference (the C kernels are not available: no C compiler")
    assert "install gcc" in out[0]
    assert out[2] == "[[1.0, 2.0]]"
    assert out[3] == "[[381.0, 1.0]]"
    assert out[4].startswith("kernel_backend='cpu' cannot serve linear")
    assert "no C compiler" in out[5]
    assert "reproducible" in out[5]


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
