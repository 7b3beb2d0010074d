"""PeftConfig: adapter_config.json of a LoRA adapter; every key that changes the maths is honoured or refused.

No torch. Rules of matching and scaling are those of peft 0.21.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError

_MERGE = "merge the adapter into its model with peft's merge_and_unload, and run that"
# Keys of kinds of LoRA that are not built; any value that is not empty asks for one.
_NOT_BUILT = {
    "use_dora": "DoRA",
    "layer_replication": "a stack of replicated layers",
    "target_parameters": "LoRA of parameters outside of modules",
    "trainable_token_indices": "training of single tokens",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow's routing among adapters",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "lora_ga_config": "LoRA-GA, which changes the weights under the adapter",
    "megatron_config": "Megatron's layers",
    "ensure_weight_tying": "an adapter shared by embedding and head",
}
# What tells of training, of the adapter's making, or of the base, and changes nothing once it is made.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_HONOURED = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_bias", "modules_to_save", "r", "rank_pattern", "target_modules", "use_rslora",
}  # fmt: skip
# How A and B began, where the weights under them stayed as they were.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "false")
_BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """What of a configuration an adapter is computed by.

    Args:
        r, alpha: of modules that no pattern names.
        rank_pattern, alpha_pattern: pattern -> of the modules it names; the first that matches counts.
        use_rslora: whether the scaling is alpha / √r rather than alpha / r.
        targets, excluded: names of modules, or a regular expression, or "all-linear".
        layers: indices of the layers that are adapted; None for all.
        layers_pattern: what stands before the index; any word if empty.
        saved: modules trained as a whole.
    """

    r: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    saved: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "PeftConfig":
        """Read a configuration.

        Args:
            config: the JSON object.
            where: its file, for messages.

        Raises:
            ModelError: a key of a kind of LoRA that is not built, or one that is unknown, or a wrong value;
                names the key.
        """
        _check_keys(config, where)
        read = _Reader(config, where)
        layers: Any = config.get("layers_to_transform")
        listed: Any = [layers] if type(layers) is int else layers
        read.need("layers_to_transform", listed is None or _all(listed, int), "layer indices")
        bias = config.get("bias", "none")
        read.need("bias", bias in _BIASES, "none, all or lora_only")
        return cls(
            r=read.rank(),
            alpha=read.alpha(),
            rank_pattern=read.pattern("rank_pattern", int),
            alpha_pattern=read.pattern("alpha_pattern", int | float),
            use_rslora=read.flag("use_rslora"),
            targets=read.names("target_modules"),
            excluded=read.names("exclude_modules"),
            layers=tuple(listed) if listed else None,
            layers_pattern=read.listed("layers_pattern"),
            saved=read.listed("modules_to_save"),
        )

    def rank(self, module: str) -> int:
        """The rank of a module, named as in the model."""
        return int(_of_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """By what B · A of a module is multiplied."""
        rank, alpha = self.rank(module), float(_of_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets_module(self, module: str, *, is_linear: bool) -> bool:
        """Whether a module of the model should have a pair of its own.

        Args:
            module: its name.
            is_linear: whether it is a linear layer other than the head, for "all-linear".
        """
        if _matches(self.excluded, module) or any(
            re.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in self.saved
        ):
            return False
        if self.targets == "all-linear":
            return is_linear
        if not _matches(self.targets, module):
            return False
        return isinstance(self.targets, str) or self.layers is None or self._index(module) in self.layers

    def _index(self, module: str) -> int | None:
        """The layer that a module is in."""
        patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in self.layers_pattern] or [
            r".*?\.[^.]*\.(\d+)\."
        ]
        for pattern in patterns:
            match = re.match(pattern, module)
            if match is not None:
                return int(match[1])
        return None


class _Reader:
    """Values of the kinds that they must be of."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self._config, self._where = config, where

    def need(self, key: str, is_right: bool, words: str) -> None:
        if not is_right:
            raise ModelError(f"{self._where}: {key} must be {words}; got {self._config.get(key)!r:.200}")

    def rank(self) -> int:
        rank = self._config.get("r")
        self.need("r", type(rank) is int and rank > 0, "a rank, 1 or more")
        return int(rank or 0)

    def alpha(self) -> float:
        alpha = self._config.get("lora_alpha", 8)
        self.need("lora_alpha", _is_number(alpha), "a number")
        return float(alpha)

    def flag(self, key: str) -> bool:
        value = self._config.get(key) or False
        self.need(key, isinstance(value, bool), "true or false")
        return bool(value)

    def pattern(self, key: str, kind: Any) -> dict[str, Any]:
        value = self._config.get(key) or {}
        is_right = isinstance(value, Mapping) and all(
            isinstance(each, kind) and _is_number(each) and each > 0 for each in value.values()
        )
        self.need(key, is_right, "names of modules with numbers above 0")
        for pattern in value:
            self.check_pattern(key, pattern)
        return dict(value)

    def names(self, key: str) -> str | tuple[str, ...]:
        value = self._config.get(key) or ()
        if isinstance(value, str):
            if value != "all-linear":
                self.check_pattern(key, value)
            return value
        self.need(key, _all(value, str), "names of modules, or a regular expression")
        return tuple(value)

    def listed(self, key: str) -> tuple[str, ...]:
        value = self._config.get(key) or ()
        value = [value] if isinstance(value, str) else value
        self.need(key, _all(value, str), "names of modules")
        for pattern in value:
            self.check_pattern(key, pattern)
        return tuple(value)

    def check_pattern(self, key: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(
                f"{self._where}: {key}: {pattern!r} is no regular expression ({error})"
            ) from error


def _check_keys(config: Mapping[str, Any], where: str) -> None:
    for key, value in config.items():
        if key in _NOT_BUILT and value:
            raise ModelError(f"{where}: {key}: {_NOT_BUILT[key]} is not built; {_MERGE}")
        if value and key not in _HONOURED and key not in _HARMLESS and key not in _NOT_BUILT:
            raise ModelError(
                f"{where}: {key}={value!r:.200} is not known here and may change what the adapter computes; "
                f"{_MERGE}"
            )
    beginning = config.get("init_lora_weights", True)
    if beginning not in _PLAIN_BEGINNINGS:
        raise ModelError(
            f"{where}: init_lora_weights={beginning!r} changed the weights under the adapter when its "
            f"training began, and the file holds only what came on top; save it as plain LoRA (peft: "
            f"save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _of_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _matches(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is kind for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
