from batchgen.engine.block_pool import BlockPool
from batchgen.engine.messages import BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, BLOCK_USED


def key(number: int) -> tuple[int, bytes]:
    return (0, bytes([number]))


def test_blocks_without_content_are_reused_before_cached_ones_and_those_least_recently_used_first() -> None:
    evicted: list[tuple[tuple[int, bytes], int]] = []
    pool = BlockPool(4, on_evict=lambda content, block: evicted.append((content, block)))
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.set_key(block, key(block))
    first, second, third, blank = blocks
    pool.release([second])
    pool.release([first, third])
    pool.release([blank])
    assert pool.num_free == 4
    assert pool.num_cached == 3
    assert pool.allocate(1) == [blank]
    assert evicted == []
    assert pool.allocate(3) == [second, first, third]
    assert [block for _, block in evicted] == [second, first, third]
    assert [content for content, _ in evicted] == [key(second), key(first), key(third)]
    assert pool.num_free == 0


def test_sharing_takes_a_cached_block_back_into_use() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.set_key(block, key(1))
    pool.release([block])
    assert pool.is_free(block)
    pool.share(block)
    pool.share(block)
    assert pool.ref_counts[block] == 2
    assert pool.num_free == 1
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.num_cached == 1


def test_the_block_map_has_one_state_a_block() -> None:
    pool = BlockPool(4)
    used, shared, cached = pool.allocate(3)
    pool.share(shared)
    pool.set_key(cached, key(1))
    pool.release([cached])
    states = pool.block_map()
    assert states[used] == BLOCK_USED
    assert states[shared] == BLOCK_SHARED
    assert states[cached] == BLOCK_CACHED
    assert states.count(BLOCK_FREE) == 1


def test_forgetting_everything_leaves_no_cache_and_loses_no_block() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=lambda content, block: evicted.append(block))
    held, cached, _ = pool.allocate(3)
    for block in (held, cached):
        pool.set_key(block, key(block))
    pool.release([cached])
    pool.forget_all()
    assert sorted(evicted) == sorted([held, cached])
    assert pool.num_cached == 0
    assert pool.num_free == 1
    pool.release([held])
    assert pool.num_cached == 0
    assert pool.num_free == 2
