"""Prefixes that a caller pins: found as long as they are pinned, and given up when nothing else can run."""

from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.messages import EngineRequest, SampleOutput
from batchgen.engine.scheduler import Scheduler
from batchgen.outputs import FailureCode
from batchgen.testing import CountingExecutor

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., EngineRequest]
PREFIX = [7] * 40


@pytest.fixture
def run(make_config: Any, check_blocks: Any) -> Callable[[Scheduler], list[SampleOutput]]:
    executor = CountingExecutor(make_config(num_gpu_blocks_override=64))

    def to_end(scheduler: Scheduler) -> list[SampleOutput]:
        outputs: list[SampleOutput] = []
        while scheduler.has_work:
            outputs += scheduler.update(executor.execute(scheduler.schedule()))
            check_blocks(scheduler)
        return outputs

    return to_end


def test_a_pinned_prefix_is_computed_and_nothing_is_drawn(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run: Any
) -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_request("p", PREFIX, is_pinned=True, n=3, temperature=1.0))
    (told,) = run(scheduler)
    assert (told.request_id, told.token_ids, told.finish_reason, told.error) == ("p", b"", "stop", None)
    assert scheduler.pins.held_blocks() == [0, 1]
    assert scheduler.blocks.pool.num_free == 6


def test_it_stays_where_others_push_everything_else_out(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run: Any
) -> None:
    for is_pinned in (True, False):
        scheduler = make_scheduler(num_blocks=8)
        scheduler.add(make_request("p", PREFIX, is_pinned=is_pinned, max_tokens=1))
        run(scheduler)
        for number in range(5):
            scheduler.add(make_request(str(number), [number] * 90, max_tokens=1))
        run(scheduler)
        scheduler.add(make_request("again", [*PREFIX, 1], max_tokens=1))
        assert run(scheduler)[0].num_cached_tokens == (32 if is_pinned else 0)


def test_unpinned_its_blocks_are_as_any_others(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run: Any
) -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_request("p", PREFIX, is_pinned=True))
    run(scheduler)
    assert scheduler.pins.unpin("p")
    assert not scheduler.pins.unpin("p")
    assert scheduler.blocks.pool.num_free == 8
    scheduler.add(make_request("again", [*PREFIX, 1], max_tokens=1))
    assert run(scheduler)[0].num_cached_tokens == 32


def test_two_pins_of_one_prefix_end_one_after_the_other(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run: Any
) -> None:
    scheduler = make_scheduler(num_blocks=8)
    for name in ("p", "q", "p"):
        scheduler.add(make_request(name, PREFIX, is_pinned=True))
        run(scheduler)
    assert scheduler.pins.held_blocks() == [0, 1, 0, 1]
    scheduler.pins.unpin("p")
    assert scheduler.blocks.pool.num_free == 6
    scheduler.pins.unpin("q")
    assert scheduler.blocks.pool.num_free == 8


@pytest.mark.parametrize(("length", "most"), [(110, 1), (60, 45)])
def test_it_gives_way_when_nothing_else_could_run(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    run: Any,
    caplog: pytest.LogCaptureFixture,
    length: int,
    most: int,
) -> None:
    scheduler = make_scheduler(num_blocks=8)
    for name, token in (("old", 5), ("young", 6)):
        scheduler.add(make_request(name, [token] * 20, is_pinned=True))
        run(scheduler)
    scheduler.add(make_request("big", [1] * length, max_tokens=most))
    end = run(scheduler)[-1]
    assert (end.request_id, end.finish_reason) == ("big", "length")
    assert scheduler.counters.choices == {"unpin_for_room": 1}
    assert scheduler.pins.unpin("young")
    assert not scheduler.pins.unpin("old")
    assert "pinned prefix old gives way" in caplog.text


def test_others_running_it_does_not_give_way(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run: Any
) -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_request("p", PREFIX, is_pinned=True))
    run(scheduler)
    for number in range(4):
        scheduler.add(make_request(str(number), [number] * 30, max_tokens=30))
    run(scheduler)
    assert scheduler.counters.num_preemptions > 0
    assert not scheduler.counters.choices["unpin_for_room"]
    assert len(scheduler.pins.held_blocks()) == 2


def test_a_reset_forgets_prefixes_and_pins_and_leaves_those_that_run(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    expected_tokens: Any,
    joined: Any,
) -> None:
    scheduler, executor = make_scheduler(), CountingExecutor(make_config())
    scheduler.add(make_request("p", PREFIX, is_pinned=True))
    scheduler.update(executor.execute(scheduler.schedule()))
    request = make_request("a", [*PREFIX, 1], max_tokens=30)
    scheduler.add(request)
    outputs = []
    for _ in range(10):
        outputs += scheduler.update(executor.execute(scheduler.schedule()))
    scheduler.reset_prefix_cache()
    assert not scheduler.pins.held_blocks()
    scheduler.add(make_request("b", [*PREFIX, 2], max_tokens=1))
    outputs += scheduler.update(executor.execute(scheduler.schedule()))
    assert outputs[-1].num_cached_tokens == 0
    while scheduler.has_work:
        outputs += scheduler.update(executor.execute(scheduler.schedule()))
    ends = joined(output for output in outputs if output.request_id == "a")
    assert len(ends["a", 0].token_ids) // 4 == len(expected_tokens(request)) == 30
    assert scheduler.blocks.pool.num_free == 64


def test_the_core_pins_counts_and_unpins(make_client: Any, make_request: MakeRequest) -> None:
    core = make_client().core
    core.add(make_request("p", PREFIX, is_pinned=True))
    while core.has_work:
        core.step()
    assert core.stats().num_pinned_blocks == 2
    assert core.unpin_prefix("p") is True
    assert core.unpin_prefix("p") is False
    assert core.stats().num_pinned_blocks == 0
    assert core.reset_prefix_cache() is True
    assert core.stats().num_cached_blocks == 0


def test_without_a_prefix_cache_nothing_can_be_pinned(make_client: Any, make_request: MakeRequest) -> None:
    core = make_client(enable_prefix_caching=False).core
    core.add(make_request("p", PREFIX, is_pinned=True))
    (told,) = core.step()
    assert told.error.code is FailureCode.INVALID_PARAMETER
    assert "enable_prefix_caching" in told.error.message
