"""The seam for overlapped scheduling: a step is scheduled before the result of the one before it is known."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.messages import SampleOutput, unpack_ids
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import StepResult
from batchgen.outputs import FailureCode
from batchgen.testing import CountingExecutor


def run_behind(scheduler: Scheduler, executor: CountingExecutor, check: Any) -> list[SampleOutput]:
    """Schedule, execute, and only then take in what the step before gave."""
    results: deque[StepResult] = deque()
    outputs: list[SampleOutput] = []
    num_idle = 0
    while scheduler.has_work or results:
        step = scheduler.schedule()
        check(scheduler)
        if not step.is_empty:
            results.append(executor.execute(step))
        num_idle = num_idle + 1 if step.is_empty else 0
        assert num_idle < 3, "requests are there and nothing moves"
        if len(results) > 1 or step.is_empty:
            outputs += scheduler.update(results.popleft()) if results else scheduler.take_outputs()
        check(scheduler)
    assert not scheduler.has_step_in_flight
    return outputs + scheduler.take_outputs()


def test_a_token_not_known_yet_is_a_placeholder_and_its_step_is_the_one_before(
    make_scheduler: Any, make_request: Any, make_config: Any, expected_tokens: Any
) -> None:
    scheduler, executor = make_scheduler(), CountingExecutor(make_config())
    request = make_request("a", range(10), n=2, temperature=1.0, max_tokens=3)
    scheduler.add(request)
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert [each.token_ids for each in steps[1].sequences] == [[-1], [-1]]
    assert [each.samples[0].key[2] for each in steps[1].sequences] == [11, 11]
    assert [each.samples[0].num_generated for each in steps[1].sequences] == [1, 1]
    results = [executor.execute(step) for step in steps]
    scheduler.update(results[0])
    steps.append(scheduler.schedule())
    assert [each.token_ids for each in steps[2].sequences] == [[-1], [-1]]
    results.append(executor.execute(steps[2]))
    # The third token is the last, so a fourth step has nobody to compute for.
    assert scheduler.schedule().sequences == ()
    tokens = [result.token_ids[0] for result in results]
    assert tokens == expected_tokens(request, 0)


@pytest.mark.parametrize("eos", [(), tuple(range(0, 101, 9))])
@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from([1, 2, 17, 30]), st.sampled_from([1, 1, 3])),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.sampled_from([4, 7, 60]),
    budget=st.sampled_from([5, 33, 200]),
    caching=st.booleans(),
    mode=st.sampled_from(["swap", "recompute"]),
    windows=st.sampled_from([(None,), (None, 20)]),
)
def test_tokens_are_those_of_the_plain_loop(
    make_scheduler: Any,
    make_request: Any,
    make_config: Any,
    expected_tokens: Any,
    joined: Any,
    check_blocks: Any,
    eos: tuple[int, ...],
    shapes: list[tuple[int, int, int]],
    num_blocks: int,
    budget: int,
    caching: bool,
    mode: str,
    windows: tuple[int | None, ...],
) -> None:
    num_blocks *= len(windows)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        group_windows=windows,
        num_cpu_blocks=9,
        preemption_mode=mode,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        eos_token_ids=eos,
    )
    executor = CountingExecutor(
        make_config(num_gpu_blocks_override=num_blocks), group_windows=windows, num_cpu_blocks=9
    )
    requests = [
        make_request(str(number), [number % 2] * length, max_tokens=most, n=n, temperature=1.0, seed=number)
        for number, (length, most, n) in enumerate(shapes)
    ]
    for request in requests:
        scheduler.add(request)
    ends = joined(run_behind(scheduler, executor, check_blocks))
    for request in requests:
        for index in range(request.params.n):
            end, truth = ends[request.request_id, index], expected_tokens(request, index, eos=eos)
            tokens = unpack_ids(end.token_ids)
            if end.error is None:
                assert tokens == truth
            else:
                assert end.error.code is FailureCode.KV_CAPACITY
                assert tokens == truth[: len(tokens)]
                length = len(unpack_ids(request.prompt_token_ids)) + len(tokens)
                assert scheduler.blocks.blocks_for(length) > num_blocks
                assert scheduler.blocks.blocks_for(length - 1) <= num_blocks
    assert scheduler.blocks.pool.num_free == num_blocks
