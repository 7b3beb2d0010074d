"""Family: one row of the decoder table, and the registry of rows. No torch.

A new family of the Llama kind is one file in this package: a `Family` under the architecture names of its
config.json. What a row cannot say, the decoder does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchgen.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model family differs from the plain decoder (pre-norm, RMSNorm, rotary, gated SiLU).

    Args:
        name: for messages and documentation.
        qkv_bias, output_bias, mlp_bias: whether these projections have a bias; "config" reads
            `attention_bias` or `mlp_bias`.
        qk_norm: RMSNorm over each head of query and key, before the rotation.
        windows: where sliding windows are: "none"; "all" layers; "config": as `use_sliding_window` and
            `layer_types` say, or else from layer `max_window_layers` on.
        skips_rope: whether `no_rope_layers` or `no_rope_layer_interval` leave some layers unrotated.
        defaults: values of config.json keys that the family's configuration class leaves out of the file.
        gguf: the family's names in `general.architecture` of GGUF files.
        gguf_rope_is_interleaved: whether those files hold query and key rows permuted for pairwise rotation.
        has_foldable_norms: whether every norm of the residual stream stands right before linear layers, so
            that its weights can go into them and the stream can be rotated (quantization/rotation.py).
    """

    name: str
    qkv_bias: bool | Literal["config"] = False
    output_bias: bool | Literal["config"] = False
    mlp_bias: bool | Literal["config"] = False
    qk_norm: bool = False
    windows: Literal["none", "all", "config"] = "none"
    skips_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf: tuple[str, ...] = ()
    gguf_rope_is_interleaved: bool = False
    has_foldable_norms: bool = True


# By architecture, as `architectures` in config.json names it.
MODELS: Registry[Family] = Registry("model architecture", "batchgen.models")


def gguf_architectures() -> dict[str, str]:
    """`general.architecture` of a GGUF file -> the architecture in MODELS."""
    return {name: architecture for architecture in MODELS for name in MODELS.get(architecture).gguf}
