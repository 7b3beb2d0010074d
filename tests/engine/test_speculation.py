"""Speculation in the scheduler: the tokens are those of a run without it, and drafting hurts nobody."""

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import EngineConfig
from batchgen.counting import counting_token
from batchgen.engine.messages import EngineRequest, SampleOutput, pack_ids, unpack_ids
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import DrawRules, SamplingRow, StepResult
from batchgen.engine.speculation import Speculation
from batchgen.ngram_settings import NgramSettings
from batchgen.sampling_params import SamplingParams
from batchgen.testing import CountingExecutor, FreeDrafts

BLOCK = 16
MAX_LEN = 100
# So few ids that ends of texts stood there before, and that a draft is right now and then.
VOCAB_SIZE = 4


def drafting(count: int = 5) -> Speculation:
    settings = NgramSettings(num_speculative_tokens=count, prompt_lookup_max=2, prompt_lookup_min=1)
    return Speculation(settings, FreeDrafts())


def expected(request: EngineRequest, index: int) -> list[int]:
    history, params = unpack_ids(request.prompt_token_ids), request.params
    ends = frozenset(params.stop_token_ids)
    drawn: list[int] = []
    while len(history) < MAX_LEN and len(drawn) != params.max_tokens:
        row = SamplingRow(0, DrawRules(params, ends), (request.seed, index, len(history)), len(drawn))
        drawn.append(counting_token(history, row, VOCAB_SIZE))
        history.append(drawn[-1])
        if drawn[-1] in ends:
            break
    return drawn


def make_engine(
    make_scheduler: Any, *, blocks: int = 64, windows: tuple[int | None, ...] = (None,), **values: Any
) -> tuple[Scheduler, CountingExecutor]:
    config = EngineConfig.from_engine_args(model="counting:", num_gpu_blocks_override=blocks)
    scheduler = make_scheduler(
        num_blocks=blocks,
        group_windows=windows,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_LEN,
        **{"speculation": drafting(), **values},
    )
    return scheduler, CountingExecutor(config, vocab_size=VOCAB_SIZE, group_windows=windows)


def step_once(scheduler: Scheduler, executor: CountingExecutor, check: Any = None) -> list[SampleOutput]:
    step = scheduler.schedule()
    assert step.num_tokens <= scheduler.rules.max_num_batched_tokens
    for each in step.sequences:
        assert each.num_computed_tokens + len(each.token_ids) <= MAX_LEN
        assert all(
            len(table) * BLOCK >= each.num_computed_tokens + len(each.token_ids) for table in each.block_ids
        )
    if check is not None:
        check(scheduler)
    if not step.sequences:
        return scheduler.take_outputs()
    outputs = scheduler.update(executor.execute(step))
    if check is not None:
        check(scheduler)
    for group in scheduler.table.running:
        for sequence in group.sequences:
            # What drafts had needed beyond the accepted tokens is given back.
            held = -(-max(len(sequence.token_ids), sequence.num_computed_tokens) // BLOCK)
            assert all(len(table) <= held for table in sequence.block_tables)
    return outputs


asks = st.fixed_dictionaries(
    {
        "length": st.sampled_from([1, 5, 15, 16, 17, 33]),
        "max_tokens": st.sampled_from([1, 2, 17, 40, None]),
        "n": st.sampled_from([1, 1, 3]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "stop_token_ids": st.sampled_from([(), (), (2,)]),
        "min_tokens": st.sampled_from([0, 1]),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(asks, min_size=1, max_size=6),
    blocks=st.sampled_from([7, 10, 60]),
    seqs=st.sampled_from([1, 3, 16]),
    tokens=st.sampled_from([1, 6, 64]),
    caching=st.booleans(),
    streams=st.booleans(),
    count=st.sampled_from([1, 5, 20]),
    windows=st.sampled_from([(None,), (None, 20)]),
)
def test_tokens_are_those_without_speculation(
    make_scheduler: Any,
    joined: Any,
    check_blocks: Any,
    asked: list[dict[str, Any]],
    blocks: int,
    seqs: int,
    tokens: int,
    caching: bool,
    streams: bool,
    count: int,
    windows: tuple[int | None, ...],
) -> None:
    blocks *= len(windows)
    requests = [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=pack_ids([(number + place) % VOCAB_SIZE for place in range(ask["length"])]),
            params=SamplingParams(**{name: value for name, value in ask.items() if name != "length"}),
            seed=number,
            streams=streams,
        )
        for number, ask in enumerate(asked)
    ]
    scheduler, executor = make_engine(
        make_scheduler,
        blocks=blocks,
        windows=windows,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=caching,
        speculation=drafting(count),
    )
    for request in requests:
        scheduler.add(request)
    outputs: list[SampleOutput] = []
    for _ in range(4000):
        outputs += step_once(scheduler, executor, check_blocks)
        if not scheduler.has_work:
            break
    assert not scheduler.has_work
    assert scheduler.blocks.pool.num_free == blocks
    told = joined(outputs)
    for request in requests:
        for index in range(request.params.n):
            assert told[request.request_id, index].error is None
            assert unpack_ids(told[request.request_id, index].token_ids) == expected(request, index)
    counters = scheduler.counters
    assert counters.num_accepted_tokens <= counters.num_draft_tokens
    assert counters.generation_tokens == sum(len(unpack_ids(each.token_ids)) for each in told.values())


def test_tokens_are_right_when_steps_are_scheduled_one_ahead(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    scheduler, executor = make_engine(make_scheduler, blocks=14)
    requests = [
        make_request(str(number), [0, 1, 2, 3] * 4, seed=number, max_tokens=50) for number in range(4)
    ]
    for request in requests:
        scheduler.add(request)
    outputs: list[SampleOutput] = []
    results: deque[StepResult] = deque()
    # Every step is scheduled before the result of the one before it is taken in.
    while scheduler.has_work:
        step = scheduler.schedule()
        check_blocks(scheduler)
        if not step.is_empty:
            results.append(executor.execute(step))
        assert results, "nothing moves"
        if len(results) > 1 or step.is_empty:
            outputs += scheduler.update(results.popleft())
    for request in requests:
        tokens = [
            t for each in outputs if each.request_id == request.request_id for t in unpack_ids(each.token_ids)
        ]
        assert tokens == expected(request, 0)
    # What was recomputed drafts; after a token that is not known yet nobody does.
    assert 0 < scheduler.counters.num_draft_tokens < 100


def test_drafts_are_accepted_and_counted_and_save_steps(make_scheduler: Any, make_request: Any) -> None:
    plain, executor = make_engine(make_scheduler, speculation=None)
    ahead, _ = make_engine(make_scheduler)
    for scheduler in (plain, ahead):
        scheduler.add(make_request("a", [0, 1, 2, 3] * 4, max_tokens=80))
        while scheduler.has_work:
            step_once(scheduler, executor)
    assert ahead.counters.num_accepted_tokens > 10
    assert ahead.counters.num_draft_tokens > ahead.counters.num_accepted_tokens
    assert ahead.counters.num_steps <= plain.counters.num_steps - ahead.counters.num_accepted_tokens
    assert ahead.counters.choices["draft"] > 10


def test_a_right_draft_of_everything_that_is_left_ends_the_sample(
    make_scheduler: Any, make_request: Any
) -> None:
    scheduler, _ = make_engine(make_scheduler)
    scheduler.add(make_request("a", [1] * 10, max_tokens=9))
    sizes, outputs = [], []
    while scheduler.has_work:
        step = scheduler.schedule()
        sizes.append(step.num_tokens)
        outputs += scheduler.update(
            StepResult(step.step, [1 for each in step.sequences for _ in each.samples])
        )
    # The prompt draws one; then 1 + 5, of which 6 are right; then 2 are left, one of them a draft.
    assert sizes == [10, 6, 2]
    assert [(unpack_ids(each.token_ids), each.finish_reason) for each in outputs][-1][1] == "length"
    assert sum(len(unpack_ids(each.token_ids)) for each in outputs) == 9


def test_drafting_preempts_nobody_and_takes_only_blocks_that_are_free(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    # Two sequences that fill the pool to the last block when they end; a block too many would be one too few.
    for speculation in (None, drafting(20)):
        scheduler, executor = make_engine(make_scheduler, blocks=4, speculation=speculation)
        for name in "ab":
            scheduler.add(make_request(name, [0, 1, 2, 3] * 2, max_tokens=24))
        while scheduler.has_work:
            step_once(scheduler, executor, check_blocks)
        assert scheduler.counters.num_preemptions == 0
    assert scheduler.counters.num_draft_tokens > 0


def test_a_wrong_draft_is_in_no_hashed_block(make_scheduler: Any, make_request: Any) -> None:
    scheduler, executor = make_engine(make_scheduler, speculation=drafting(20))
    scheduler.add(make_request("a", [0, 1, 2, 3] * 4, max_tokens=60))
    while scheduler.has_work:
        step_once(scheduler, executor)
        for group in scheduler.table.running:
            for sequence in group.sequences:
                assert sequence.num_cached_blocks * BLOCK <= len(sequence.token_ids)
    # Whoever hits the cache reads true tokens, or the executor would say so.
    (truth,) = [expected(make_request("a", [0, 1, 2, 3] * 4, max_tokens=60), 0)]
    scheduler.add(make_request("b", [*[0, 1, 2, 3] * 4, *truth[:40]], max_tokens=20))
    outputs: list[SampleOutput] = []
    while scheduler.has_work:
        outputs += step_once(scheduler, executor)
    assert outputs[-1].num_cached_tokens >= 48
    assert [token for each in outputs for token in unpack_ids(each.token_ids)] == truth[40:60]


def test_beams_do_not_draft(make_scheduler: Any, make_request: Any) -> None:
    scheduler, executor = make_engine(make_scheduler)
    scheduler.add(make_request("a", [0, 1] * 8, n=2, max_tokens=10, use_beam_search=True))
    while scheduler.has_work:
        step_once(scheduler, executor)
    assert scheduler.counters.num_draft_tokens == 0


def test_a_step_under_way_with_drafts_may_be_forgotten(
    make_scheduler: Any, make_request: Any, check_blocks: Any
) -> None:
    scheduler, executor = make_engine(make_scheduler)
    request = make_request("a", [0, 1, 2, 3] * 4, max_tokens=40)
    scheduler.add(request)
    outputs: list[SampleOutput] = []
    for turn in range(200):
        if turn % 5 == 4:
            scheduler.schedule()
            scheduler.abandon_steps()
            check_blocks(scheduler)
        outputs += step_once(scheduler, executor, check_blocks)
        if not scheduler.has_work:
            break
    assert [token for each in outputs for token in unpack_ids(each.token_ids)] == expected(request, 0)
