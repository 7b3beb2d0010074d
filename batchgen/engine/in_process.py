"""InProcessClient: an engine in the caller's own process, computed inside `poll`."""

import time
from collections.abc import Sequence

from batchgen.engine.core import EngineCore
from batchgen.engine.messages import (
    AdapterInfo,
    EngineInfo,
    EngineProfile,
    EngineRequest,
    EngineStats,
    Limits,
)
from batchgen.engine.output_processor import OutputProcessor, OutputTokenizer
from batchgen.outputs import RequestOutput

_LOOK_S = 0.02  # how often a poll that waits looks whether it is wanted back


class InProcessClient:
    """An EngineClient without a second process: steps are computed while the caller waits in `poll`.

    An exception of the model comes out of `poll` as it is; the engine stays usable, requests stay in flight.
    """

    info: EngineInfo

    def __init__(self, core: EngineCore, tokenizer: OutputTokenizer):
        self.info = core.info
        self._core = core
        self._processor = OutputProcessor(tokenizer, core.info)
        self._is_woken = False

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._core.add(self._processor.add(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests."""
        self._core.abort(self._processor.drop(request_ids))

    def poll(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """Compute steps until there is an output, nothing to do, or `timeout_s` is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        outputs: list[RequestOutput] = []
        while not outputs and self._core.has_work:
            outputs, ended = self._processor.process(self._core.step())
            self._core.abort_samples(ended)
            if self._is_woken or (deadline is not None and time.monotonic() >= deadline):
                break
        if not outputs and not self._core.has_work and deadline is not None and self._processor.has_requests:
            self._wait(deadline)  # paused, or asleep
        self._is_woken = False
        return outputs

    def _wait(self, deadline: float) -> None:
        while not self._is_woken and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))

    def wake(self) -> None:
        """Let a `poll` in another thread return after its step."""
        self._is_woken = True

    def in_flight(self) -> list[str]:
        """Ids of requests not finished."""
        return self._processor.in_flight()

    def stats(self, with_block_map: bool = False) -> EngineStats:
        """The numbers of this moment."""
        return self._core.stats(with_block_map)

    def set_limits(self, limits: Limits) -> None:
        """Change limits from the next step on."""
        self._core.set_limits(limits)

    def pause(self) -> None:
        """Let `poll` compute nothing until `resume`; without a timeout it then returns at once."""
        self._core.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._core.resume()

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`."""
        self._core.sleep(level)

    def wake_up(self) -> None:
        """Be ready again after `sleep`."""
        self._core.wake_up()

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks and end all pins; whether that was done."""
        return self._core.reset_prefix_cache()

    def unpin_prefix(self, request_id: str) -> bool:
        """Let the blocks go that a pinned request keeps; False if it keeps none."""
        return self._core.unpin_prefix(request_id)

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Check a LoRA adapter's files and let requests name it."""
        return self._core.load_adapter(name, path)

    def unload_adapter(self, name: str) -> bool:
        """Let no further request name an adapter; whether there was one."""
        return self._core.unload_adapter(name)

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return self._core.adapters()

    def pin_adapter(self, name: str) -> bool:
        """Keep an adapter in memory; whether there is one of that name."""
        return self._core.pin_adapter(name)

    def begin_profile(self) -> None:
        """Keep time from now on."""
        self._core.begin_profile()

    def end_profile(self) -> EngineProfile:
        """Where the time went since `begin_profile`."""
        return self._core.end_profile()

    def shutdown(self) -> None:
        """Free the model."""
        self._core.shutdown()
