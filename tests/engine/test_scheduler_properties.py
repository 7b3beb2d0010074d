"""Random streams of requests against invariants, the tokens they must give, and a simulator."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import EngineConfig
from batchgen.engine.messages import EngineRequest, SampleOutput, pack_ids, unpack_ids
from batchgen.engine.policy import POLICIES
from batchgen.engine.scheduler import Scheduler
from batchgen.outputs import FailureCode
from batchgen.sampling_params import SamplingParams
from batchgen.testing import CountingExecutor

BLOCK = 16
MAX_LEN = 120


@dataclass
class Ask:
    """A request and when it comes; `aborted_after` steps later it is dropped."""

    prompt: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    comes_at: int = 0
    aborted_after: int | None = None
    streams: bool = True
    priority: int = 0

    def request(self, number: int) -> EngineRequest:
        params = SamplingParams(n=self.n, max_tokens=self.max_tokens, temperature=self.temperature)
        return EngineRequest(
            request_id=str(number),
            prompt_token_ids=pack_ids(self.prompt),
            params=params,
            seed=number,
            streams=self.streams,
            priority=self.priority,
        )


# Few different beginnings, so that the prefix cache is hit often; lengths around block edges.
prompts = st.builds(
    lambda start, length, end: [*([start] * length), *end],
    st.integers(0, 2),
    st.sampled_from([0, 1, 15, 16, 17, 31, 32, 48, 64]),
    st.lists(st.integers(0, 100), min_size=1, max_size=4),
)
asks = st.builds(
    Ask,
    prompt=prompts,
    max_tokens=st.sampled_from([1, 2, 15, 17, 40]),
    n=st.sampled_from([1, 1, 2, 5]),
    temperature=st.sampled_from([0.0, 1.0]),
    comes_at=st.integers(0, 12),
    aborted_after=st.sampled_from([None, None, None, 0, 3, 20]),
    streams=st.booleans(),
    priority=st.sampled_from([0, 0, 1, -5]),
)


@dataclass
class Run:
    """What came out of a stream of requests."""

    told: dict[tuple[str, int], SampleOutput] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    trace: list[list[tuple[int, int, int]]] = field(default_factory=list)


def run_stream(
    scheduler: Scheduler,
    executor: CountingExecutor,
    stream: list[Ask],
    joined: Any,
    check: Callable[[Scheduler], None],
) -> Run:
    run = Run()
    outputs: list[SampleOutput] = []
    lag = 0
    for now in range(3000):
        for number, ask in enumerate(stream):
            if ask.comes_at == now:
                scheduler.add(ask.request(number))
            if ask.aborted_after is not None and ask.comes_at + ask.aborted_after == now:
                ended = [each for each in outputs if each.request_id == str(number) and each.finish_reason]
                if len(ended) < ask.n:
                    run.dropped.add(str(number))
                scheduler.table.drop(str(number))
        check(scheduler)
        step = scheduler.schedule()
        check(scheduler)
        check_step(scheduler, step)
        if not step.is_empty:
            lag = 0
            run.trace.append([(s.seq_id, s.num_computed_tokens, len(s.token_ids)) for s in step.sequences])
            outputs += scheduler.update(executor.execute(step))
        else:
            lag += 1
            outputs += scheduler.take_outputs()
            assert lag < 15 or scheduler.has_work is False, "requests are there and nothing moves"
        check(scheduler)
        if not scheduler.has_work and now > 40:
            break
    assert not scheduler.has_work, "somebody waits for ever"
    assert scheduler.blocks.pool.num_free == scheduler.blocks.num_blocks
    run.told = joined(each for each in outputs if each.request_id not in run.dropped)
    return run


def check_step(scheduler: Scheduler, step: Any) -> None:
    assert step.num_tokens <= scheduler.rules.max_num_batched_tokens
    assert len(step.sequences) <= scheduler.rules.max_num_seqs
    assert sum(group.width for group in scheduler.table.running) <= scheduler.rules.max_num_seqs
    assert len({each.seq_id for each in step.sequences}) == len(step.sequences)
    targets = [target for _, target in step.block_copies]
    assert len(set(targets)) == len(targets)
    for each in step.sequences:
        end = each.num_computed_tokens + len(each.token_ids)
        assert each.token_ids
        assert all(len(table) * BLOCK >= end for table in each.block_ids)


def engine(
    *,
    blocks: int,
    seqs: int,
    tokens: int,
    caching: bool,
    make_scheduler: Any,
    windows: tuple[int | None, ...] = (None,),
    host_blocks: int = 0,
    **rules: Any,
) -> tuple[Scheduler, CountingExecutor]:
    config = EngineConfig.from_engine_args(
        model="counting:", num_gpu_blocks_override=blocks, max_num_seqs=seqs, max_model_len=MAX_LEN
    )
    scheduler = make_scheduler(
        num_blocks=blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=MAX_LEN,
        enable_prefix_caching=caching,
        group_windows=windows,
        num_cpu_blocks=host_blocks,
        **rules,
    )
    return scheduler, CountingExecutor(config, group_windows=windows, num_cpu_blocks=host_blocks)


def check_against_truth(
    run: Run, stream: list[Ask], expected_tokens: Any, num_blocks: int, blocks_for: Callable[[int], int]
) -> None:
    for number, ask in enumerate(stream):
        if str(number) in run.dropped:
            continue
        request = ask.request(number)
        for index in range(ask.n):
            told = run.told[str(number), index]
            tokens = unpack_ids(told.token_ids)
            truth = expected_tokens(request, index, max_model_len=MAX_LEN)
            assert tokens == truth[: len(tokens)]
            if told.error is None:
                assert len(tokens) == len(truth)
                assert told.finish_reason == "length"
            elif told.error.code is FailureCode.NEVER_FITS:
                assert blocks_for(len(ask.prompt)) > num_blocks
                assert not tokens
            else:
                assert told.error.code is FailureCode.KV_CAPACITY
                assert blocks_for(len(ask.prompt) + len(tokens)) > num_blocks
                assert blocks_for(len(ask.prompt) + len(tokens) - 1) <= num_blocks


@settings(max_examples=80, deadline=None)
@given(
    stream=st.lists(asks, min_size=1, max_size=10),
    blocks=st.sampled_from([2, 3, 5, 8, 14, 60]),
    seqs=st.sampled_from([1, 2, 4, 16]),
    tokens=st.sampled_from([1, 7, 16, 64, 500]),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (None, None), (None, 20), (5, None, 40)]),
    host_blocks=st.sampled_from([0, 3, 30]),
    mode=st.sampled_from([None, "swap"]),
    policy=st.sampled_from(sorted(POLICIES)),
    rules=st.fixed_dictionaries(
        {
            "skip_window": st.sampled_from([0, 1, 8]),
            "most_overtaken": st.sampled_from([1, 32]),
            "long_prefill_token_threshold": st.sampled_from([0, 0, 9]),
            "enable_chunked_prefill": st.booleans(),
        }
    ),
)
def test_any_stream_ends_with_the_right_tokens_and_keeps_the_invariants(
    make_scheduler: Any,
    expected_tokens: Any,
    joined: Any,
    check_blocks: Any,
    stream: list[Ask],
    blocks: int,
    seqs: int,
    tokens: int,
    caching: bool,
    windows: tuple[int | None, ...],
    host_blocks: int,
    mode: str | None,
    policy: str,
    rules: dict[str, Any],
) -> None:
    scheduler, executor = engine(
        windows=windows,
        blocks=blocks,
        seqs=seqs,
        tokens=tokens,
        caching=caching,
        host_blocks=host_blocks,
        preemption_mode=mode,
        rank=POLICIES[policy],
        make_scheduler=make_scheduler,
        **rules,
    )
    run = run_stream(scheduler, executor, stream, joined, check_blocks)
    check_against_truth(run, stream, expected_tokens, blocks, scheduler.blocks.blocks_for)


@pytest.mark.slow
def test_ten_thousand_requests_through_a_tiny_pool(
    make_scheduler: Any, expected_tokens: Any, joined: Any
) -> None:
    scheduler, executor = engine(blocks=40, seqs=16, tokens=64, caching=True, make_scheduler=make_scheduler)
    requests = [
        Ask([number % 7] * (1 + number % 40), 1 + number % 13).request(number) for number in range(10_000)
    ]
    for request in requests:
        scheduler.add(request)
    outputs: list[SampleOutput] = []
    while scheduler.has_work:
        outputs += scheduler.update(executor.execute(scheduler.schedule()))
    told = joined(outputs)
    assert len(told) == len(requests)
    for number in range(0, 10_000, 97):
        assert unpack_ids(told[str(number), 0].token_ids) == expected_tokens(requests[number])
    assert scheduler.blocks.pool.num_free == 40
