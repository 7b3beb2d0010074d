"""KV groups with a sliding window: blocks that no query reads again are given back."""

from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.messages import EngineRequest, unpack_ids
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.testing import CountingExecutor

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., EngineRequest]
MakeSequence = Callable[..., Sequence]
Admit = Callable[[BlockManager, Sequence], bool]


def test_a_query_reads_itself_and_the_tokens_before_it_in_the_window(make_sequence: MakeSequence) -> None:
    blocks = BlockManager(40, 16, group_windows=(None, 17))
    sequence = make_sequence(range(60), num_groups=2)
    held = []
    for position in (0, 16, 31, 32, 33, 48, 49):
        sequence.num_computed_tokens = position
        blocks.grow([(sequence, position + 1)])
        held.append([index for index, block in enumerate(sequence.block_tables[1]) if block >= 0])
        assert -1 not in sequence.block_tables[0]
    # The query at 31 reads 15 to 31, the one at 32 reads 16 to 32: then block 0 goes.
    assert held == [[0], [0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]
    assert sequence.block_tables[1][:2] == [-1, -1]
    blocks.free(sequence)
    assert blocks.pool.num_free == 40
    assert sequence.block_tables == ([], [])


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33])
def test_no_more_is_held_than_a_window_spans(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any, check_blocks: Any, window: int
) -> None:
    scheduler = make_scheduler(group_windows=(None, window), max_num_batched_tokens=8)
    executor = CountingExecutor(make_config(), group_windows=(None, window))
    scheduler.add(make_request("a", range(50), max_tokens=60))
    most = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        (part,) = step.sequences
        most = max(most, sum(block >= 0 for block in part.block_ids[1]))
        scheduler.update(executor.execute(step))
        check_blocks(scheduler)
    chunk = 8
    assert most <= (window + chunk - 3) // 16 + 2
    assert most < 5


def test_a_sequence_longer_than_the_pool_runs_when_its_windows_are_short(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    expected_tokens: Any,
    joined: Any,
) -> None:
    # 200 tokens are 13 blocks of the full group and 3 at most of each of the others.
    windows = (None, 20, 20)
    scheduler = make_scheduler(num_blocks=20, group_windows=windows)
    executor = CountingExecutor(make_config(num_gpu_blocks_override=20), group_windows=windows)
    request = make_request("a", [3] * 150, max_tokens=50)
    scheduler.add(request)
    outputs = []
    while scheduler.has_work:
        outputs += scheduler.update(executor.execute(scheduler.schedule()))
    assert unpack_ids(joined(outputs)["a", 0].token_ids) == expected_tokens(request)


def test_a_hit_needs_of_a_window_only_what_is_read(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(40, 16, group_windows=(None, 20))
    first = make_sequence(range(70), num_groups=2)
    admit(blocks, first)
    first.num_computed_tokens = 70
    blocks.cache_computed(first)
    full, near = first.block_tables[0][:4], first.block_tables[1][:4]
    # Push the window group's first two blocks out of the cache, and nothing else.
    for block in near[:2]:
        blocks.pool._forget(block)
    second = make_sequence(range(70), num_groups=2)
    assert admit(blocks, second)
    assert second.num_computed_tokens == 64
    assert second.block_tables[0][:4] == full
    # The query at 64 reads 45 to 64.
    assert second.block_tables[1][:4] == [-1, -1, near[2], near[3]]
    blocks.pool._forget(near[2])
    third = make_sequence(range(70), num_groups=2)
    assert admit(blocks, third)
    # With 3 blocks the query at 48 would read 29 on, in block 1, which is gone: as with 2. One alone is not
    # there either.
    assert third.num_computed_tokens == 0
    blocks.pool._forget(full[0])
    for sequence in (first, second, third):
        blocks.free(sequence)
    assert blocks.pool.num_free == 40


def test_released_blocks_stay_cached_for_others(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any
) -> None:
    scheduler = make_scheduler(group_windows=(None, 20), max_num_batched_tokens=16)
    executor = CountingExecutor(make_config(), group_windows=(None, 20))
    hits = []
    for name in "ab":
        scheduler.add(make_request(name, range(60), max_tokens=1))
        outputs = []
        while scheduler.has_work:
            outputs += scheduler.update(executor.execute(scheduler.schedule()))
        hits.append(outputs[-1].num_cached_tokens)
    scheduler.add(make_request("c", [*range(32), *range(50, 80)], max_tokens=1))
    step = scheduler.schedule()
    hits.append(step.sequences[0].num_computed_tokens)
    assert hits == [0, 48, 32]
