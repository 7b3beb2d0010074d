"""ChildClient: an engine in a child process, as its caller sees it."""

import logging
import os
import queue
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from batchgen.config import EngineConfig
from batchgen.engine import wire
from batchgen.engine.child_process import ChildProcess
from batchgen.engine.loading import DEFAULT_EXECUTOR
from batchgen.engine.messages import (
    AdapterInfo,
    EngineInfo,
    EngineProfile,
    EngineRequest,
    EngineStats,
    Limits,
)
from batchgen.engine.output_processor import OutputProcessor, OutputTokenizer
from batchgen.errors import EngineError
from batchgen.outputs import RequestOutput

_GRACE_S = 2.0
_LOOK_S = 1.0  # how often a caller who waits looks whether the child is still there
_STATS_WAIT_S = 0.1  # a step may take many seconds, and whoever asks has a user to answer to


class ChildClient:
    """An EngineClient whose engine lives in a child and dies with this process, or with this object.

    Args:
        config: settings of the engine.
        tokenizer: makes text of tokens, here; the child needs none.
        executor: "module:function" from EngineConfig to Executor, imported in the child. Tests put in one
            without a model.
        on_loading: called with what the child is about to do while it loads, which else goes to the log.
        process: a child that nobody has greeted; else one is started here.

    Raises:
        BatchgenError: what the child raised while loading, of the same class.
        EngineError: the child died while loading.
    """

    info: EngineInfo

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: OutputTokenizer,
        *,
        executor: str = DEFAULT_EXECUTOR,
        on_loading: Callable[[str], None] | None = None,
        process: ChildProcess | None = None,
    ):
        hello = wire.Hello(
            config=config,
            executor=executor,
            tokenizer_eos_ids=tuple(tokenizer.eos_token_ids),
            parent_pid=os.getpid(),
            log_level=logging.getLogger("batchgen").getEffectiveLevel(),
            tells_loading=on_loading is not None,
        )
        self._processor = OutputProcessor(tokenizer)
        self._outputs: list[RequestOutput] = []
        self._stats = EngineStats()
        self._asked_stats: EngineStats | None = None
        self._is_stats_due = False
        self._num_calls = 0
        self._answers: dict[int, tuple[Any, tuple[str, str] | None]] = {}
        self._is_woken = False
        self._death: str | None = None
        self._process = process or ChildProcess()
        self._finalizer = weakref.finalize(self, self._process.kill)
        self._process.greet(hello)
        try:
            self.info = self._wait_until_ready(on_loading)
            self._processor.know(self.info)
        except BaseException:
            self._process.kill()
            raise

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._check_alive()
        self._process.send("add", self._processor.add(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests."""
        self._check_alive()
        dropped = self._processor.drop(request_ids)
        if dropped:
            gone = set(dropped)
            self._outputs = [output for output in self._outputs if output.request_id not in gone]
            self._process.send("abort", dropped)

    def poll(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """Outputs since the last call; waits for one at most `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._take_ready()
        while not (self._outputs or self._is_woken) and self._processor.has_requests:
            if not self._take_next(deadline):
                break
            self._take_ready()
        outputs, self._outputs = self._outputs, []
        self._is_woken = False
        return outputs

    def wake(self) -> None:
        """Let a `poll` that waits in another thread return. If it has much to read it returns anyway."""
        with suppress(queue.Full):
            self._process.packets.put_nowait((wire.WAKE, None))

    def in_flight(self) -> list[str]:
        """Ids of requests not finished; still known after the child's death."""
        return self._processor.in_flight()

    def stats(self, with_block_map: bool = False) -> EngineStats:
        """The newest snapshot. With a block map the child is asked, which answers at the end of its step.

        That is waited for only a moment: an answer that comes later is that of the next such call.
        """
        self._take_ready()
        if with_block_map:
            if not self._is_stats_due and self._asked_stats is None:
                self._process.send("stats", True)
                self._is_stats_due = True
            deadline = time.monotonic() + _STATS_WAIT_S
            # A child that died with outputs yet to be handed out does not raise here, and never answers.
            while self._asked_stats is None and self._death is None and self._take_next(deadline):
                pass
            answer, self._asked_stats = self._asked_stats, None
            return answer or self._stats
        return self._stats

    def set_limits(self, limits: Limits) -> None:
        """Change limits from the next step on."""
        self._check_alive()
        self._process.send("set_limits", limits)

    def pause(self) -> None:
        """Stop scheduling; what is in flight stays where it is."""
        self._check_alive()
        self._process.send("pause")

    def resume(self) -> None:
        """Go on after `pause`."""
        self._check_alive()
        self._process.send("resume")

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`; returns when it is free."""
        self._call("sleep", level)

    def wake_up(self) -> None:
        """Be ready again after `sleep`."""
        self._call("wake_up")

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks and end all pins; whether that was done."""
        return bool(self._call("reset_prefix_cache"))

    def unpin_prefix(self, request_id: str) -> bool:
        """Let the blocks go that a pinned request keeps; False if it keeps none."""
        return bool(self._call("unpin_prefix", request_id))

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Check a LoRA adapter's files and let requests name it."""
        loaded: AdapterInfo = self._call("load_adapter", name, path)
        return loaded

    def unload_adapter(self, name: str) -> bool:
        """Let no further request name an adapter; whether there was one."""
        return bool(self._call("unload_adapter", name))

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        known: list[AdapterInfo] = self._call("adapters")
        return known

    def pin_adapter(self, name: str) -> bool:
        """Keep an adapter in memory; whether there is one of that name."""
        return bool(self._call("pin_adapter", name))

    def begin_profile(self) -> None:
        """Keep time from now on."""
        self._call("begin_profile")

    def end_profile(self) -> EngineProfile:
        """Where the time went since `begin_profile`."""
        found: EngineProfile = self._call("end_profile")
        return found

    def shutdown(self) -> None:
        """End the child; its memory is free when this returns. May be called twice."""
        self._death = self._death or "was shut down"
        self._process.close(_GRACE_S)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Have the core do something between two steps, and wait for its answer.

        Raises:
            BatchgenError: what the core raised, of the same class; EngineError when the child is dead.
        """
        self._check_alive()
        self._num_calls += 1
        number = self._num_calls
        self._process.send("call", (number, method, arguments))
        while number not in self._answers:
            self._take_next(None)
            if self._death is not None:
                raise EngineError(f"the engine process {self._death}")
        value, error = self._answers.pop(number)
        if error is not None:
            raise wire.decode_error(error, method.replace("_", " "))
        return value

    def _wait_until_ready(self, on_loading: Callable[[str], None] | None) -> EngineInfo:
        while True:
            packet = self._process.packets.get()
            if packet is None:
                raise EngineError(
                    f"the engine process died while loading: it {self._process.cause_of_death()}"
                )
            kind, content = packet
            if kind == wire.READY:
                info: EngineInfo
                info, self._stats = content
                return info
            if kind == wire.LOADING and on_loading is not None:
                on_loading(content)
            if kind == wire.FAILED:
                raise wire.decode_error(content)

    def _take_ready(self) -> None:
        """Take in all packets that are there."""
        while not self._process.packets.empty():
            self._take_next(None)
        self._check_alive(with_outputs=False)

    def _take_next(self, deadline: float | None) -> bool:
        """Wait for one packet and take it in; False when there was none in time."""
        packet = None
        while True:
            left_s = _LOOK_S if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                packet = self._process.packets.get(timeout=min(left_s, _LOOK_S))
                break
            except queue.Empty:
                if self._process.has_ended:  # an interrupt may have swallowed the word of its death
                    break
                if left_s <= _LOOK_S and deadline is not None:
                    return False
        if packet is None:
            self._death = self._death or self._process.cause_of_death()
            self._check_alive(with_outputs=False)
        else:
            self._take(*packet)
        return True

    def _take(self, kind: str, content: Any) -> None:
        if kind == wire.STATS:
            self._asked_stats = self._stats = content
            self._is_stats_due = False
            return
        if kind == wire.ANSWER:
            number, value, error = content
            self._answers[number] = value, error
            return
        if kind == wire.WAKE:
            self._is_woken = True
            return
        encoded, stats = content
        self._stats = stats or self._stats
        outputs, ended = self._processor.process(wire.decode_outputs(encoded))
        self._outputs += outputs
        if ended:
            self._process.send("abort_samples", ended)

    def _check_alive(self, with_outputs: bool = True) -> None:
        """Raise EngineError once the child is known to be dead; what came before is handed out first."""
        if self._death is not None and (with_outputs or not self._outputs):
            raise EngineError(f"the engine process {self._death}")
