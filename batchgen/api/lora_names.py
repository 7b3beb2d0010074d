"""LoRANames: the adapters that the prompts of a call name, and which of them must be loaded first."""

from collections.abc import Sequence

from batchgen.errors import ConfigError
from batchgen.lora_request import LoRARequest
from batchgen.quantities import counted

LoRA = LoRARequest | Sequence[LoRARequest | None] | None


def by_adapter(loras: Sequence[LoRARequest | None], num_slots: int) -> list[int]:
    """The order in which prompts are best handed over: those of an adapter together, if there are many.

    Rows of more adapters than there are slots would otherwise wait for each other's adapters to leave.
    """
    names = [None if lora is None else lora.lora_name for lora in loras]
    turns: dict[str | None, int] = {}
    for name in names:
        turns.setdefault(name, len(turns))
    numbers = list(range(len(loras)))
    return numbers if len(turns) <= num_slots else sorted(numbers, key=lambda each: turns[names[each]])


class LoRANames:
    """What a caller has had loaded, by name.

    Args:
        is_enabled: whether the engine has slots for adapters.
    """

    def __init__(self, is_enabled: bool):
        self._is_enabled = is_enabled
        self._loaded: dict[str, LoRARequest] = {}

    def read(self, given: LoRA, count: int) -> list[LoRARequest | None]:
        """The adapter of each of so many prompts: one for all, or one each, None for the base model.

        Raises:
            ConfigError: something that is none, another number of them than of prompts, two adapters of one
                name, or an engine without slots.
        """
        if given is None:
            return [None] * count
        if isinstance(given, LoRARequest):
            listed: list[LoRARequest | None] = [given] * count
        elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
            listed = list(given)
        else:
            raise ConfigError(f"lora_request must be a LoRARequest, or a list of one each; got {given!r:.80}")
        for each in listed:
            if each is not None and not isinstance(each, LoRARequest):
                raise ConfigError(f"lora_request must be a LoRARequest or None for each; got {each!r:.80}")
        if len(listed) != count:
            raise ConfigError(
                f"lora_request: {len(listed)} given for {counted(count, 'prompt')}; give one for all or one "
                f"each"
            )
        self._check_names([each for each in listed if each is not None])
        return listed

    def to_load(self, requests: Sequence[LoRARequest | None]) -> list[LoRARequest]:
        """Those of some adapters that are not loaded, or from another path, each once.

        Raises:
            ConfigError: one without a path that is not loaded.
        """
        wanted = {each.lora_name: each for each in requests if each is not None}
        missing = []
        for name, request in wanted.items():
            known = self._loaded.get(name)
            if known is not None and request.path in ("", known.path):
                continue
            if not request.path:
                raise ConfigError(f"adapter {name!r} is not loaded; give its lora_path")
            missing.append(request)
        return missing

    def check_enabled(self) -> None:
        """Refuse adapters of an engine that has no slots.

        Raises:
            ConfigError: it has none.
        """
        if not self._is_enabled:
            raise ConfigError("lora_request: this engine has no adapter slots; set enable_lora=True")

    def loaded(self, request: LoRARequest) -> None:
        """An adapter is loaded."""
        self._loaded[request.lora_name] = request

    def forget(self, name: str) -> None:
        """An adapter is gone."""
        self._loaded.pop(name, None)

    def name_of(self, lora: LoRARequest | str | int) -> str:
        """The name of an adapter by its name, its number or its request.

        Raises:
            ConfigError: a number that no adapter has.
        """
        if isinstance(lora, LoRARequest):
            return lora.lora_name
        if isinstance(lora, str):
            return lora
        for request in self._loaded.values():
            if lora and request.lora_int_id == lora:
                return request.lora_name
        raise ConfigError(f"no loaded adapter has lora_int_id {lora!r}")

    def _check_names(self, requests: Sequence[LoRARequest]) -> None:
        if requests:
            self.check_enabled()
        paths: dict[str, str] = {}
        for each in requests:
            path = each.path
            if path and paths.setdefault(each.lora_name, path) != path:
                raise ConfigError(
                    f"lora_request: {each.lora_name!r} names two adapters, {paths[each.lora_name]} and "
                    f"{path}; give each a name of its own"
                )
