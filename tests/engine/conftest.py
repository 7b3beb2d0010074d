"""What the engine's tests share: making requests and engines small, and driving them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.config import EngineConfig
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.core import EngineCore
from batchgen.engine.in_process import InProcessClient
from batchgen.engine.messages import EngineRequest, SampleOutput, pack_ids, unpack_ids
from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import DrawRules, SamplingRow, SchedulerOutput, StepResult
from batchgen.engine.sequence import Sequence
from batchgen.sampling_params import SamplingParams
from batchgen.testing import ByteTokenizer, CountingExecutor, counting_token

VOCAB_SIZE = 101


@pytest.fixture(scope="session")
def make_request() -> Callable[..., EngineRequest]:
    """EngineRequest of a prompt; other keywords are its own fields or those of SamplingParams."""

    def make(request_id: str, prompt: Iterable[int], **values: Any) -> EngineRequest:
        own = {
            name: values.pop(name)
            for name in (
                "seed",
                "streams",
                "features",
                "adapter",
                "cache_salt",
                "serial",
                "priority",
                "is_pinned",
            )
            if name in values
        }
        params = values.pop("params", None) or SamplingParams(**{"temperature": 0, **values})
        return EngineRequest(request_id=request_id, prompt_token_ids=pack_ids(prompt), params=params, **own)

    return make


@pytest.fixture(scope="session")
def make_sequence(make_request: Callable[..., EngineRequest]) -> Callable[..., Sequence]:
    """A waiting sequence of a prompt, for tests of the block manager."""
    numbers = iter(range(1_000_000))

    def make(prompt: Iterable[int], num_groups: int = 1, cache_root: bytes = b"", **values: Any) -> Sequence:
        number = next(numbers)
        request = Request(
            make_request(f"r{number}", prompt, **values),
            number,
            max_model_len=1000,
            eos_token_ids=frozenset(),
            vocab_size=VOCAB_SIZE,
            cache_root=cache_root,
        )
        return Sequence(number, request, 0, num_groups)

    return make


@pytest.fixture(scope="session")
def admit() -> Callable[..., bool]:
    """Give a waiting sequence its hits and blocks for all its tokens, if there are enough."""

    def try_it(blocks: BlockManager, sequence: Sequence) -> bool:
        hits = blocks.lookup(sequence, sequence.num_tokens - 1)
        if blocks.num_needed(hits, sequence.num_tokens, sequence.num_tokens) > blocks.pool.num_free:
            return False
        blocks.take(sequence, hits, sequence.num_tokens, sequence.num_tokens)
        return True

    return try_it


@pytest.fixture(scope="session")
def make_config() -> Callable[..., EngineConfig]:
    """An EngineConfig for the CountingExecutor."""
    return lambda **engine_args: EngineConfig.from_engine_args(model="counting:", **engine_args)


@pytest.fixture(scope="session")
def make_client(make_config: Callable[..., EngineConfig]) -> Callable[..., Any]:
    """An engine in this process with a CountingExecutor: client, core and executor."""

    def make(
        *, eos: tuple[int, ...] = (), num_groups: int = 1, before_step: Any = None, **engine_args: Any
    ) -> Any:
        config = make_config(**engine_args)
        executor = CountingExecutor(
            config, eos_token_ids=eos, num_groups=num_groups, before_step=before_step, vocab_size=VOCAB_SIZE
        )
        core = EngineCore(config, executor)
        return SimpleNamespace(client=InProcessClient(core, ByteTokenizer()), core=core, executor=executor)

    return make


@pytest.fixture(scope="session")
def make_scheduler() -> Callable[..., Scheduler]:
    """A Scheduler over its own blocks."""

    def make(
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        num_groups: int = 1,
        group_windows: tuple[int | None, ...] | None = None,
        num_cpu_blocks: int = 0,
        enable_prefix_caching: bool = True,
        **values: Any,
    ) -> Scheduler:
        blocks = BlockManager(
            num_blocks,
            block_size,
            group_windows=group_windows or (None,) * num_groups,
            num_cpu_blocks=num_cpu_blocks,
            enable_prefix_caching=enable_prefix_caching,
        )
        limits = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "vocab_size": VOCAB_SIZE,
        }
        return Scheduler(blocks, **{**limits, **values})

    return make


@pytest.fixture(scope="session")
def execute() -> Callable[[SchedulerOutput], StepResult]:
    """An executor that draws token 7 for every row; for tests that look at the schedule alone."""
    return lambda step: StepResult(step.step, [7 for sequence in step.sequences for _ in sequence.samples])


@pytest.fixture(scope="session")
def expected_tokens() -> Callable[..., list[int]]:
    """What a sample must be, computed from its request alone: no scheduler, no blocks."""

    def compute(
        request: EngineRequest, index: int = 0, *, max_model_len: int = 256, eos: tuple[int, ...] = ()
    ) -> list[int]:
        history = unpack_ids(request.prompt_token_ids)
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        drawn: list[int] = []
        while len(history) < max_model_len and len(drawn) != params.max_tokens:
            row = SamplingRow(
                slot=0,
                rules=DrawRules(params, frozenset(ends)),
                key=(request.seed, index, len(history)),
                num_generated=len(drawn),
            )
            token = counting_token(history, row, VOCAB_SIZE)
            history.append(token)
            drawn.append(token)
            if token in ends:
                break
        return drawn

    return compute


@pytest.fixture(scope="session")
def joined() -> Callable[[Iterable[SampleOutput]], dict[tuple[str, int], SampleOutput]]:
    """All messages of a sample as one."""

    def join(outputs: Iterable[SampleOutput]) -> dict[tuple[str, int], SampleOutput]:
        whole: dict[tuple[str, int], SampleOutput] = {}
        for output in outputs:
            key = (output.request_id, output.index)
            before = whole[key].token_ids if key in whole else b""
            assert key not in whole or whole[key].finish_reason is None, f"{key} goes on after its end"
            whole[key] = replace(output, token_ids=before + output.token_ids)
        return whole

    return join


@pytest.fixture(scope="session")
def check_blocks() -> Callable[[Scheduler], None]:
    """Invariants that hold between any two calls of a scheduler."""

    def check(scheduler: Scheduler) -> None:
        table, pool, host_pool = scheduler.table, scheduler.blocks.pool, scheduler.blocks.host_pool
        holders, host_holders = [0] * pool.num_blocks, [0] * host_pool.num_blocks
        for group in [*table.running, *table.waiting, *table.swapped]:
            for sequence in group.sequences:
                for blocks in sequence.block_tables:
                    held = [block for block in blocks if block >= 0]
                    assert len(set(held)) == len(held)
                    for block in held:
                        holders[block] += 1
                for blocks in sequence.host_tables:
                    for block in blocks:
                        if block >= 0:
                            host_holders[block] += 1
                            assert group in table.swapped
        for block in scheduler.pins.held_blocks():
            holders[block] += 1
        assert holders == pool.ref_counts
        assert pool.num_free == holders.count(0)
        assert host_holders == host_pool.ref_counts
        assert host_pool.num_free == host_holders.count(0)
        for group in [*table.waiting, *table.swapped]:
            assert not any(any(sequence.block_tables) for sequence in group.sequences)
        queued = [*table.waiting, *table.running, *table.swapped]
        for queue in (table.waiting, table.running, table.swapped):
            assert [group.order for group in queue] == sorted(group.order for group in queue)
        unfinished = [group for request in table.requests.values() for group in request.groups]
        assert {id(group) for group in unfinished} == {id(group) for group in queued}
        assert len(unfinished) == len(queued)
        assert all(group.sequences and not any(s.is_finished for s in group.sequences) for group in queued)
        for request in table.requests.values():
            assert sum(group.width for group in request.groups) == request.num_unfinished

    return check
