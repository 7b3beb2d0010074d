"""Writing, reading and copying the KV cache: the layout is a backend's own, the block is outermost."""

import pytest
import torch

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.kv import KVCacheSpec


def _tokens(count: int, spec: KVCacheSpec, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, spec.num_kv_heads, spec.head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (33, 16), (8, 32), (80, 48), (1, 16)])
def test_what_is_stored_is_read(head_dim, block_size, make_kernels, num_threads):
    kernels = make_kernels(head_dim, block_size)
    spec = KVCacheSpec(3, head_dim, block_size, "float32")
    kv = kernels.allocate_kv(spec, 5, "cpu")
    kv.data.fill_(float("nan"))
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(1))[:40].to(torch.int32)
    key, value = _tokens(40, spec)
    kernels.store_kv(key, value, kv, slots)
    read_key, read_value = kernels.read_kv(kv, slots)
    assert torch.equal(read_key, key)
    assert torch.equal(read_value, value)


def test_slot_minus_one_is_stored_nowhere(make_kernels):
    kernels, spec = make_kernels(), KVCacheSpec(2, 64, 16, "float32")
    kv = kernels.allocate_kv(spec, 2, "cpu")
    kv.data.zero_()
    key, value = _tokens(3, spec)
    kernels.store_kv(key, value, kv, torch.tensor([-1, 31, -1], dtype=torch.int32))
    read_key, _ = kernels.read_kv(kv, torch.arange(32))
    assert torch.equal(read_key[31], key[1])
    assert not read_key[:31].any()


def test_slot_outside_of_the_pool_is_an_error(make_kernels):
    kernels, spec = make_kernels(), KVCacheSpec(2, 64, 16, "float32")
    kv = kernels.allocate_kv(spec, 2, "cpu")
    with pytest.raises(KernelError, match="outside"):
        kernels.store_kv(*_tokens(1, spec), kv, torch.tensor([32], dtype=torch.int32))


def test_tokens_may_be_views_of_a_wider_row(make_kernels):
    kernels, spec = make_kernels(), KVCacheSpec(2, 64, 16, "float32")
    kv = kernels.allocate_kv(spec, 1, "cpu")
    wide = torch.randn(4, 512)
    key, value = wide[:, 100:228].view(4, 2, 64), wide[:, 228:356].view(4, 2, 64)
    slots = torch.tensor([3, 1, 2, 0], dtype=torch.int32)
    kernels.store_kv(key, value, kv, slots)
    read_key, read_value = kernels.read_kv(kv, slots)
    assert torch.equal(read_key, key)
    assert torch.equal(read_value, value)


def test_wrong_tokens_are_refused(make_kernels):
    kernels, spec = make_kernels(), KVCacheSpec(2, 64, 16, "float32")
    kv = kernels.allocate_kv(spec, 1, "cpu")
    key, value = _tokens(1, spec)
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ShapeError):
        kernels.store_kv(key[:, :1], value[:, :1], kv, slots)
    with pytest.raises(ShapeError):
        kernels.store_kv(key.half(), value.half(), kv, slots)
    with pytest.raises(ShapeError):
        kernels.store_kv(key, value, kv, slots.long())


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (33, 32)])
def test_the_block_is_outermost_and_contiguous(head_dim, block_size, make_kernels):
    kernels, spec = make_kernels(head_dim, block_size), KVCacheSpec(2, head_dim, block_size, "float32")
    kv = kernels.allocate_kv(spec, 3, "cpu")
    assert kv.data.is_contiguous()
    assert kv.num_blocks == 3
    assert kv.data[0].nbytes == kernels.kv_block_bytes(spec) >= spec.block_bytes
    # Poisoning a block by its index alone leaves the others.
    key, value = _tokens(3 * block_size, spec)
    slots = torch.arange(3 * block_size, dtype=torch.int32)
    kernels.store_kv(key, value, kv, slots)
    kv.data[1] = float("nan")
    read_key, read_value = kernels.read_kv(kv, slots)
    for read, stored in ((read_key, key), (read_value, value)):
        assert torch.equal(read[:block_size], stored[:block_size])
        assert torch.equal(read[2 * block_size :], stored[2 * block_size :])
        assert read[block_size : 2 * block_size].isnan().all()


def test_copy_blocks_reads_all_sources_first(make_kernels):
    kernels, spec = make_kernels(), KVCacheSpec(2, 64, 16, "float32")
    kv = kernels.allocate_kv(spec, 3, "cpu")
    key, value = _tokens(48, spec)
    slots = torch.arange(48, dtype=torch.int32)
    kernels.store_kv(key, value, kv, slots)
    kernels.copy_blocks(kv, torch.tensor([[0, 1], [1, 2]]))
    read_key, read_value = kernels.read_kv(kv, slots)
    expected = torch.arange(48)
    expected[16:32], expected[32:] = torch.arange(16), torch.arange(16, 32)
    assert torch.equal(read_key, key[expected])
    assert torch.equal(read_value, value[expected])
    kernels.copy_blocks(kv, torch.zeros(0, 2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="copy_blocks"):
        kernels.copy_blocks(kv, torch.zeros(2, dtype=torch.int64))


def test_swapped_blocks_come_back_as_they_were(make_kernels):
    kernels, spec = make_kernels(), KVCacheSpec(2, 64, 16, "float32")
    kv = kernels.allocate_kv(spec, 6, "cpu")
    (host,) = kernels.allocate_host_kv([kv], 4)
    assert (host.num_blocks, host.spec, host.data.data_ptr() != kv.data.data_ptr()) == (4, spec, True)
    key, value = _tokens(96, spec)
    slots = torch.arange(96, dtype=torch.int32)
    kernels.store_kv(key, value, kv, slots)
    # A run of two, one that goes on only on one side, and one by itself.
    kernels.swap_blocks(kv, host, [(1, 2), (2, 3), (3, 0), (5, 1)])
    kv.data.fill_(float("nan"))
    kernels.swap_blocks(host, kv, [(0, 3), (1, 0), (2, 4)])
    read_key, read_value = kernels.read_kv(kv, slots)
    for at, came_from in ((3, 3), (0, 5), (4, 1)):
        rows, source = slice(16 * at, 16 * at + 16), slice(16 * came_from, 16 * came_from + 16)
        assert torch.equal(read_key[rows], key[source])
        assert torch.equal(read_value[rows], value[source])
    assert all(read_key[16 * block : 16 * block + 16].isnan().all() for block in (1, 2, 5))
    kernels.swap_blocks(kv, host, [])


def test_blocks_that_cannot_be_swapped_are_refused(make_kernels):
    kernels, spec = make_kernels(), KVCacheSpec(2, 64, 16, "float32")
    kv = kernels.allocate_kv(spec, 2, "cpu")
    (host,) = kernels.allocate_host_kv([kv], 1)
    kv.data.zero_()
    host.data.fill_(1.0)
    for pair in ((0, 1), (2, 0), (-1, 0), (0, -1)):
        with pytest.raises(KernelError, match="outside of pools of 2 and 1 blocks"):
            kernels.swap_blocks(kv, host, [(0, 0), pair])
    assert bool((host.data == 1.0).all()), "nothing is copied when one pair is wrong"
    other = kernels.allocate_kv(KVCacheSpec(4, 64, 16, "float32"), 1, "cpu")
    with pytest.raises(ShapeError, match="swap_blocks"):
        kernels.swap_blocks(kv, other, [(0, 0)])
