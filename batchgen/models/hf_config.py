"""config.json, as Hugging Face writes it, read as a ModelConfig. The only reader of its keys. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.errors import ModelError, UnsupportedModelError
from batchgen.models.family import MODELS, Family
from batchgen.models.model_config import ModelConfig, RopeConfig, checked_count

# Activations that are x * sigmoid(x), under their names in config files.
_SILU = ("silu", "swish")

_ROPE_KINDS = ("default", "linear", "llama3")

# Keys that change what a decoder computes and that no family here has; a value that is not empty is refused.
_FOREIGN_KEYS = ("num_experts", "num_local_experts", "attn_logit_softcapping", "final_logit_softcapping")


def config_from_hf(data: Mapping[str, Any], name: str = "config.json") -> ModelConfig:
    """The shape that a config.json describes.

    Raises:
        UnsupportedModelError: an architecture, activation or rope scaling that is not built.
        ModelError: a key is missing or has a value of the wrong kind.
    """
    try:
        return _read(data, name)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{name}: a value of the wrong kind ({error})") from error


def _read(data: Mapping[str, Any], name: str) -> ModelConfig:
    architecture = _one_architecture(data, name)
    family = MODELS.get(architecture)
    hf = _HFConfig({**family.defaults, **{k: v for k, v in data.items() if v is not None}}, data, name)
    hf.refuse_foreign()
    num_layers, num_heads = hf.number("num_hidden_layers"), hf.number("num_attention_heads")
    head_dim = hf.get("head_dim") or hf.number("hidden_size") // num_heads
    max_len = hf.get("max_position_embeddings") or 2048
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=hf.number("vocab_size"),
        hidden_size=hf.number("hidden_size"),
        intermediate_size=hf.number("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_len=max_len,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=_rope(hf, head_dim, max_len),
        windows=_windows(hf, family, num_layers),
        uses_rope=_rope_layers(hf, family, num_layers),
        qkv_bias=hf.flag(family.qkv_bias, "attention_bias"),
        output_bias=hf.flag(family.output_bias, "attention_bias"),
        mlp_bias=hf.flag(family.mlp_bias, "mlp_bias"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        dtype=hf.get("dtype") or hf.get("torch_dtype"),
        quantization=hf.get("quantization_config") or None,
    )


class _HFConfig:
    """config.json with the family's defaults under it."""

    def __init__(self, values: Mapping[str, Any], given: Mapping[str, Any], name: str):
        self.values, self.given, self.name = values, given, name

    def get(self, key: str, default: Any = None) -> Any:
        # A null in the file is a statement of its own (no window), not a key left out.
        if key in self.given and self.given[key] is None:
            return default
        return self.values.get(key, default)

    def number(self, key: str) -> int:
        return checked_count(self.get(key), f"{self.name}: {key!r}")

    def flag(self, rule: bool | str, key: str) -> bool:
        return bool(self.get(key, False)) if rule == "config" else bool(rule)

    def refuse_foreign(self) -> None:
        activation = self.get("hidden_act", "silu")
        if activation not in _SILU:
            raise UnsupportedModelError(f"{self.name}: activation {activation!r} is not built (built: silu)")
        for key in _FOREIGN_KEYS:
            if self.get(key):
                raise UnsupportedModelError(f"{self.name}: {key}={self.get(key)!r} is not built")


def _one_architecture(data: Mapping[str, Any], name: str) -> str:
    architectures = data.get("architectures")
    if not architectures:
        raise ModelError(f"{name}: no 'architectures'; which model is it?")
    if isinstance(architectures, str):
        architectures = [architectures]
    for architecture in architectures:
        if architecture in MODELS:
            return str(architecture)
    raise UnsupportedModelError(
        f"{name}: architecture {', '.join(architectures)} is not built (built: {', '.join(MODELS.names())})"
    )


def _rope(hf: _HFConfig, head_dim: int, max_len: int) -> RopeConfig:
    # transformers 5 writes rope_parameters; before, rope_theta stood alone beside rope_scaling.
    scaling: Mapping[str, Any] = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_KINDS or "mrope_section" in scaling:
        what = "mrope" if "mrope_section" in scaling else kind
        raise UnsupportedModelError(
            f"{hf.name}: rope scaling {what!r} is not built (built: {', '.join(_ROPE_KINDS)})"
        )
    partial = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0
    plain = RopeConfig(theta=float(theta), dim=int(head_dim * partial))
    if kind == "default":
        return plain
    try:
        scaled = replace(plain, kind=kind, factor=float(scaling["factor"]))
        if kind == "linear":
            return scaled
        return replace(
            scaled,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_len=int(scaling.get("original_max_position_embeddings") or max_len),
        )
    except KeyError as error:
        raise ModelError(f"{hf.name}: rope scaling {kind!r} has no {error.args[0]!r}") from error


def _windows(hf: _HFConfig, family: Family, num_layers: int) -> tuple[int | None, ...]:
    # 0 says "none" in some files.
    window = hf.get("sliding_window") or None
    if window is not None:
        checked_count(window, f"{hf.name}: 'sliding_window'")
    if family.windows == "all":
        return (window,) * num_layers
    if family.windows == "none" or not hf.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    kinds = hf.get("layer_types")
    if kinds is None:
        first = hf.get("max_window_layers", num_layers)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"{hf.name}: layer_types {unknown or len(kinds)} do not fit {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def default_rope_layers(family: Family, num_layers: int, name: str) -> tuple[bool, ...]:
    """Per layer, whether queries and keys are rotated, in a file that says nothing of it."""
    return _rope_layers(_HFConfig(family.defaults, {}, name), family, num_layers)


def _rope_layers(hf: _HFConfig, family: Family, num_layers: int) -> tuple[bool, ...]:
    if not family.skips_rope:
        return (True,) * num_layers
    listed = hf.get("no_rope_layers")
    if listed is not None:
        if len(listed) < num_layers:
            raise ModelError(f"{hf.name}: no_rope_layers has {len(listed)} entries for {num_layers} layers")
        # The key says "no rope", its entries say 1 where there is rope.
        return tuple(bool(flag) for flag in listed[:num_layers])
    interval = hf.number("no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
