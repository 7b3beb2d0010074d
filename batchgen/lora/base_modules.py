"""base_modules: the modules of a model that an adapter may change, by their names in its files. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batchgen.models.model_config import ModelConfig

HEAD, TABLE = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class BaseModule:
    """A module of the base model.

    Args:
        kind: a linear layer, the embedding's table, or a norm. The head is a linear layer.
        inputs, outputs: sizes of its weight; a table has as many inputs as the vocabulary, a norm none.
        layer: which of our layers it is in, by name.
        part: as which fused part of that.
        has_bias: whether its outputs have one.
    """

    kind: Literal["linear", "table", "norm"]
    inputs: int
    outputs: int
    layer: str
    part: int = 0
    has_bias: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of its own weight in a checkpoint."""
        if self.kind == "norm":
            return (self.outputs,)
        return (self.inputs, self.outputs) if self.kind == "table" else (self.outputs, self.inputs)


def base_modules(config: ModelConfig) -> Mapping[str, BaseModule]:
    """Name in a Hugging Face checkpoint -> module, of a decoder of this shape."""
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = {
        TABLE: BaseModule("table", c.vocab_size, c.hidden_size, TABLE),
        HEAD: BaseModule("linear", c.hidden_size, c.vocab_size, HEAD),
        "model.norm": BaseModule("norm", 0, c.hidden_size, "model.norm"),
    }
    for index in range(c.num_layers):
        place = f"model.layers.{index}"
        attention, mlp = f"{place}.self_attn", f"{place}.mlp"
        for part, (name, size) in enumerate((("q_proj", queries), ("k_proj", keys), ("v_proj", keys))):
            found[f"{attention}.{name}"] = BaseModule(
                "linear", c.hidden_size, size, f"{attention}.qkv_proj", part, bool(c.qkv_bias)
            )
        for part, name in enumerate(("gate_proj", "up_proj")):
            found[f"{mlp}.{name}"] = BaseModule(
                "linear", c.hidden_size, c.intermediate_size, f"{mlp}.gate_up_proj", part, c.mlp_bias
            )
        for name, inputs, has_bias in (
            (f"{attention}.o_proj", queries, c.output_bias),
            (f"{mlp}.down_proj", c.intermediate_size, c.mlp_bias),
        ):
            found[name] = BaseModule("linear", inputs, c.hidden_size, name, 0, has_bias)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{place}.{name}"] = BaseModule("norm", 0, c.hidden_size, f"{place}.{name}")
        for name in ("q_norm", "k_norm") if c.family.qk_norm else ():
            found[f"{attention}.{name}"] = BaseModule("norm", 0, c.head_dim, f"{attention}.{name}")
    return found
