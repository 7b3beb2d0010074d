"""EchoEngine: an engine without a model, for tests and for dry runs with the model name `echo:`.

The file is longer than others because it is a whole engine: a clock, a queue and a pool of blocks.
"""

import hashlib
import heapq
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.config import EngineConfig
from batchgen.echo_text import EchoOptions, EchoTexts, Sample, prompt_hash
from batchgen.engine.adapters import NO_SLOTS, Adapters
from batchgen.engine.core_request import truncated
from batchgen.engine.messages import (
    BLOCK_FREE,
    BLOCK_USED,
    AdapterInfo,
    EngineInfo,
    EngineProfile,
    EngineRequest,
    EngineStats,
    Limits,
    unpack_ids,
)
from batchgen.errors import ConfigError, EngineError
from batchgen.outputs import FailureCode, RequestOutput, RowFailure
from batchgen.quantities import counted

__all__ = ["EchoEngine", "EchoOptions"]


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    prompt_ids: list[int]
    samples: list[Sample]
    start: int = 0
    end: int = 0
    error: RowFailure | None = None
    num_blocks: int = 0

    def tokens_at(self, step: int) -> int:
        """Tokens generated up to a step, over all samples."""
        return sum(min(len(ids), step - self.start) for _, ids, _ in self.samples)


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    choices: dict[str, int] = field(default_factory=dict)


class EchoEngine:
    """An EngineClient without a model: a request's text is its prompt and a stamp of prompt and seed.

    A step gives each running sequence one token; blocks are reserved for a request's whole length when it
    starts, in the order of arrival. Honours `n`, `max_tokens`, `min_tokens`, `stop`, `ignore_eos`,
    `truncate_prompt_tokens`, log probabilities (each token is certain), limits, pause, sleep and abort.
    Greedy requests ignore the seed; penalties, bias and grammars change nothing, and a sample of a request
    with a grammar is not `valid`. Sends nothing before a request has finished, even to one that streams.
    """

    def __init__(
        self,
        tokenizer: ByteTokenizer | None = None,
        options: EchoOptions | None = None,
        *,
        max_num_seqs: int | None = None,
        max_model_len: int = 8192,
        num_blocks: int = 65536,
        block_size: int = 16,
        resolved: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer or ByteTokenizer()
        self._options = options or EchoOptions()
        self._max_num_seqs = max_num_seqs or self._options.batch
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._ends: list[tuple[int, int, _Running]] = []
        self._ids: dict[str, None] = {}
        self._order = 0
        self._step = 0
        self._num_free = num_blocks
        self._num_running = 0
        self._ready: list[RequestOutput] = []
        self._counters = _Counters()
        self._paused = False
        self._asleep = False
        self._woken = False
        self._dead = False
        self._clock = time.monotonic()
        self._texts = EchoTexts(self._tokenizer, max_model_len)
        self._adapters = Adapters()
        time.sleep(self._options.load_s)
        self.info = EngineInfo(
            model="echo:",
            architecture="Echo",
            max_model_len=max_model_len,
            vocab_size=self._tokenizer.vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            num_blocks=num_blocks,
            block_size=block_size,
            reproducible=True,
            resolved=dict(resolved or {}) | {"max_model_len": max_model_len, "reproducible": True},
            decisions=(f"max_num_seqs={self._max_num_seqs} (echo engine)",),
            environment={"backend": "echo"},
            load_s=self._options.load_s,
            pid=os.getpid(),
        )

    @classmethod
    def from_config(cls, config: EngineConfig, tokenizer: ByteTokenizer | None = None) -> "EchoEngine":
        """The engine of a model name `echo:` or `echo:?delay_ms=2&batch=16` (options: EchoOptions)."""
        return cls(
            tokenizer,
            EchoOptions.parse(config.model.model),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len or 8192,
            num_blocks=config.cache.num_gpu_blocks_override or 65536,
            block_size=config.cache.block_size,
            resolved=config.to_engine_args(),
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request; one that can never run comes back from `poll` with an error."""
        self._check_alive()
        request = truncated(request, self.info.max_model_len)
        prompt_ids = unpack_ids(request.prompt_token_ids)
        self._ids[request.request_id] = None
        failure = self._refusal(request, prompt_ids)
        if failure is not None:
            self._finish(_Running(request, prompt_ids, [], error=failure))
            return
        adapter = None if request.adapter is None else self._adapters[request.adapter].content_hash
        running = _Running(request, prompt_ids, self._texts.samples(request, prompt_ids, adapter))
        # No sample shares the prompt's blocks with another.
        lengths = [len(prompt_ids) + len(ids) for _, ids, _ in running.samples]
        running.num_blocks = sum(-(-length // self.info.block_size) for length in lengths)
        if running.num_blocks > self.info.num_blocks:
            needed = f"needs {counted(running.num_blocks, 'block')}, pool has {self.info.num_blocks:,}"
            self._finish(_Running(request, prompt_ids, [], error=RowFailure(FailureCode.NEVER_FITS, needed)))
            return
        self._waiting.append(running)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        gone = set(request_ids)
        self._waiting = deque(item for item in self._waiting if item.request.request_id not in gone)
        self._ready = [output for output in self._ready if output.request_id not in gone]
        for request_id in gone:
            self._ids.pop(request_id, None)
            if (item := self._running.pop(request_id, None)) is not None:
                self._release(item)

    def poll(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """Finished requests; waits for at least one, at most `timeout_s`."""
        self._check_alive()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._advance()
            if self._ready or not self._ids:
                outputs, self._ready = self._ready, []
                for output in outputs:
                    self._ids.pop(output.request_id, None)
                return outputs
            now = time.monotonic()
            if self._woken or (deadline is not None and now >= deadline):
                self._woken = False
                return []
            is_still = self._paused or self._asleep
            pause = 0.05 if is_still else (self._ends[0][0] - self._step) * self._options.delay_ms / 1000
            time.sleep(min(pause, 0.05, 0.05 if deadline is None else deadline - now))

    def wake(self) -> None:
        """Let a `poll` in another thread return within 50 ms."""
        self._woken = True

    def in_flight(self) -> list[str]:
        """Ids of requests added and not finished or aborted, in the order they were added."""
        return list(self._ids)

    def stats(self, with_block_map: bool = False) -> EngineStats:
        """What the engine does at this moment."""
        used = self.info.num_blocks - self._num_free
        blocks = bytes([BLOCK_USED]) * used + bytes([BLOCK_FREE]) * self._num_free if with_block_map else None
        return EngineStats(
            time_s=time.time(),
            num_waiting=len(self._waiting),
            num_running=self._num_running,
            num_blocks=self.info.num_blocks,
            num_used_blocks=used,
            num_steps=self._step,
            prompt_tokens=self._counters.prompt_tokens,
            generation_tokens=self._counters.generation_tokens
            + sum(item.tokens_at(self._step) for item in self._running.values()),
            num_requests_finished=self._counters.finished,
            step_time_s=self._options.delay_ms / 1000,
            is_paused=self._paused,
            max_num_seqs=self._max_num_seqs,
            block_map=blocks,
        )

    def set_limits(self, limits: Limits) -> None:
        """Change how many sequences run at once."""
        self._check_alive()
        self._max_num_seqs = limits.max_num_seqs or self._max_num_seqs

    def pause(self) -> None:
        """Stop the steps; what is in flight stays."""
        self._check_alive()
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._check_alive()
        self._paused = False
        self._clock = time.monotonic()

    def sleep(self, level: int = 1) -> None:
        """Stop the steps until `wake_up`; there is no memory to give back."""
        self._check_alive()
        if level not in (1, 2):
            raise ConfigError(f"sleep level must be 1 or 2; got {level!r}")
        self._asleep = True

    def wake_up(self) -> None:
        """Go on after `sleep`."""
        self._check_alive()
        self._asleep = False
        self._clock = time.monotonic()

    def reset_prefix_cache(self) -> bool:
        """Nothing is cached."""
        self._check_alive()
        return True

    def unpin_prefix(self, request_id: str) -> bool:
        """Nothing is pinned."""
        self._check_alive()
        return False

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """There is no model to adapt; but requests that name it get other texts, by its path."""
        self._check_alive()
        if not self.info.resolved.get("enable_lora", False):
            raise ConfigError(f"adapter {name!r} ({path}): {NO_SLOTS}")
        content = hashlib.sha256(path.encode()).hexdigest()
        return self._adapters.enter(AdapterInfo(name=name, path=path, content_hash=content))

    def unload_adapter(self, name: str) -> bool:
        """Let no further request name an adapter; whether there was one."""
        self._check_alive()
        return self._adapters.forget(name) is not None

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return self._adapters.known()

    def pin_adapter(self, name: str) -> bool:
        """Whether there is an adapter of that name."""
        return name in self._adapters

    def begin_profile(self) -> None:
        """There is nothing that could be measured."""
        raise ConfigError("the echo engine computes nothing that could be measured; name a model")

    def end_profile(self) -> EngineProfile:
        """As `begin_profile`."""
        raise ConfigError("the echo engine computes nothing that could be measured; name a model")

    def shutdown(self) -> None:
        """Forget everything."""
        self._dead = True
        self._waiting.clear()
        self._running.clear()
        self._ends.clear()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineError("the echo engine is dead")

    def _refusal(self, request: EngineRequest, prompt_ids: list[int]) -> RowFailure | None:
        if not prompt_ids:
            return RowFailure(FailureCode.EMPTY_PROMPT, "the prompt has no tokens")
        if len(prompt_ids) >= self.info.max_model_len:
            tokens, limit = counted(len(prompt_ids), "token"), self.info.max_model_len
            return RowFailure(
                FailureCode.PROMPT_TOO_LONG, f"no room for {tokens} under max_model_len {limit}"
            )
        if request.adapter is not None and request.adapter not in self._adapters:
            has_slots = bool(self.info.resolved.get("enable_lora", False))
            return self._adapters.refusal(request.adapter, has_slots=has_slots)
        if self._options.fail and self._options.fail in self._tokenizer.decode(prompt_ids):
            return RowFailure(FailureCode.ENGINE_ERROR, f"the prompt holds {self._options.fail!r}")
        return None

    def _advance(self) -> None:
        """Run the steps that fit the time passed, starting and finishing requests on the way."""
        if self._paused or self._asleep:
            return
        if self._options.delay_ms <= 0:
            self._start_waiting()
            if not self._ready and self._ends:
                self._run_to(self._ends[0][0])
            return
        now = time.monotonic()
        if not self._running:
            self._clock = now
        steps = int((now - self._clock) * 1000 / self._options.delay_ms)
        self._clock += steps * self._options.delay_ms / 1000
        target = self._step + steps
        self._start_waiting()
        while self._ends and self._ends[0][0] <= target:
            self._run_to(self._ends[0][0])
            self._start_waiting()
        self._step = target

    def _start_waiting(self) -> None:
        while self._waiting:
            item = self._waiting[0]
            is_over_width = self._running and self._num_running + len(item.samples) > self._max_num_seqs
            if item.num_blocks > self._num_free or is_over_width:
                return
            self._waiting.popleft()
            self._num_running += len(item.samples)
            self._num_free -= item.num_blocks
            self._counters.prompt_tokens += len(item.prompt_ids)
            late = prompt_hash(item.request.prompt_token_ids) % (self._options.jitter + 1)
            item.start = self._step
            item.end = self._step + max(len(ids) for _, ids, _ in item.samples) + late
            self._running[item.request.request_id] = item
            self._order += 1
            heapq.heappush(self._ends, (item.end, self._order, item))

    def _run_to(self, step: int) -> None:
        self._step = step
        while self._ends and self._ends[0][0] <= step:
            item = heapq.heappop(self._ends)[2]
            # An aborted request's entry stays in the heap until its time comes.
            if self._running.get(item.request.request_id) is item:
                del self._running[item.request.request_id]
                self._release(item)
                self._finish(item)

    def _release(self, item: _Running) -> None:
        self._num_free += item.num_blocks
        self._num_running -= len(item.samples)

    def _finish(self, item: _Running) -> None:
        if self._options.die_after and self._counters.finished >= self._options.die_after:
            self._dead = True
            finished = counted(self._counters.finished, "request")
            raise EngineError(f"the echo engine died after {finished} (die_after)")
        self._counters.finished += 1
        self._counters.generation_tokens += sum(len(ids) for _, ids, _ in item.samples)
        params = item.request.params
        self._ready.append(
            RequestOutput(
                request_id=item.request.request_id,
                prompt=item.request.prompt,
                prompt_token_ids=item.prompt_ids,
                outputs=[
                    self._texts.completion(index, sample, params) for index, sample in enumerate(item.samples)
                ],
                finished=True,
                prompt_logprobs=None if item.error else self._texts.prompt_logprobs(item.prompt_ids, params),
                error=item.error,
            )
        )
