"""ModelConfig: a model's shape in our words; the only reader of Hugging Face's and GGUF's keys. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchgen.errors import ModelError, UnsupportedModelError
from batchgen.models.family import MODELS, Family, gguf_architectures
from batchgen.models.gguf_file import GGUFFile

# Activations that are x * sigmoid(x), under their names in config files.
_SILU = ("silu", "swish")

ROPE_KINDS = ("default", "linear", "llama3")

# Fields of ModelConfig that count something.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_len",
)  # fmt: skip

# Keys that change what a decoder computes and that no family here has; a value that is not empty is refused.
_FOREIGN_KEYS = ("num_experts", "num_local_experts", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotation of queries and keys.

    Args:
        theta: base of the wavelengths.
        dim: how many of a head's dimensions are rotated.
        kind: "default", "linear" or "llama3".
        factor: by which positions are stretched ("linear", "llama3").
        low_freq_factor, high_freq_factor, original_max_len: between which wavelengths "llama3" blends.
    """

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder.

    Args:
        architecture: name in MODELS.
        family: its row.
        max_len: positions the model was made for.
        windows: per layer, how many positions a query sees, or None for all.
        uses_rope: per layer, whether queries and keys are rotated.
        tie_embeddings: whether the output head is the embedding.
        dtype: in which the weights are stored, as the file says; None if it does not.
        quantization: the checkpoint's `quantization_config`, or None.
    """

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    uses_rope: tuple[bool, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    dtype: str | None = None
    quantization: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for size in _SIZES:
            _count(getattr(self, size), f"{self.architecture}: {size}")
        for what, value in (("rope theta", self.rope.theta), ("rope factor", self.rope.factor)):
            if not (math.isfinite(value) and value > 0):
                raise ModelError(f"{self.architecture}: {what} must be a number above 0; got {value}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.architecture}: {self.num_heads} query heads are no multiple of {self.num_kv_heads} "
                f"key/value heads"
            )
        if self.rope.dim % 2 or self.rope.dim > self.head_dim:
            raise UnsupportedModelError(
                f"{self.architecture}: {self.rope.dim} rotated dimensions of a head of {self.head_dim}; "
                f"must be even and no more"
            )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], name: str = "config.json") -> "ModelConfig":
        """From the content of a config.json.

        Raises:
            UnsupportedModelError: an architecture, activation or rope scaling that is not built.
            ModelError: a key is missing or has a value of the wrong kind.
        """
        try:
            return cls._from_hf(data, name)
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{name}: a value of the wrong kind ({error})") from error

    @classmethod
    def _from_hf(cls, data: Mapping[str, Any], name: str) -> "ModelConfig":
        architecture = _one_architecture(data, name)
        family = MODELS.get(architecture)
        hf = _HFConfig({**family.defaults, **{k: v for k, v in data.items() if v is not None}}, data, name)
        hf.refuse_foreign()
        num_layers, num_heads = hf.number("num_hidden_layers"), hf.number("num_attention_heads")
        head_dim = hf.get("head_dim") or hf.number("hidden_size") // num_heads
        max_len = hf.get("max_position_embeddings") or 2048
        return cls(
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
            rope=_hf_rope(hf, head_dim, max_len),
            windows=_hf_windows(hf, family, num_layers),
            uses_rope=_hf_rope_layers(hf, family, num_layers),
            qkv_bias=hf.flag(family.qkv_bias, "attention_bias"),
            output_bias=hf.flag(family.output_bias, "attention_bias"),
            mlp_bias=hf.flag(family.mlp_bias, "mlp_bias"),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            dtype=hf.get("dtype") or hf.get("torch_dtype"),
            quantization=hf.get("quantization_config") or None,
        )

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "ModelConfig":
        """From the key-values of a GGUF file.

        Raises:
            UnsupportedModelError: an architecture or rope scaling that is not built.
            ModelError: a key is missing or has a value of the wrong kind.
        """
        name = file.path.name
        gguf_name = file.get("general.architecture")
        known = gguf_architectures()
        if gguf_name not in known:
            raise UnsupportedModelError(
                f"{name}: GGUF architecture {gguf_name!r} is not built (built: {', '.join(sorted(known))})"
            )
        family = MODELS.get(known[gguf_name])

        def need(key: str) -> Any:
            if (value := file.get(f"{gguf_name}.{key}")) is None:
                raise ModelError(f"{name}: the GGUF file has no {gguf_name}.{key}")
            return value

        def get(key: str, default: Any = None) -> Any:
            return file.get(f"{gguf_name}.{key}", default)

        if get("expert_count"):
            raise UnsupportedModelError(f"{name}: mixture of experts is not built ({gguf_name}.expert_count)")

        def number(key: str) -> int:
            return _count(need(key), f"{name}: {gguf_name}.{key}")

        num_layers, num_heads = number("block_count"), number("attention.head_count")
        head_dim = get("attention.key_length") or number("embedding_length") // num_heads
        if get("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(f"{name}: keys and values of different length are not built")
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{name}: the GGUF file has no token_embd.weight")
        window = get("attention.sliding_window") or None
        return cls(
            architecture=known[gguf_name],
            family=family,
            vocab_size=embedding.shape[0],
            hidden_size=number("embedding_length"),
            intermediate_size=number("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_count(
                get("attention.head_count_kv", num_heads), f"{name}: {gguf_name}.attention.head_count_kv"
            ),
            head_dim=head_dim,
            max_len=number("context_length"),
            norm_eps=need("attention.layer_norm_rms_epsilon"),
            rope=_gguf_rope(file, gguf_name, head_dim),
            windows=(window,) * num_layers,
            uses_rope=_hf_rope_layers(_HFConfig(family.defaults, {}, name), family, num_layers),
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            tie_embeddings="output.weight" not in file.tensors,
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
        return _count(self.get(key), f"{self.name}: {key!r}")

    def flag(self, rule: bool | str, key: str) -> bool:
        return bool(self.get(key, False)) if rule == "config" else bool(rule)

    def refuse_foreign(self) -> None:
        activation = self.get("hidden_act", "silu")
        if activation not in _SILU:
            raise UnsupportedModelError(f"{self.name}: activation {activation!r} is not built (built: silu)")
        for key in _FOREIGN_KEYS:
            if self.get(key):
                raise UnsupportedModelError(f"{self.name}: {key}={self.get(key)!r} is not built")


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{what} must be a whole number, 1 or more; got {value!r}")
    return value


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


def _hf_rope(hf: _HFConfig, head_dim: int, max_len: int) -> RopeConfig:
    # transformers 5 writes rope_parameters; before, rope_theta stood alone beside rope_scaling.
    scaling: Mapping[str, Any] = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS or "mrope_section" in scaling:
        what = "mrope" if "mrope_section" in scaling else kind
        raise UnsupportedModelError(
            f"{hf.name}: rope scaling {what!r} is not built (built: {', '.join(ROPE_KINDS)})"
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


def _hf_windows(hf: _HFConfig, family: Family, num_layers: int) -> tuple[int | None, ...]:
    # 0 says "none" in some files.
    window = hf.get("sliding_window") or None
    if window is not None:
        _count(window, f"{hf.name}: 'sliding_window'")
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


def _hf_rope_layers(hf: _HFConfig, family: Family, num_layers: int) -> tuple[bool, ...]:
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


def _gguf_rope(file: GGUFFile, gguf_name: str, head_dim: int) -> RopeConfig:
    kind = file.get(f"{gguf_name}.rope.scaling.type", "none")
    factor = file.get(f"{gguf_name}.rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{file.path.name}: rope scaling {kind!r} is not built (built: none, linear, rope_freqs)"
        )
    if not math.isfinite(factor) or factor <= 0:
        raise ModelError(f"{file.path.name}: {gguf_name}.rope.scaling.factor is {factor}")
    return RopeConfig(
        theta=file.get(f"{gguf_name}.rope.freq_base", 10000.0),
        dim=file.get(f"{gguf_name}.rope.dimension_count", head_dim),
        kind="linear" if kind == "linear" else "default",
        factor=factor,
    )
