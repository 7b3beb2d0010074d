"""A GGUF file's key-values, read as a ModelConfig. No torch."""

import math
from typing import Any

from batchgen.errors import ModelError, UnsupportedModelError
from batchgen.models.family import MODELS, gguf_architectures
from batchgen.models.gguf_file import GGUFFile
from batchgen.models.hf_config import default_rope_layers
from batchgen.models.model_config import ModelConfig, RopeConfig, checked_count


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The shape that a GGUF file's key-values and tensors describe.

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
        return checked_count(need(key), f"{name}: {gguf_name}.{key}")

    num_layers, num_heads = number("block_count"), number("attention.head_count")
    head_dim = get("attention.key_length") or number("embedding_length") // num_heads
    if get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{name}: keys and values of different length are not built")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{name}: the GGUF file has no token_embd.weight")
    window = get("attention.sliding_window") or None
    return ModelConfig(
        architecture=known[gguf_name],
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=checked_count(
            get("attention.head_count_kv", num_heads), f"{name}: {gguf_name}.attention.head_count_kv"
        ),
        head_dim=head_dim,
        max_len=number("context_length"),
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, gguf_name, head_dim),
        windows=(window,) * num_layers,
        uses_rope=default_rope_layers(family, num_layers, name),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
    )


def _rope(file: GGUFFile, gguf_name: str, head_dim: int) -> RopeConfig:
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
