"""ModelConfig: a model's shape in our words, whatever file it was read from. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError, UnsupportedModelError
from batchgen.models.family import Family

# Fields of ModelConfig that count something.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_len",
)  # fmt: skip


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

    @property
    def stored_as(self) -> str | None:
        """How the checkpoint says that it is quantized; None: it is not, or does not say."""
        return None if self.quantization is None else self.quantization.get("quant_method")

    def __post_init__(self) -> None:
        for size in _SIZES:
            checked_count(getattr(self, size), f"{self.architecture}: {size}")
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


def checked_count(value: Any, what: str) -> int:
    """A whole number above 0.

    Raises:
        ModelError: it is none; `what` says of what.
    """
    if type(value) is not int or value < 1:
        raise ModelError(f"{what} must be a whole number, 1 or more; got {value!r}")
    return value
