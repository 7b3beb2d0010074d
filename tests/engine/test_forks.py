from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.messages import EngineRequest, SampleOutput, unpack_ids
from batchgen.engine.scheduler import Scheduler
from batchgen.testing import CountingExecutor

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., EngineRequest]


def run(scheduler: Scheduler, executor: CountingExecutor) -> list[SampleOutput]:
    outputs: list[SampleOutput] = []
    while scheduler.has_work:
        step = scheduler.schedule()
        outputs += scheduler.update(executor.execute(step))
    return outputs


def test_the_prompt_is_computed_once_and_all_samples_are_drawn_from_its_last_row(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any
) -> None:
    scheduler, executor = make_scheduler(max_num_batched_tokens=32), CountingExecutor(make_config())
    request = make_request("a", range(40), n=4, temperature=1.0, seed=5, max_tokens=3)
    scheduler.add(request)
    first = scheduler.schedule()
    assert [(len(each.token_ids), each.samples) for each in first.sequences] == [(32, ())]
    scheduler.update(executor.execute(first))
    second = scheduler.schedule()
    (leader,) = second.sequences
    assert len(leader.token_ids) == 8
    assert [row.slot for row in leader.samples] == [0, 1, 2, 3]
    assert [row.key for row in leader.samples] == [(5, index, 40) for index in range(4)]
    assert second.block_copies == ()
    outputs = scheduler.update(executor.execute(second))
    assert [each.index for each in outputs] == [0, 1, 2, 3]
    assert scheduler.blocks.pool.num_free == 61
    third = scheduler.schedule()
    assert [(each.seq_id, each.num_computed_tokens, len(each.token_ids)) for each in third.sequences] == [
        (number, 40, 1) for number in range(4)
    ]
    partial = leader.block_ids[0][2]
    assert [source for source, _ in third.block_copies] == [partial] * 3
    assert third.sequences[3].block_ids[0][2] == partial
    assert all(each.block_ids[0][:2] == leader.block_ids[0][:2] for each in third.sequences)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
@pytest.mark.parametrize("num_blocks", [4, 6, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_are_the_same_whatever_room_there_is(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    expected_tokens: Any,
    joined: Any,
    max_num_seqs: int,
    num_blocks: int,
    caching: bool,
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, enable_prefix_caching=caching
    )
    executor = CountingExecutor(make_config(num_gpu_blocks_override=num_blocks))
    requests = [
        make_request(name, prompt, n=n, temperature=1.0, seed=n, max_tokens=20)
        for name, prompt, n in (("a", range(20), 5), ("b", [3], 1), ("c", range(16), 3))
    ]
    for request in requests:
        scheduler.add(request)
    ends = joined(run(scheduler, executor))
    assert max(count for count, _ in executor.steps) <= max_num_seqs
    for request in requests:
        for index in range(request.params.n):
            assert unpack_ids(ends[request.request_id, index].token_ids) == expected_tokens(request, index)
    assert scheduler.blocks.pool.num_free == num_blocks


def test_samples_without_room_take_the_prompt_from_the_cache(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any
) -> None:
    scheduler, executor = make_scheduler(max_num_seqs=2), CountingExecutor(make_config())
    scheduler.add(make_request("a", range(40), n=4, temperature=1.0, max_tokens=3))
    run(scheduler, executor)
    computed = sum(tokens for _, tokens in executor.steps)
    # The prompt once; its last, partly filled block once more for the other two; two more tokens of each.
    assert computed == 40 + 8 + 4 * 2


def test_a_dropped_sample_leaves_the_others(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    expected_tokens: Any,
    joined: Any,
    check_blocks: Any,
) -> None:
    scheduler, executor = make_scheduler(), CountingExecutor(make_config())
    request = make_request("a", range(20), n=3, temperature=1.0, max_tokens=6)
    scheduler.add(request)
    outputs = scheduler.update(executor.execute(scheduler.schedule()))
    for index in (1, 1, 7):
        scheduler.table.drop_sample("a", index)
    scheduler.table.drop_sample("unknown", 0)
    check_blocks(scheduler)
    outputs += run(scheduler, executor)
    ends = joined(outputs)
    assert len(unpack_ids(ends["a", 1].token_ids)) == 1
    for index in (0, 2):
        assert unpack_ids(ends["a", index].token_ids) == expected_tokens(request, index)
    assert scheduler.counters.num_requests_finished == 1


def test_the_last_sample_dropped_ends_the_request(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any
) -> None:
    scheduler, executor = make_scheduler(), CountingExecutor(make_config())
    scheduler.add(make_request("a", range(20), n=2, max_tokens=6))
    scheduler.update(executor.execute(scheduler.schedule()))
    scheduler.table.drop_sample("a", 0)
    assert scheduler.has_work
    scheduler.table.drop_sample("a", 1)
    assert not scheduler.has_work
    assert scheduler.blocks.pool.num_free == 64
