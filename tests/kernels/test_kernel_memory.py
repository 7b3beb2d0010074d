"""Memory in huge pages: aligned, apart, zero, and given back."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from batchgen.kernels.cpu.memory import CHUNK_BYTES, HUGE_PAGE, Arena, allocate


@pytest.mark.parametrize("count", [0, 1, 1000, HUGE_PAGE // 4 + 1])
def test_allocate_begins_on_a_huge_page(count):
    tensor = allocate(count)
    assert tensor.shape == (count,)
    assert tensor.dtype == torch.float32
    assert count == 0 or tensor.data_ptr() % HUGE_PAGE == 0
    assert not tensor.any()
    tensor.fill_(1.0)


def test_arena_hands_out_tensors_that_do_not_overlap():
    arena = Arena()
    sizes = [1, 17, 100, CHUNK_BYTES // 4 - 50, 1000, CHUNK_BYTES // 2, 5]
    tensors = [arena.take(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(float(number))
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert bool((tensor == number).all())


def test_threads_get_memory_of_their_own():
    arena, interval = Arena(), sys.getswitchinterval()

    def take(_thread: int) -> list[torch.Tensor]:
        return [arena.take(16) for _ in range(20_000)]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            tensors = [tensor for taken in pool.map(take, range(2)) for tensor in taken]
    finally:
        sys.setswitchinterval(interval)
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_a_chunk_is_given_back_with_its_last_tensor():
    arena = Arena()
    for _ in range(2):
        first, second = arena.take(CHUNK_BYTES // 16), arena.take(CHUNK_BYTES // 16)
        first.fill_(1.0)
        second.fill_(2.0)
        (chunk,) = _mappings(first, second)
        del first
        assert _mappings(second) == {chunk}
        assert bool((second == 2.0).all())
        address = second.data_ptr()
        del second
        gc.collect()
        assert _mapping_of(address) != chunk


def _mappings(*tensors: torch.Tensor) -> set[str | None]:
    return {_mapping_of(tensor.data_ptr()) for tensor in tensors}


def _mapping_of(address: int) -> str | None:
    """The line of /proc/self/maps that an address lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    return None
