"""Adapters: the LoRA adapters that requests may name, and what is said of a name that is none of them."""

from collections.abc import Callable

from batchgen.engine.messages import AdapterInfo
from batchgen.errors import nearest
from batchgen.outputs import FailureCode, RowFailure

NO_SLOTS = "this engine has no adapter slots; set enable_lora: true"


class Adapters:
    """Name -> adapter, in the order in which they were loaded.

    The engine knows an adapter by its content: two names of equal content are one adapter, and a name that is
    loaded anew with another content does not change what requests in flight began with.

    Args:
        drop: told the content hash of an adapter that no name and no request in flight stands for any longer.
    """

    def __init__(self, drop: Callable[[str], None] | None = None):
        self._drop = drop
        self._by_name: dict[str, AdapterInfo] = {}
        # Content without a name, that requests in flight may still compute with.
        self._nameless: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> AdapterInfo:
        return self._by_name[name]

    @property
    def has_nameless(self) -> bool:
        """Whether `drop_unused` may have something to do."""
        return bool(self._nameless)

    def known(self) -> list[AdapterInfo]:
        """All of them."""
        return list(self._by_name.values())

    def enter(self, info: AdapterInfo) -> AdapterInfo:
        """Let requests name an adapter; one of the same name goes."""
        self.forget(info.name)
        self._by_name[info.name] = info
        self._nameless.discard(info.content_hash)
        return info

    def forget(self, name: str) -> AdapterInfo | None:
        """Let no further request name an adapter; gives it back if there was one."""
        info = self._by_name.pop(name, None)
        if info is not None and all(
            other.content_hash != info.content_hash for other in self._by_name.values()
        ):
            self._nameless.add(info.content_hash)
        return info

    def drop_unused(self, in_use: set[str]) -> None:
        """Drop the content of forgotten adapters, but for that of requests in flight."""
        for content in self._nameless - in_use:
            self._nameless.discard(content)
            if self._drop is not None:
                self._drop(content)

    def refusal(self, name: str, *, has_slots: bool) -> RowFailure:
        """Why a request cannot have the adapter that it names, which is none of these."""
        if not has_slots:
            return RowFailure(FailureCode.INVALID_PARAMETER, f"adapter {name!r}: {NO_SLOTS}")
        match = nearest(name, self._by_name)
        listed = ", ".join(self._by_name) or "none"
        hint = f"did you mean {match!r}?" if match else f"loaded are: {listed:.300}"
        return RowFailure(
            FailureCode.UNKNOWN_ADAPTER, f"adapter {name!r} is not loaded; load it first ({hint})"
        )
