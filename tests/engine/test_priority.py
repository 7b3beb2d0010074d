"""Priorities: a smaller value goes first, in the line and without blocks, and may push out a larger one."""

from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.messages import EngineRequest, unpack_ids
from batchgen.engine.policy import priority
from batchgen.engine.preemption import MOST_EVICTED
from batchgen.engine.scheduler import Scheduler
from batchgen.testing import CountingExecutor

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., EngineRequest]


def running(scheduler: Scheduler) -> list[str]:
    return [group.request.request_id for group in scheduler.table.running]


def test_the_line_is_served_by_priority_and_then_by_arrival(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(rank=priority, max_num_seqs=1)
    for name, value in (("a", 5), ("b", 0), ("c", -3), ("d", 0), ("e", 5)):
        scheduler.add(make_request(name, [1], priority=value, max_tokens=1))
    ends = []
    while scheduler.has_work:
        ends += [each.request_id for each in scheduler.update(execute(scheduler.schedule()))]
    assert ends == ["c", "b", "d", "a", "e"]


def test_without_blocks_the_largest_value_that_came_last_goes(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(rank=priority, num_blocks=4, enable_prefix_caching=False)
    for name, value in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        scheduler.add(make_request(name, [1] * 15, priority=value, max_tokens=9))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.schedule()
    assert running(scheduler) == ["b", "d"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_one_strictly_ahead_pushes_out_the_last_when_only_its_room_is_lacking(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    expected_tokens: Any,
    joined: Any,
    check_blocks: Any,
    mode: str,
) -> None:
    scheduler = make_scheduler(
        rank=priority, num_blocks=8, max_num_seqs=3, num_cpu_blocks=9, preemption_mode=mode
    )
    executor = CountingExecutor(make_config(num_gpu_blocks_override=8), num_cpu_blocks=9)
    requests = [make_request(name, [ord(name)] * 10, priority=5, max_tokens=20) for name in "abc"]
    urgent = make_request("urgent", [9] * 10, priority=1, max_tokens=5)
    outputs = []
    for request in requests:
        scheduler.add(request)
    for _ in range(4):
        outputs += scheduler.update(executor.execute(scheduler.schedule()))
    scheduler.add(urgent)
    step = scheduler.schedule()
    assert running(scheduler) == ["urgent", "a", "b"]
    assert step.sequences[0].num_computed_tokens == 0 and len(step.sequences[0].token_ids) == 10
    assert scheduler.counters.choices == {"evict_priority": 1, f"preempt_{mode}": 1}
    outputs += scheduler.update(executor.execute(step))
    while scheduler.has_work:
        outputs += scheduler.update(executor.execute(scheduler.schedule()))
        check_blocks(scheduler)
    ends = joined(outputs)
    for request in [*requests, urgent]:
        assert unpack_ids(ends[request.request_id, 0].token_ids) == expected_tokens(request)
    assert scheduler.counters.choices["evict_priority"] == 1, "the victim pushes nobody out in turn"


def test_equals_push_nobody_out(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(rank=priority, max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1], priority=3, max_tokens=5))
    for _ in range(3):
        scheduler.update(execute(scheduler.schedule()))
    assert running(scheduler) == ["a", "b"]
    assert not scheduler.counters.choices


def test_first_come_first_served_pushes_nobody_out(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", [1], priority=3, max_tokens=5))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.add(make_request("b", [1], priority=-3, max_tokens=5))
    scheduler.update(execute(scheduler.schedule()))
    assert running(scheduler) == ["a"]


def test_nobody_is_pushed_out_in_vain(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(rank=priority, num_blocks=8, enable_prefix_caching=False)
    scheduler.add(make_request("first", [1] * 60, priority=0, max_tokens=30))
    scheduler.add(make_request("last", [2] * 20, priority=9, max_tokens=20))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.update(execute(scheduler.schedule()))
    # Five blocks are first's; without last there would be 3.
    scheduler.add(make_request("urgent", [3] * 70, priority=4, max_tokens=1))
    scheduler.update(execute(scheduler.schedule()))
    assert running(scheduler) == ["first", "last"]
    assert not scheduler.counters.choices


def test_so_many_are_pushed_out_in_a_step_and_nobody_comes_between(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(
        rank=priority,
        num_blocks=12,
        max_num_seqs=12,
        max_num_batched_tokens=200,
        enable_prefix_caching=False,
    )
    for number in range(10):
        scheduler.add(make_request(f"low {number}", [1] * 12, priority=9, max_tokens=4))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.add(make_request("urgent", [2] * 130, priority=1, max_tokens=1))
    counts = []
    while scheduler.table.waiting[0].request.request_id == "urgent":
        scheduler.update(execute(scheduler.schedule()))
        counts.append(scheduler.counters.choices["evict_priority"])
    assert counts == [MOST_EVICTED, 7]
    ends = []
    while scheduler.has_work:
        ends += [
            each.request_id for each in scheduler.update(execute(scheduler.schedule())) if each.finish_reason
        ]
    assert len(ends) == 10, "all the others; urgent has ended before"


def test_a_lower_one_never_passes_a_higher_one_that_lacks_room(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(rank=priority, num_blocks=5, enable_prefix_caching=False)
    scheduler.add(make_request("runs", [1] * 40, priority=0, max_tokens=9))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.add(make_request("high", [1] * 60, priority=1, max_tokens=1))
    scheduler.add(make_request("low", [1] * 3, priority=2, max_tokens=1))
    scheduler.add(make_request("equal", [1] * 3, priority=1, max_tokens=5))
    scheduler.update(execute(scheduler.schedule()))
    assert running(scheduler) == ["runs", "equal"]


def test_a_swapped_request_that_is_ahead_comes_back_over_those_behind(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    check_blocks: Any,
) -> None:
    scheduler = make_scheduler(
        rank=priority, num_blocks=4, num_cpu_blocks=9, preemption_mode="swap", enable_prefix_caching=False
    )
    executor = CountingExecutor(make_config(num_gpu_blocks_override=4), num_cpu_blocks=9)
    scheduler.add(make_request("mid", [1] * 20, priority=5, max_tokens=20))
    scheduler.update(executor.execute(scheduler.schedule()))
    scheduler.add(make_request("high", [2] * 50, priority=1, max_tokens=2))
    scheduler.update(executor.execute(scheduler.schedule()))
    assert [group.request.request_id for group in scheduler.table.swapped] == ["mid"]
    for name in ("low a", "low b"):
        scheduler.add(make_request(name, [3] * 20, priority=9, max_tokens=20))
    ends = []
    while scheduler.has_work:
        outputs = scheduler.update(executor.execute(scheduler.schedule()))
        ends += [each.request_id for each in outputs if each.finish_reason]
        check_blocks(scheduler)
    assert ends[:2] == ["high", "mid"]
