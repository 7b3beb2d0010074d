"""LoRARequest: which adapter a prompt is to be computed with."""

import os
from dataclasses import dataclass

from batchgen.errors import ConfigError
from batchgen.field_rules import Rule, check_fields, instance, whole
from batchgen.foreign_names import refuse_unknown

_FIELD = "field of a LoRARequest"
_FOREIGN = {
    "base_model_name": "an adapter is held against the model that is loaded; leave it out",
    "tensorizer_config_dict": "adapters are safetensors; leave it out",
    "load_inplace": "add_lora reads an adapter's files again; leave it out",
    "long_lora_max_len": "the model's own length holds; leave it out",
    "lora_local_path": "use lora_path",
}
_RULES: dict[str, Rule] = {
    "lora_name": (lambda value: isinstance(value, str) and bool(value), "a non-empty text"),
    "lora_int_id": whole(0, "a whole number, 0 or more"),
    "lora_path": instance(str | os.PathLike, "a folder or a hub id"),  # type: ignore[arg-type]
}


@refuse_unknown(_FIELD, _FOREIGN)
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name; vLLM's field names.

    Args:
        lora_name: says which adapter it is. Another path under the same name takes the place of the first.
        lora_int_id: a number that `remove_lora` and `pin_lora` know it by too; 0 for none.
        lora_path: a folder with adapter_config.json and adapter_model.safetensors, or a hub id; may be left
            out once the name is loaded.

    Raises:
        ConfigError: a field of the wrong kind.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, _FIELD)

    @property
    def path(self) -> str:
        """`lora_path` as a text.

        Raises:
            ConfigError: a path in bytes.
        """
        path = os.fspath(self.lora_path)
        if not isinstance(path, str):
            raise ConfigError(f"{_FIELD} 'lora_path' must be a text; got {path!r:.80}")
        return path
