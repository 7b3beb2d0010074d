"""EngineClient: the narrow interface through which everything above talks to an engine, wherever it runs."""

from collections.abc import Sequence
from typing import Protocol

from batchgen.engine.messages import EngineInfo, EngineRequest, EngineStats, Limits
from batchgen.outputs import RequestOutput


class EngineClient(Protocol):
    """An engine as its caller sees it.

    Implementations: `InProcessClient` (engine/in_process.py), `ChildClient` (engine/child_client.py) and
    `EchoEngine` (batchgen/testing.py). One thread calls it. After the engine died every call raises
    EngineError, whose message carries the last lines of the child's stderr; requests in flight are then
    `in_flight()`.
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

    def shutdown(self) -> None:
        """End the engine and free its memory. May be called twice."""
