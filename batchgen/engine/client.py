"""EngineClient: the narrow interface through which everything above talks to an engine, wherever it runs."""

from collections.abc import Sequence
from typing import Protocol

from batchgen.engine.messages import (
    AdapterInfo,
    EngineInfo,
    EngineProfile,
    EngineRequest,
    EngineStats,
    Limits,
)
from batchgen.outputs import RequestOutput


class EngineClient(Protocol):
    """An engine as its caller sees it.

    Implementations: `InProcessClient` (engine/in_process.py), `ChildClient` (engine/child_client.py) and
    `EchoEngine` (batchgen/testing.py). One thread calls it. After the engine died every call raises
    EngineError, whose message carries the last lines of the child's stderr; requests in flight are then
    `in_flight()`. What is answered (`sleep` and below) is done between two steps, and a caller may go on with
    requests in flight as if nothing had happened; a refusal raises and changes nothing.
    """

    info: EngineInfo

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Returns at once; one that cannot run comes back from `poll` with an error."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; nothing more is heard of them. Unknown or finished ids are ignored."""

    def poll(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """Outputs since the last call: finished requests, and unfinished ones that stream.

        Waits for at least one output, at most `timeout_s` (None: until there is one; returns [] at once when
        nothing is in flight).
        """

    def wake(self) -> None:
        """Let a `poll` that waits return soon. The only method that another thread may call."""

    def in_flight(self) -> list[str]:
        """Ids of requests added and not finished or aborted, in the order they were added."""

    def stats(self, with_block_map: bool = False) -> EngineStats:
        """The newest snapshot; at most a step or a quarter of a second old."""

    def set_limits(self, limits: Limits) -> None:
        """Change limits while running; returns at once."""

    def pause(self) -> None:
        """Stop scheduling; what is in flight stays where it is."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 drops KV blocks and moves weights to host memory, 2 drops both.

        Requests in flight wait with the tokens drawn so far, and are computed anew after `wake_up`.
        """

    def wake_up(self) -> None:
        """Be ready again after `sleep`; nothing is cached then."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and end all pins; whether that was done. Blocks in use stay in use."""

    def unpin_prefix(self, request_id: str) -> bool:
        """Let the blocks go that a pinned request (`is_pinned`) keeps; False if it keeps none."""

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Check a LoRA adapter's files and let requests name it.

        Another one under the same name is another adapter: it takes the place of the first for requests that
        come after, while those in flight end with the one that they began with.

        Raises:
            ConfigError, ModelError: no such adapter, or one that does not fit this model; says why.
        """

    def unload_adapter(self, name: str) -> bool:
        """Let no further request name an adapter; whether there was one. Those in flight end with it."""

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name, in the order in which they were loaded."""

    def pin_adapter(self, name: str) -> bool:
        """Keep an adapter in memory until it is unloaded; whether there is one of that name."""

    def begin_profile(self) -> None:
        """Keep time from now on."""

    def end_profile(self) -> EngineProfile:
        """Where the time went since `begin_profile`."""

    def shutdown(self) -> None:
        """End the engine and free its memory. May be called twice."""
