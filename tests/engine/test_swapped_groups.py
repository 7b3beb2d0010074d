"""Preemption by swap: blocks go to host memory and come back, each once, and no token changes."""

from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.costs import CostModel
from batchgen.engine.messages import EngineRequest, SampleOutput, unpack_ids
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import SchedulerOutput, StepResult
from batchgen.testing import CountingExecutor

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., EngineRequest]


class Table:
    """Costs as they stand here."""

    def __init__(self, second_per_token: float, second_per_byte: float):
        self.per_token, self.per_byte = second_per_token, second_per_byte

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self.per_token

    def swap_s(self, num_bytes: int) -> float:
        return num_bytes * self.per_byte

    def observe(self, step: SchedulerOutput, result: StepResult, seconds: float) -> None:
        raise AssertionError("nobody measures here")


def run(
    scheduler: Scheduler, executor: CountingExecutor, check: Any
) -> tuple[list[SampleOutput], list[SchedulerOutput]]:
    outputs: list[SampleOutput] = []
    steps: list[SchedulerOutput] = []
    while scheduler.has_work:
        step = scheduler.schedule()
        assert not (step.swap_in and step.swap_out)
        assert not step.is_empty
        steps.append(step)
        check(scheduler)
        outputs += scheduler.update(executor.execute(step))
        check(scheduler)
        assert len(steps) < 2000
    return outputs, steps


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_cpu_blocks", [2, 5, 40])
@pytest.mark.parametrize("n", [1, 3])
def test_tokens_are_the_same_swapped_or_not(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    expected_tokens: Any,
    joined: Any,
    check_blocks: Any,
    caching: bool,
    num_cpu_blocks: int,
    n: int,
) -> None:
    scheduler = make_scheduler(
        num_blocks=9,
        num_cpu_blocks=num_cpu_blocks,
        max_num_seqs=9,
        preemption_mode="swap",
        enable_prefix_caching=caching,
    )
    executor = CountingExecutor(make_config(num_gpu_blocks_override=9), num_cpu_blocks=num_cpu_blocks)
    requests = [
        make_request(str(number), [number] * 20, n=n, temperature=1.0, seed=number, max_tokens=25)
        for number in range(6)
    ]
    for request in requests:
        scheduler.add(request)
    outputs, steps = run(scheduler, executor, check_blocks)
    ends = joined(outputs)
    for request in requests:
        for index in range(n):
            assert unpack_ids(ends[request.request_id, index].token_ids) == expected_tokens(request, index)
    choices = scheduler.counters.choices
    assert choices["preempt_swap"] == sum(bool(step.swap_out) for step in steps) > 0
    assert n == 1 or num_cpu_blocks > 2 or choices["swap_pool_full"] > 0
    assert choices["preempt_recompute"] == choices["swap_pool_full"]
    if num_cpu_blocks == 40:
        # Nothing is computed twice: every prompt once, and every token but the last of each sample.
        assert sum(step.num_tokens for step in steps) == 6 * (20 + n * 24)
    assert scheduler.blocks.host_pool.num_free == num_cpu_blocks


def test_a_group_moves_every_shared_block_once(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any, check_blocks: Any
) -> None:
    scheduler = make_scheduler(
        num_blocks=9, num_cpu_blocks=20, preemption_mode="swap", enable_prefix_caching=False
    )
    executor = CountingExecutor(make_config(num_gpu_blocks_override=9), num_cpu_blocks=20)
    scheduler.add(make_request("first", [1] * 30, max_tokens=40))
    scheduler.add(make_request("fan", [2] * 40, n=3, temperature=1.0, max_tokens=20))
    _, steps = run(scheduler, executor, check_blocks)
    out = next(step for step in steps if step.swap_out)
    into = next(step for step in steps if step.swap_in)
    # Of the fan's 40 tokens 2 full blocks are shared; each sample has a third of its own.
    assert len(out.swap_out) == len({block for block, _ in out.swap_out}) == 2 + 3
    assert len(into.swap_in) == len({block for _, block in into.swap_in}) == 2 + 3
    assert {host for _, host in out.swap_out} == {host for host, _ in into.swap_in}


def test_blocks_that_others_hold_stay_and_are_found_again(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    check_blocks: Any,
    expected_tokens: Any,
    joined: Any,
) -> None:
    scheduler = make_scheduler(num_blocks=5, num_cpu_blocks=20, preemption_mode="swap")
    executor = CountingExecutor(make_config(num_gpu_blocks_override=5), num_cpu_blocks=20)
    requests = [
        make_request(name, [*[1] * 32, ord(name)], max_tokens=most) for name, most in (("a", 40), ("b", 22))
    ]
    for request in requests:
        scheduler.add(request)
    outputs, steps = run(scheduler, executor, check_blocks)
    (out,) = (step for step in steps if step.swap_out)
    (into,) = (step for step in steps if step.swap_in)
    # b's first two blocks are a's, so they are still there when b comes back; a's third is not b's.
    assert len(out.swap_out) == 3
    assert len(into.swap_in) == 1
    ends = joined(outputs)
    for request in requests:
        assert unpack_ids(ends[request.request_id, 0].token_ids) == expected_tokens(request)


# Blocks of 1000 bytes there and back against tokens computed again, around where both cost the same.
@pytest.mark.parametrize(
    ("costs", "mode"),
    [
        (Table(1.0, 1e-6), "swap"),
        (Table(1e-6, 1.0), "recompute"),
        (Table(1.0, 32 / 4001), "swap"),
        (Table(1.0, 32 / 3999), "recompute"),
    ],
)
def test_the_cheaper_way_is_taken(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any, costs: Table, mode: str
) -> None:
    scheduler = make_scheduler(
        num_blocks=4, num_cpu_blocks=9, costs=costs, block_bytes=1000, enable_prefix_caching=False
    )
    for number in range(2):
        scheduler.add(make_request(str(number), [number] * 30, max_tokens=9))
    while not scheduler.counters.num_preemptions:
        scheduler.update(execute(scheduler.schedule()))
    # The victim had computed 32 tokens in 2 blocks.
    assert scheduler.counters.choices == {f"preempt_{mode}": 1}
    assert len(scheduler.table.swapped) == (mode == "swap")


@pytest.mark.parametrize(("forced", "costs"), [("recompute", Table(1.0, 0.0)), ("swap", Table(0.0, 1.0))])
def test_a_forced_mode_asks_for_no_cost(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any, forced: str, costs: Table
) -> None:
    scheduler = make_scheduler(num_blocks=4, num_cpu_blocks=9, costs=costs, preemption_mode=forced)
    for number in range(2):
        scheduler.add(make_request(str(number), [number] * 30, max_tokens=9))
    while not scheduler.counters.num_preemptions:
        scheduler.update(execute(scheduler.schedule()))
    assert scheduler.counters.choices == {f"preempt_{forced}": 1}


def test_swapped_requests_can_be_dropped_and_their_host_blocks_come_back(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    check_blocks: Any,
) -> None:
    scheduler = make_scheduler(num_blocks=4, num_cpu_blocks=9, preemption_mode="swap")
    executor = CountingExecutor(make_config(num_gpu_blocks_override=4), num_cpu_blocks=9)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [ord(name)] * 30, max_tokens=9))
    while not scheduler.table.swapped:
        step = scheduler.schedule()
        if not scheduler.table.swapped:
            scheduler.update(executor.execute(step))
    assert step.swap_out
    scheduler.table.drop("b")  # while its blocks are on their way
    check_blocks(scheduler)
    scheduler.update(executor.execute(step))
    assert scheduler.blocks.host_pool.num_free == 9
    outputs, _ = run(scheduler, executor, check_blocks)
    assert {output.request_id for output in outputs} == {"a"}


def test_a_swapped_group_comes_before_those_that_never_ran(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Any
) -> None:
    scheduler = make_scheduler(
        num_blocks=6, num_cpu_blocks=9, preemption_mode="swap", enable_prefix_caching=False, skip_window=0
    )
    for name in "ab":
        scheduler.add(make_request(name, [ord(name)] * 46, max_tokens=4))
    scheduler.add(make_request("c", [3] * 30, max_tokens=4))
    order: list[str] = []
    while scheduler.has_work:
        order += [
            each.request_id for each in scheduler.update(execute(scheduler.schedule())) if each.finish_reason
        ]
    assert scheduler.counters.choices["preempt_swap"] == 1
    assert order == ["a", "b", "c"]


def test_rates_are_learned_from_steps(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=500)
    scheduler.add(make_request("a", [1] * 200))
    prompt = scheduler.schedule()
    costs = CostModel(block_bytes=1000)
    costs.observe(prompt, StepResult(0, [7]), seconds=2.0)
    assert costs.recompute_s(50) == pytest.approx(0.5)
    costs.observe(
        SchedulerOutput(1, (), swap_out=((0, 1), (2, 3))), StepResult(1, [], swap_s=0.5), seconds=0.6
    )
    assert costs.swap_s(8000) == pytest.approx(2.0)
    costs.observe(prompt, StepResult(0, [7]), seconds=1.0)
    assert 0.25 < costs.recompute_s(50) < 0.5
    decode = SchedulerOutput(2, ())
    costs.observe(decode, StepResult(2, []), seconds=100.0)
    assert 0.25 < costs.recompute_s(50) < 0.5


def test_samples_that_drew_the_same_apart_come_back_though_their_copies_have_no_room(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any, check_blocks: Any
) -> None:
    # Swapped out with 7 blocks, the three samples need 10 to go on; recomputed, they share all but the last.
    scheduler = make_scheduler(
        num_blocks=9, num_cpu_blocks=20, preemption_mode="swap", enable_prefix_caching=False
    )
    executor = CountingExecutor(make_config(num_gpu_blocks_override=9), num_cpu_blocks=20)
    values: dict[str, Any] = {"logit_bias": {5: 100}, "ignore_eos": True}
    scheduler.add(make_request("short", [1] * 5, max_tokens=40, **values))
    scheduler.add(make_request("group", [2] * 30, n=3, max_tokens=40, **values))
    outputs, _ = run(scheduler, executor, check_blocks)
    assert scheduler.counters.choices["preempt_swap"] > 0
    assert [output.error for output in outputs if output.error] == []
    assert sum(len(unpack_ids(output.token_ids)) for output in outputs) == 4 * 40
