"""Log probabilities on their way through the core: each token's once, each prompt position's once."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.counting import CountingExecutor, counting_logprobs
from batchgen.engine.messages import SampleOutput, unpack_ids
from batchgen.engine.scheduler import Scheduler


def run(scheduler: Scheduler, executor: CountingExecutor) -> list[SampleOutput]:
    outputs: list[SampleOutput] = []
    while scheduler.has_work:
        outputs += scheduler.update(executor.execute(scheduler.schedule()))
    return outputs


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([1, 2, 16, 17, 50]), st.integers(1, 9), st.sampled_from([1, 3])),
        min_size=1,
        max_size=6,
    ),
    start=st.sampled_from([None, 0, 1, 16, 17, 33, 60]),
    num_blocks=st.sampled_from([4, 6, 60]),
    budget=st.sampled_from([5, 16, 200]),
    mode=st.sampled_from(["swap", "recompute"]),
    streams=st.booleans(),
    skip=st.sampled_from([None, False]),
)
def test_prompt_positions_are_scored_once_whatever_happens(
    make_scheduler: Any,
    make_request: Any,
    make_config: Any,
    shapes: list[tuple[int, int, int]],
    start: int | None,
    num_blocks: int,
    budget: int,
    mode: str,
    streams: bool,
    skip: bool | None,
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks, num_cpu_blocks=9, preemption_mode=mode, max_num_batched_tokens=budget
    )
    executor = CountingExecutor(make_config(num_gpu_blocks_override=num_blocks), num_cpu_blocks=9)
    for number, (length, most, n) in enumerate(shapes):
        request = make_request(
            str(number),
            [number % 2] * length,
            max_tokens=most,
            n=n,
            temperature=1.0,
            streams=streams,
            prompt_logprobs=1,
            prompt_logprob_start=start,
            skip_reading_prefix_cache=skip,
        )
        scheduler.add(request)
    outputs = run(scheduler, executor)
    for number, (length, _, _) in enumerate(shapes):
        told = [
            each.prompt_logprobs
            for each in outputs
            if each.request_id == str(number) and each.prompt_logprobs is not None
        ]
        wanted = [counting_logprobs(at, number % 2) for at in range(max(1, start or 0), length)]
        assert told == ([tuple(wanted)] if wanted else [])


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("values", "is_told"), [({"logprobs": 0}, True), ({"best_of": 4}, True), ({}, False)]
)
def test_drawn_tokens_come_with_theirs(
    make_scheduler: Any,
    make_request: Any,
    make_config: Any,
    streams: bool,
    values: dict[str, Any],
    is_told: bool,
) -> None:
    scheduler = make_scheduler(num_blocks=7)
    executor = CountingExecutor(make_config(num_gpu_blocks_override=7))
    for number in range(3):
        scheduler.add(
            make_request(
                str(number), [number] * 15, max_tokens=20, n=2, temperature=1.0, streams=streams, **values
            )
        )
    outputs = run(scheduler, executor)
    assert scheduler.counters.num_preemptions > 0
    samples: dict[tuple[str, int], list[tuple[int, Any]]] = {}
    for each in outputs:
        tokens = unpack_ids(each.token_ids)
        assert (each.logprobs is not None) is is_told
        if each.logprobs is not None:
            sample = samples.setdefault((each.request_id, each.index), [])
            sample += zip(tokens, each.logprobs, strict=True)
    for drawn in samples.values():
        assert [told for _, told in drawn] == [
            counting_logprobs(15 + place, token) for place, (token, _) in enumerate(drawn)
        ]
    assert len(samples) == is_told * 3 * values.get("best_of", 2)


def test_a_prefix_is_read_from_the_cache_up_to_the_first_position_that_is_scored(
    make_scheduler: Any, make_request: Any, make_config: Any
) -> None:
    scheduler, executor = make_scheduler(), CountingExecutor(make_config())
    hits = []
    for number, start in enumerate([None, None, 16, 17, 33, 48, 60]):
        values = {} if number == 0 else {"prompt_logprobs": 0, "prompt_logprob_start": start}
        scheduler.add(
            make_request(str(number), range(50), max_tokens=1, skip_reading_prefix_cache=False, **values)
        )
        hits.append(run(scheduler, executor)[-1].num_cached_tokens)
    # Position s is scored by the logits of s - 1, which must be computed.
    assert hits == [0, 0, 0, 16, 32, 32, 48]


def test_after_an_abandoned_step_what_was_not_scored_is_asked_again(
    make_scheduler: Any, make_request: Any, make_config: Any
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    executor = CountingExecutor(make_config())
    scheduler.add(make_request("a", [3] * 60, max_tokens=3, prompt_logprobs=0))
    outputs: list[SampleOutput] = []
    for step in range(9):
        plan = scheduler.schedule()
        if step in (1, 4, 6):
            scheduler.abandon_steps()
        else:
            outputs += scheduler.update(executor.execute(plan))
    outputs += run(scheduler, executor)
    told = [each.prompt_logprobs for each in outputs if each.prompt_logprobs]
    assert told == [tuple(counting_logprobs(at, 3) for at in range(1, 60))]
