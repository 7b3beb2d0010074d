"""CountingExecutor: an executor without a model, whose tokens are right only if every KV block is.

For tests of the engine: `ChildClient(..., executor="batchgen.counting:load_counting")` runs it in a real
child.
"""

import logging
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Sequence

from batchgen.config import EngineConfig
from batchgen.engine.scheduler_output import (
    DrawRules,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from batchgen.errors import WeightsError
from batchgen.sampling_params import SamplingParams
from batchgen.seeds import mix64
from batchgen.whole_steps import WholeSteps
from batchgen.worker.executor import AdapterMemory, ExecutorInfo, ExecutorProfile


def counting_token(history: Sequence[int], row: SamplingRow, vocab_size: int) -> int:
    """The token that follows `history`: a hash of it, and of the row's key unless it is greedy.

    A token with the highest positive `logit_bias` is taken instead. Ids held back by `min_tokens` are passed
    over.
    """
    state = 0
    for token in history:
        state = mix64(state ^ (token + 1))
    if not row.params.is_greedy:
        for part in row.key:
            state = mix64(state ^ part)
    held_back = row.stop_ids if row.num_generated < row.params.min_tokens else frozenset()
    bias = row.params.logit_bias or {}
    forced = [token for token in sorted(bias, key=lambda token: -bias[token]) if bias[token] > 0]
    for token in [*forced, *((state + step) % vocab_size for step in range(vocab_size))]:
        if token not in held_back:
            return token
    raise AssertionError("every token id is held back")


def counting_candidates(
    history: Sequence[int], row: SamplingRow, vocab_size: int
) -> tuple[list[int], list[float]]:
    """The likeliest tokens after `history` for a beam, and their log probabilities: hashes of it."""
    state = 0
    for token in history:
        state = mix64(state ^ (token + 1))
    held_back = row.stop_ids if row.num_generated < row.params.min_tokens else frozenset()
    logprobs = {
        token: -0.01 - mix64(state ^ (token + 1)) / 2**62
        for token in range(vocab_size)
        if token not in held_back
    }
    ids = sorted(logprobs, key=lambda token: -logprobs[token])[: row.num_candidates]
    return ids, [logprobs[token] for token in ids]


def counting_logprobs(position: int, token: int) -> TokenLogprobs:
    """What is told of a token that stands at a position; both can be read off it."""
    return TokenLogprobs((token,), (-position / 1000,), (1,))


Block = list[tuple[int, int, int] | None]  # KV group, position and token of each slot


class CountingExecutor:
    """Keeps (position, token) pairs in its KV blocks and draws from what it reads there.

    A wrong block table, a missing copy, a block reused too early or a placeholder taken for a token shows as
    an AssertionError or as another token than `counting_token` of the true history.

    Args:
        config: block size and limits are taken from it; unset ones are small.
        num_groups: KV groups, each with blocks of its own.
        group_windows: instead of `num_groups`, a sliding window for each group, None for full attention; one
            group at least is full.
        num_cpu_blocks: blocks in host memory.
        eos_token_ids: as a model's.
        before_step: called with every step; may sleep, raise or kill.
        adapters: if there are any.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = 101,
        num_groups: int = 1,
        group_windows: tuple[int | None, ...] | None = None,
        num_cpu_blocks: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        before_step: Callable[[SchedulerOutput], None] | None = None,
        adapters: AdapterMemory | None = None,
    ):
        num_blocks = config.cache.num_gpu_blocks_override or 64
        self.block_size = config.cache.block_size
        self.steps: list[tuple[int, int]] = []  # sequences and tokens of each step
        self._blocks: list[Block] = [[None] * self.block_size for _ in range(num_blocks)]
        self._host_blocks: list[Block] = [[] for _ in range(num_cpu_blocks)]
        self._last: dict[int, int] = {}
        self._whole = WholeSteps()
        self._before_step, self.adapters = before_step, adapters
        limits = {
            "max_num_seqs": config.scheduler.max_num_seqs or 8,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens or 64,
        }
        self.info = ExecutorInfo(
            architecture="counting",
            max_model_len=config.model.max_model_len or 256,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            num_blocks=num_blocks,
            group_windows=group_windows or (None,) * num_groups,
            num_cpu_blocks=num_cpu_blocks,
            block_bytes=1000,
            resolved={**config.to_engine_args(), **limits, "num_gpu_blocks_override": num_blocks},
            environment={},
            reproducible=True,
            continues=True,
        )

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Swap and copy blocks, write the step's tokens, then draw from what is stored."""
        step = self._whole.spelled_out(step)
        if self._before_step is not None:
            self._before_step(step)
        self.steps.append((len(step.sequences), step.num_tokens))
        _move(self._blocks, self._host_blocks, step.swap_out)
        _move(self._host_blocks, self._blocks, step.swap_in)
        _move(self._blocks, self._blocks, step.block_copies)
        for sequence in step.sequences:
            self._store(sequence)
        drawn: list[tuple[int, int]] = []
        candidates: dict[int, tuple[list[int], list[float]]] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        for sequence in step.sequences:
            known = self._read(sequence)
            for row in sequence.samples:
                history = known[: row.key[2]]
                _check_history(history, row)
                if row.num_candidates:
                    candidates[len(drawn)] = counting_candidates(history, row, self.info.vocab_size)
                    drawn.append((row.slot, 0))
                    continue
                token = counting_token(history, row, self.info.vocab_size)
                if row.params.logprobs is not None or row.params.num_samples > row.params.n:
                    logprobs[len(drawn)] = counting_logprobs(row.key[2], token)
                drawn.append((row.slot, token))
        self._last = dict(drawn)
        scores = {each.seq_id: _scores(each) for each in step.sequences if each.scores}
        tokens: list[int | None] = [token for _, token in drawn]
        self._whole.drawn(tokens)
        return StepResult(step.step, tokens, logprobs, candidates, prompt_logprobs=scores)

    def refusal(self, params: SamplingParams) -> str | None:
        """Draws for any."""
        return None

    def accepts(self, rules: DrawRules, token_ids: Sequence[int]) -> bool:
        """Knows no grammar."""
        return True

    def begin_profile(self) -> None:
        """Nothing to time."""

    def end_profile(self) -> ExecutorProfile:
        """Nothing was timed."""
        return ExecutorProfile(seconds={}, num_tokens=0, num_rows=0, ceilings=None, bound_s={})

    def sleep(self, level: int) -> None:
        """Nothing to give back."""

    def wake_up(self) -> None:
        """Nothing to take."""

    def shutdown(self) -> None:
        """Nothing to free."""

    def _store(self, sequence: ScheduledSequence) -> None:
        for offset, token in enumerate(sequence.token_ids):
            position = sequence.num_computed_tokens + offset
            if token == -1:
                token = self._last[sequence.seq_id]
            for group, table in enumerate(sequence.block_ids):
                block = self._blocks[table[position // self.block_size]]
                block[position % self.block_size] = (group, position, token)

    def _read(self, sequence: ScheduledSequence) -> list[int]:
        """All tokens of a sequence as its blocks have them, checked in every group as far as it reads."""
        first, end = sequence.num_computed_tokens, sequence.num_computed_tokens + len(sequence.token_ids)
        histories = []
        for group, table in enumerate(sequence.block_ids):
            window = self.info.group_windows[group]
            # What the step's first query reads is there; what lies before may have been given back.
            start = 0 if window is None else max(first - window + 1, 0)
            tokens = array("i", [-1]) * start
            for position in range(start, end):
                block = table[position // self.block_size]
                assert block >= 0, f"sequence {sequence.seq_id} lacks the block of position {position}"
                entry = self._blocks[block][position % self.block_size]
                assert entry is not None, (
                    f"sequence {sequence.seq_id} reads position {position}, never written"
                )
                assert entry[:2] == (group, position), (
                    f"sequence {sequence.seq_id} reads a foreign block: {entry}"
                )
                tokens.append(entry[2])
            histories.append(tokens.tolist())
        whole = max(histories, key=lambda history: -history.count(-1))
        for history in histories:
            assert all(mine in (-1, true) for mine, true in zip(history, whole, strict=True)), (
                "the groups disagree"
            )
        return whole


def _move(source: list[Block], target: list[Block], moves: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, as if all were read before the first is written."""
    contents = [source[each].copy() for each, _ in moves]
    for (_, block), content in zip(moves, contents, strict=True):
        target[block] = content


def _scores(sequence: ScheduledSequence) -> list[TokenLogprobs]:
    """Prompt tokens scored; the logits of the position before each must be computed in this step."""
    scores, first = sequence.scores, sequence.num_computed_tokens
    assert scores is not None
    positions = range(scores.start, scores.start + len(scores.targets))
    assert first <= positions[0] - 1 and positions[-1] - 1 < first + len(sequence.token_ids)
    return [counting_logprobs(*each) for each in zip(positions, scores.targets, strict=True)]


def _check_history(history: list[int], row: SamplingRow) -> None:
    """What a row says stands before its token must stand in the blocks."""
    assert len(history) == row.key[2], f"a draw at position {row.key[2]} of {len(history)} known tokens"
    start = len(history) - len(row.drafts)
    assert tuple(history[start:]) == row.drafts, (
        f"drafts {row.drafts} are not in the blocks: {history[start:]}"
    )
    if row.history is not None:
        told = list(row.history[:start])
        assert told == history[: len(told)] and len(told) >= start - 1, "a row was told another history"


def load_counting(config: EngineConfig) -> CountingExecutor:
    """A CountingExecutor as a child process loads it."""
    logging.getLogger("batchgen.loading").info("loading %s", config.model.model)
    return CountingExecutor(config)


def load_slow(config: EngineConfig) -> CountingExecutor:
    """One whose steps take 20 ms and print something, which must not get among the packets."""

    def idle(step: SchedulerOutput) -> None:
        print(f"step {step.step} to stdout", flush=True)
        time.sleep(0.02)

    return CountingExecutor(config, before_step=idle)


def load_stuck(config: EngineConfig) -> CountingExecutor:
    """One whose steps never end."""
    return CountingExecutor(config, before_step=lambda step: time.sleep(3600))


def load_mortal(config: EngineConfig) -> CountingExecutor:
    """One that kills its process when it computes token 100, the last of its vocabulary."""

    def die(step: SchedulerOutput) -> None:
        if any(100 in sequence.token_ids for sequence in step.sequences):
            print("token 100 came", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    return CountingExecutor(config, before_step=die)


def load_failing(config: EngineConfig) -> CountingExecutor:
    """One that raises in its third step."""

    def fail(step: SchedulerOutput) -> None:
        if step.step == 2:
            raise RuntimeError("the third step is one too many")

    return CountingExecutor(config, before_step=fail)


def load_broken(config: EngineConfig) -> CountingExecutor:
    """Cannot be loaded."""
    raise WeightsError("model.layers.0 is missing\nlook at the file")
