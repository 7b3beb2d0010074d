"""Memory in huge pages: aligned, apart, zero, and given back."""

import gc
import weakref

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


def test_a_full_chunk_is_given_back():
    arena = Arena()
    first = arena.take(CHUNK_BYTES // 8)
    gone = weakref.ref(first._base if first._base is not None else first)
    second = arena.take(CHUNK_BYTES // 4 - 100)
    del first
    gc.collect()
    assert gone() is None
    second.fill_(2.0)
