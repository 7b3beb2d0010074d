"""Beam searches in the scheduler: right whatever the pool, with blocks shared and given back at once."""

from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import EngineConfig
from batchgen.counting import counting_candidates
from batchgen.engine.beam import BeamSearch
from batchgen.engine.messages import EngineRequest, SampleOutput, unpack_ids
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import DrawRules, SamplingRow, StepResult
from batchgen.engine.stop import Stop
from batchgen.outputs import FailureCode, FinishReason
from batchgen.testing import CountingExecutor

VOCAB_SIZE = 101
EOS = 3


def expected_beams(request: EngineRequest, max_model_len: int) -> list[tuple[list[int], float, str]]:
    """The search on true histories, without scheduler and blocks: ids, log probability, why it ended."""
    params, prompt = request.params, unpack_ids(request.prompt_token_ids)
    ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))})
    most = min(max_model_len - len(prompt), params.max_tokens or max_model_len)
    search = BeamSearch(
        params.num_samples,
        most,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        num_stop_ids=len(ends),
    )
    beams = [SimpleNamespace(token_ids=array("i", prompt), logprobs=[])]

    def stop(parent: int, token: int) -> Stop | None:
        if token in ends:
            return Stop(FinishReason.STOP, None if token == EOS else token)
        return Stop(FinishReason.LENGTH) if search.num_generated + 1 >= most else None

    while not search.is_done:
        candidates = []
        for beam in beams:
            row = SamplingRow(
                0,
                DrawRules(params, ends),
                (0, 0, len(beam.token_ids)),
                search.num_generated,
                num_candidates=search.num_candidates,
            )
            candidates.append(counting_candidates(beam.token_ids.tolist(), row, VOCAB_SIZE))
        beams = [
            SimpleNamespace(token_ids=beams[each.parent].token_ids + array("i", [each.token]), logprobs=[])
            for each in search.advance(beams, candidates, stop)
        ]
    return [(found.token_ids.tolist(), found.logprob, found.stop.finish_reason) for found in search.finished]


def drive(
    scheduler: Scheduler, requests: list[EngineRequest], check: Callable[[Scheduler], None], executor: Any
) -> list[SampleOutput]:
    outputs: list[SampleOutput] = []
    waiting = requests.copy()
    for _ in range(3000):
        if waiting:
            scheduler.add(waiting.pop(0))
        check(scheduler)
        step = scheduler.schedule()
        check(scheduler)
        assert step.num_tokens <= scheduler.rules.max_num_batched_tokens
        assert sum(group.width for group in scheduler.table.running) <= scheduler.rules.max_num_seqs
        if step.sequences:
            outputs += scheduler.update(executor.execute(step))
        else:
            outputs += scheduler.take_outputs()
        if not scheduler.has_work and not waiting:
            break
    assert not scheduler.has_work, "somebody waits for ever"
    check(scheduler)
    assert scheduler.blocks.pool.num_free == scheduler.blocks.num_blocks
    return outputs


def drive_behind(
    scheduler: Scheduler, executor: Any, check: Callable[[Scheduler], None]
) -> list[SampleOutput]:
    """Every step is scheduled before the result of the one before it is taken in."""
    outputs: list[SampleOutput] = []
    results: deque[StepResult] = deque()
    while scheduler.has_work:
        step = scheduler.schedule()
        check(scheduler)
        if not step.is_empty:
            results.append(executor.execute(step))
        assert results or scheduler.table.outbox, "nothing moves"
        if results and (len(results) > 1 or step.is_empty):
            outputs += scheduler.update(results.popleft())
    return outputs


def make_engine(
    make_scheduler: Any, *, blocks: int = 64, **values: Any
) -> tuple[Scheduler, CountingExecutor]:
    config = EngineConfig.from_engine_args(model="counting:", num_gpu_blocks_override=blocks)
    executor = CountingExecutor(config, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    return make_scheduler(num_blocks=blocks, eos_token_ids=(EOS,), **values), executor


def beams_of(outputs: list[SampleOutput], request_id: str) -> list[tuple[list[int], Any, Any]]:
    found = [each for each in outputs if each.request_id == request_id]
    assert [each.index for each in found] == list(range(len(found)))
    return [(unpack_ids(each.token_ids), each.cumulative_logprob, each.finish_reason) for each in found]


asks = st.fixed_dictionaries(
    {
        "length": st.sampled_from([1, 14, 15, 16, 17, 40]),
        "best_of": st.sampled_from([None, 4]),
        "n": st.sampled_from([1, 2, 3]),
        "max_tokens": st.sampled_from([1, 2, 9, 20]),
        "length_penalty": st.sampled_from([0.0, 1.0, 2.0]),
        "early_stopping": st.sampled_from([False, True, "never"]),
        "stop_token_ids": st.sampled_from([(), (5, 6, 7), tuple(range(4, 60))]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 1]),
        "use_beam_search": st.sampled_from([True, True, False]),
    }
)


@settings(max_examples=120, deadline=None)
@given(
    asked=st.lists(asks, min_size=1, max_size=5),
    blocks=st.sampled_from([6, 9, 14, 60]),
    seqs=st.sampled_from([4, 6, 16]),
    tokens=st.sampled_from([4, 7, 64]),
    caching=st.booleans(),
)
def test_any_stream_of_searches_gives_the_right_beams_and_keeps_the_invariants(
    make_scheduler: Any,
    make_request: Any,
    check_blocks: Any,
    asked: list[dict[str, Any]],
    blocks: int,
    seqs: int,
    tokens: int,
    caching: bool,
) -> None:
    requests = []
    for number, ask in enumerate(asked):
        values = {name: value for name, value in ask.items() if name != "length"}
        if not ask["use_beam_search"]:
            values = {"n": ask["n"], "temperature": 1, "max_tokens": ask["max_tokens"]}
        requests.append(make_request(str(number), [number % 2] * ask["length"], **values))
    scheduler, executor = make_engine(
        make_scheduler,
        blocks=blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=caching,
    )
    outputs = drive(scheduler, requests, check_blocks, executor)
    for request in requests:
        if not request.params.use_beam_search:
            continue
        errors = [each.error for each in outputs if each.request_id == request.request_id and each.error]
        if errors:
            assert blocks < 14 and errors[0].code in (FailureCode.KV_CAPACITY, FailureCode.NEVER_FITS)
            continue
        truth = expected_beams(request, 256)
        found = beams_of(outputs, request.request_id)
        assert [each[0] for each in found] == [each[0] for each in truth]
        assert [each[1] for each in found] == pytest.approx([each[1] for each in truth])
        assert [each[2] for each in found] == [each[2] for each in truth]


def test_searches_are_preempted_and_come_back_as_they_were(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    requests = [
        make_request(str(number), [number] * 20, n=4, max_tokens=40, use_beam_search=True, ignore_eos=True)
        for number in range(5)
    ]
    # Tails of up to 40 tokens, recomputed within a budget of 30.
    scheduler, executor = make_engine(
        make_scheduler, blocks=24, max_num_seqs=20, max_num_batched_tokens=30, enable_prefix_caching=False
    )
    outputs = drive(scheduler, requests, check_blocks, executor)
    assert scheduler.counters.num_preemptions > 3
    for request in requests:
        assert [each[0] for each in beams_of(outputs, request.request_id)] == [
            each[0] for each in expected_beams(request, 256)
        ]


def test_a_search_whose_step_is_under_way_is_not_scheduled_again(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    scheduler, executor = make_engine(make_scheduler, blocks=20, max_num_seqs=12)
    requests = [
        make_request(str(number), [number] * 20, n=4, max_tokens=30, use_beam_search=True)
        for number in range(4)
    ]
    for request in requests:
        scheduler.add(request)
    outputs = drive_behind(scheduler, executor, check_blocks)
    for request in requests:
        assert [each[0] for each in beams_of(outputs, request.request_id)] == [
            each[0] for each in expected_beams(request, 256)
        ]


def test_a_limit_on_the_tokens_of_one_sequence_does_not_stop_beams(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    requests = [
        make_request(str(number), [number] * 20, n=4, max_tokens=30, use_beam_search=True)
        for number in range(4)
    ]
    scheduler, executor = make_engine(
        make_scheduler,
        blocks=20,
        max_num_seqs=12,
        long_prefill_token_threshold=3,
        enable_prefix_caching=False,
    )
    outputs = drive(scheduler, requests.copy(), check_blocks, executor)
    assert scheduler.counters.num_preemptions > 0
    for request in requests:
        assert [each[0] for each in beams_of(outputs, request.request_id)] == [
            each[0] for each in expected_beams(request, 256)
        ]


def test_only_the_last_block_of_a_beam_is_ever_copied_and_dropped_beams_free_theirs(
    make_scheduler: Any, make_request: Any
) -> None:
    request = make_request("a", [9] * 100, n=4, max_tokens=30, use_beam_search=True, ignore_eos=True)
    scheduler, executor = make_engine(make_scheduler, max_num_batched_tokens=128)
    scheduler.add(request)
    num_copies = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        for source, target in step.block_copies:
            num_copies += 1
            (table,) = [s.block_ids[0] for s in step.sequences if target in s.block_ids[0]]
            (sequence,) = [s for s in step.sequences if s.block_ids[0] is table]
            assert table.index(target) == sequence.num_computed_tokens // 16
            assert source != target
        used = scheduler.blocks.pool.num_blocks - scheduler.blocks.pool.num_free
        # Six blocks of the prompt are full and shared; each beam has at most three of its own behind them.
        assert used <= 6 + 4 * 3
        scheduler.update(executor.execute(step))
    assert 0 < num_copies < 4 * 30


def test_beams_are_told_together_at_the_end_and_each_counts(make_scheduler: Any, make_request: Any) -> None:
    request = make_request(
        "a", [9] * 5, n=3, max_tokens=6, use_beam_search=True, ignore_eos=True, streams=True
    )
    scheduler, executor = make_engine(make_scheduler)
    scheduler.add(request)
    told = []
    while scheduler.has_work:
        told.append(scheduler.update(executor.execute(scheduler.schedule())))
    assert [len(each) for each in told] == [0, 0, 0, 0, 0, 3]
    assert scheduler.counters.generation_tokens == 1 + 5 * 3
    assert scheduler.counters.num_requests_finished == 1


@pytest.mark.parametrize("limits", [{"max_num_seqs": 3}, {"max_num_batched_tokens": 3}], ids=str)
def test_a_search_wider_than_a_step_is_refused(
    make_scheduler: Any, make_request: Any, limits: dict[str, int]
) -> None:
    scheduler, _ = make_engine(make_scheduler, **limits)
    scheduler.add(make_request("a", [9] * 5, n=4, max_tokens=6, use_beam_search=True))
    outputs = scheduler.take_outputs()
    assert {each.error.code for each in outputs if each.error} == {FailureCode.INVALID_PARAMETER}
    assert "width 4 needs" in str(outputs[0].error) and next(iter(limits)) in str(outputs[0].error)
    assert not scheduler.has_work


def test_a_search_that_outgrows_the_pool_ends_with_what_it_has(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    scheduler, executor = make_engine(make_scheduler, blocks=5)
    request = make_request("a", [9] * 10, n=3, max_tokens=90, use_beam_search=True, ignore_eos=True)
    outputs = drive(scheduler, [request], check_blocks, executor)
    assert [each.error.code for each in outputs if each.error] == [FailureCode.KV_CAPACITY] * 3
    assert all(len(unpack_ids(each.token_ids)) > 6 for each in outputs)


def test_a_search_whose_logits_overflow_fails_whole(make_scheduler: Any, make_request: Any) -> None:
    scheduler, executor = make_engine(make_scheduler)
    scheduler.add(make_request("a", [9] * 5, n=3, max_tokens=6, use_beam_search=True))
    outputs = scheduler.update(executor.execute(scheduler.schedule()))
    step = scheduler.schedule()
    result = executor.execute(step)
    broken = type(result)(
        result.step,
        [0, None, 0],
        candidates={row: each for row, each in result.candidates.items() if row != 1},
    )
    outputs = scheduler.update(broken)
    assert [each.error.code for each in outputs if each.error] == [FailureCode.ENGINE_ERROR] * 3
    assert not scheduler.has_work
    assert scheduler.blocks.pool.num_free == scheduler.blocks.num_blocks


@pytest.mark.parametrize("dead_ends", [{1}, {0, 1, 2}])
def test_a_beam_after_which_nothing_is_allowed_is_dropped(
    make_scheduler: Any, make_request: Any, dead_ends: set[int]
) -> None:
    scheduler, executor = make_engine(make_scheduler)
    scheduler.add(make_request("a", [9] * 5, n=3, max_tokens=3, use_beam_search=True, ignore_eos=True))
    scheduler.update(executor.execute(scheduler.schedule()))
    result = executor.execute(scheduler.schedule())
    (group,) = scheduler.table.running
    dead = group.sequences[1].token_ids.tolist()
    result = type(result)(
        result.step,
        [None if row in dead_ends else 0 for row in range(3)],
        candidates={row: each for row, each in result.candidates.items() if row not in dead_ends},
        failures=dict.fromkeys(dead_ends, "nothing is allowed"),
    )
    outputs = scheduler.update(result)
    if len(dead_ends) == 3:
        assert ["nothing is allowed" in str(each.error) for each in outputs] == [True] * 3
    else:
        outputs = scheduler.update(executor.execute(scheduler.schedule()))
        assert len(beams_of(outputs, "a")) == 3
        assert not any(unpack_ids(each.token_ids)[:1] == dead[5:6] for each in outputs)
    assert not scheduler.has_work
    assert scheduler.blocks.pool.num_free == scheduler.blocks.num_blocks


def test_an_aborted_search_gives_everything_back(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    scheduler, executor = make_engine(make_scheduler)
    scheduler.add(make_request("a", [9] * 20, n=4, max_tokens=30, use_beam_search=True))
    for _ in range(4):
        scheduler.update(executor.execute(scheduler.schedule()))
    scheduler.table.drop("a")
    check_blocks(scheduler)
    assert not scheduler.has_work
    assert scheduler.blocks.pool.num_free == scheduler.blocks.num_blocks
