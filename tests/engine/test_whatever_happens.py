"""A request gives what it gives alone: amid beams, drafts, swaps, windows, priorities and lost steps."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import EngineConfig, NgramSettings
from batchgen.engine.messages import EngineRequest, SampleOutput, pack_ids
from batchgen.engine.policy import POLICIES
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import StepResult
from batchgen.engine.speculation import Speculation
from batchgen.outputs import FailureCode
from batchgen.sampling_params import SamplingParams
from batchgen.testing import CountingExecutor, FreeDrafts

# Few ids, so that what comes repeats itself and drafts are right now and then.
VOCAB_SIZE = 7
EOS = 3
MAX_LEN = 100

samples = st.fixed_dictionaries(
    {"n": st.sampled_from([1, 1, 3]), "max_tokens": st.sampled_from([1, 2, 20, 40])},
    optional={"prompt_logprobs": st.just(0), "logprobs": st.just(0)},
)
searches = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 2]),
        "best_of": st.sampled_from([2, 4]),
        "max_tokens": st.sampled_from([1, 9, 20]),
        "use_beam_search": st.just(True),
        "ignore_eos": st.booleans(),
    }
)


@dataclass(frozen=True)
class Ask:
    """A request, and when it comes."""

    length: int
    values: dict[str, Any]
    priority: int
    streams: bool
    comes_at: int

    def request(self, number: int) -> EngineRequest:
        temperature = 0.0 if "use_beam_search" in self.values else 1.0
        return EngineRequest(
            request_id=str(number),
            prompt_token_ids=pack_ids([(number + place) % 5 for place in range(self.length)]),
            params=SamplingParams(temperature=temperature, **self.values),
            seed=number,
            priority=self.priority,
            streams=self.streams,
        )


asks = st.builds(
    Ask,
    length=st.sampled_from([1, 15, 16, 17, 33, 50]),
    values=st.one_of(samples, searches),
    priority=st.sampled_from([0, 0, 1, -2]),
    streams=st.booleans(),
    comes_at=st.sampled_from([0, 0, 0, 3, 9]),
)


def make_engine(
    make_scheduler: Any, blocks: int, windows: tuple[int | None, ...], host: int, **values: Any
) -> tuple[Scheduler, CountingExecutor]:
    blocks *= len(windows)
    config = EngineConfig.from_engine_args(model="counting:", num_gpu_blocks_override=blocks)
    scheduler = make_scheduler(
        num_blocks=blocks,
        num_cpu_blocks=host,
        group_windows=windows,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        max_model_len=MAX_LEN,
        **values,
    )
    executor = CountingExecutor(
        config, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), group_windows=windows, num_cpu_blocks=host
    )
    return scheduler, executor


def drive(
    scheduler: Scheduler,
    executor: CountingExecutor,
    stream: list[Ask],
    check: Any,
    *,
    is_behind: bool = False,
    lost_steps: tuple[int, ...] = (),
) -> list[SampleOutput]:
    """Run to the end; a step behind takes in the result of the one before, a lost one is never executed."""
    outputs: list[SampleOutput] = []
    results: deque[StepResult] = deque()
    for now in range(3000):
        for number, ask in enumerate(stream):
            if ask.comes_at == now:
                scheduler.add(ask.request(number))
        step = scheduler.schedule()
        check(scheduler)
        if now in lost_steps:
            results.clear()
            scheduler.abandon_steps()
        elif not step.is_empty:
            results.append(executor.execute(step))
        if results and (len(results) > is_behind or step.is_empty):
            outputs += scheduler.update(results.popleft())
        outputs += scheduler.take_outputs()
        check(scheduler)
        if now > 9 and not results and not scheduler.has_work:
            return outputs
    raise AssertionError(f"{list(scheduler.table.requests)} wait for ever")


def joined(outputs: list[SampleOutput], number: int) -> list[tuple[Any, ...]]:
    """What was told of each sample of a request, whole."""
    whole: dict[int, list[Any]] = {}
    for each in outputs:
        if each.request_id == str(number):
            told = whole.setdefault(each.index, [b"", (), ()])
            told[0] += each.token_ids
            told[1] += each.logprobs or ()
            told[2] += each.prompt_logprobs or ()
            told[3:] = [each.finish_reason, each.stop_reason, each.cumulative_logprob]
    scores = [told.pop(2) for told in whole.values()]
    return [(index, *told) for index, told in sorted(whole.items())] + [tuple(sum(scores, ()))]


@settings(max_examples=80, deadline=None)
@given(
    stream=st.lists(asks, min_size=1, max_size=7),
    blocks=st.sampled_from([7, 10, 16, 60]),
    windows=st.sampled_from([(None,), (None, 20)]),
    host=st.sampled_from([0, 4, 40]),
    num_drafts=st.sampled_from([0, 0, 1, 5]),
    is_behind=st.booleans(),
    lost_steps=st.one_of(st.just(()), st.tuples(st.integers(0, 30), st.integers(0, 90))),
    rules=st.fixed_dictionaries(
        {
            "max_num_seqs": st.sampled_from([4, 6, 16]),
            "max_num_batched_tokens": st.sampled_from([4, 7, 64]),
            "rank": st.sampled_from(sorted(POLICIES.values(), key=lambda rank: rank.__name__)),
            "preemption_mode": st.sampled_from([None, "swap", "recompute"]),
            "enable_prefix_caching": st.booleans(),
            "enable_chunked_prefill": st.booleans(),
            "long_prefill_token_threshold": st.sampled_from([0, 0, 9]),
            "skip_window": st.sampled_from([0, 1, 8]),
            "most_overtaken": st.sampled_from([1, 32]),
        }
    ),
)
def test_a_request_gives_what_it_gives_alone(
    make_scheduler: Any,
    check_blocks: Any,
    stream: list[Ask],
    blocks: int,
    windows: tuple[int | None, ...],
    host: int,
    num_drafts: int,
    is_behind: bool,
    lost_steps: tuple[int, ...],
    rules: dict[str, Any],
) -> None:
    speculation = None
    if num_drafts:
        drafts = NgramSettings(num_speculative_tokens=num_drafts, prompt_lookup_max=2, prompt_lookup_min=1)
        speculation = Speculation(drafts, FreeDrafts())
    scheduler, executor = make_engine(make_scheduler, blocks, windows, host, speculation=speculation, **rules)
    outputs = drive(scheduler, executor, stream, check_blocks, is_behind=is_behind, lost_steps=lost_steps)
    assert scheduler.blocks.pool.num_free == scheduler.blocks.num_blocks
    assert scheduler.blocks.host_pool.num_free == host
    for number, ask in enumerate(stream):
        errors = {each.error.code for each in outputs if each.request_id == str(number) and each.error}
        if errors:
            assert errors <= {FailureCode.KV_CAPACITY, FailureCode.NEVER_FITS} and blocks < 60
            continue
        assert joined(outputs, number) == alone(make_scheduler, ask, number)


def alone(make_scheduler: Any, ask: Ask, number: int) -> list[tuple[Any, ...]]:
    scheduler, executor = make_engine(make_scheduler, 60, (None,), 0)
    scheduler.add(ask.request(number))
    told: list[SampleOutput] = []
    while scheduler.has_work:
        told += scheduler.update(executor.execute(scheduler.schedule()))
    return joined(told, number)


def test_samples_whose_first_draw_is_lost_are_drawn_again(make_scheduler: Any, check_blocks: Any) -> None:
    ask = Ask(1, {"n": 3, "max_tokens": 9}, 0, True, 0)
    for lost in (0, 1, 2):
        scheduler, executor = make_engine(make_scheduler, 10, (None,), 0)
        outputs = drive(scheduler, executor, [ask], check_blocks, lost_steps=(lost,))
        assert joined(outputs, 0) == alone(make_scheduler, ask, 0)


def test_beams_that_are_swapped_out_while_their_step_is_under_way_fork_there(
    make_scheduler: Any, check_blocks: Any
) -> None:
    values = {"n": 4, "max_tokens": 40, "use_beam_search": True, "ignore_eos": True}
    # A search a step behind runs in every other step, so these two kinds take turns.
    stream = [Ask(17, values, 0, True, comes_at) for comes_at in (0, 1, 0, 1)]
    scheduler, executor = make_engine(
        make_scheduler, 20, (None,), 60, preemption_mode="swap", max_num_seqs=16
    )
    outputs = drive(scheduler, executor, stream, check_blocks, is_behind=True)
    assert scheduler.counters.choices["preempt_swap"] > 1
    for number, ask in enumerate(stream):
        assert joined(outputs, number) == alone(make_scheduler, ask, number)
