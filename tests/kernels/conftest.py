"""Kernels by backend: all that this machine has, and the C kernels built for other instruction sets."""

import platform
import re
from pathlib import Path

import pytest
import torch

from batchgen.kernels import cpu
from batchgen.kernels.backend import BACKENDS, OPERATIONS, Choice
from batchgen.kernels.cpu import build
from batchgen.kernels.cpu.library import Library
from batchgen.kernels.ops import Kernels, choose

BASE_FLAGS = tuple(flag for flag in build.FLAGS if flag != "-march=native")
# Name of a build -> flags, and the instruction sets it needs.
OTHER_BUILDS = {"cpu-avx2": (("-mavx2", "-mfma"), {"avx2", "fma"}), "cpu-generic": ((), set())}


# As above, for the layers on integers alone, which have a path for each. Quick to compile, not to run.
INT8_BUILDS = {
    "cpu-avx512": (("-march=x86-64-v4", "-O1"), {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "cpu-avx-vnni": (("-march=x86-64-v3", "-mavxvnni", "-O1"), {"avx2", "fma", "avx_vnni"}),
    **OTHER_BUILDS,
}


def _features() -> set[str]:
    return set(re.split(r"[\s=;]+", build.cpu_features()))


def _available() -> list[str]:
    names = [name for name in BACKENDS if BACKENDS.get(name).unavailable("cpu") is None]
    if "cpu" in names and platform.machine() == "x86_64":
        names += [name for name, (_, needs) in OTHER_BUILDS.items() if needs <= _features()]
    return names


def _register_build(name: str, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> None:
    if name not in BACKENDS:
        folder: Path = tmp_path_factory.getbasetemp() / "kernels"
        backend = cpu.CpuBackend()
        backend.__dict__["library"] = Library(build.library_path(folder, (*BASE_FLAGS, *flags)))
        BACKENDS.register(name)(backend)


def _all_of(backend: str) -> Kernels:
    return Kernels({op: Choice(backend, "under test") for op in OPERATIONS}, dtype="float32", device="cpu")


@pytest.fixture(scope="session", params=_available())
def backend(request, tmp_path_factory):
    """Name of a backend that runs here; builds for other instruction sets are registered while tests run."""
    name = request.param
    if name in OTHER_BUILDS:
        _register_build(name, OTHER_BUILDS[name][0], tmp_path_factory)
    return name


@pytest.fixture
def make_kernels(backend):
    """Makes Kernels whose every operation is the backend's: make_kernels(head_dim, block_size)."""

    def make(head_dim: int = 64, block_size: int = 16) -> Kernels:
        if backend in OTHER_BUILDS:
            return _all_of(backend)
        return choose("cpu", "float32", backend=backend, head_dim=head_dim, block_size=block_size)

    return make


@pytest.fixture
def make_invariant_kernels(make_kernels, backend):
    """As make_kernels, for backends that promise the same bits in any batch."""
    if backend == "reference":
        pytest.skip("the reference promises no bits")
    return make_kernels


def _int8_paths() -> list[str]:
    """ "amx" and "vectors" are two paths of the machine's own build; the rest are builds."""
    names = [name for name in _available() if name == "cpu"]
    if not names:
        return []
    found = ["vectors"]
    if BACKENDS.get("cpu").library.int8_use_amx(1):
        found.append("amx")
    if platform.machine() == "x86_64":
        found += [name for name, (_, needs) in INT8_BUILDS.items() if needs <= _features()]
    return found


@pytest.fixture(scope="session", params=_int8_paths())
def int8_path(request, tmp_path_factory):
    """Name of a way to multiply integers that runs here."""
    if request.param in INT8_BUILDS:
        _register_build(request.param, INT8_BUILDS[request.param][0], tmp_path_factory)
    return request.param


@pytest.fixture
def int8_kernels(int8_path):
    """Kernels of that path."""
    if int8_path in INT8_BUILDS:
        yield _all_of(int8_path)
        return
    use_amx = BACKENDS.get("cpu").library.int8_use_amx
    assert bool(use_amx(int8_path == "amx")) == (int8_path == "amx")
    yield _all_of("cpu")
    use_amx(1)


def _on_threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    """Runs a test on that many threads."""
    yield from _on_threads(request.param)


@pytest.fixture
def one_thread():
    """Runs a test on one thread: many small operations are slow on two busy ones."""
    yield from _on_threads(1)
