"""LayerMaker: makes the layers of a decoder, and notes what takes which tensors of a checkpoint."""

import torch

from batchgen.kernels.ops import Kernels
from batchgen.layers.linear import MergedLinear, QKVLinear, RowLinear
from batchgen.layers.norm import RMSNorm
from batchgen.layers.parallel import ParallelContext
from batchgen.layers.rotary import RotaryEmbedding
from batchgen.models.decoder_layer import DecoderLayer, WeightTarget
from batchgen.models.model_config import ModelConfig
from batchgen.quantization.base import LinearMethod


class LayerMaker:
    """What all layers of one decoder are made of.

    Args:
        config: the shape.
        kernels: the operations.
        method: how linear layers store and multiply weights.
        parallel: this rank's place.
        device: of the weights.
        targets: filled: module name in a checkpoint -> what takes its tensors, and as which fused part.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        method: LinearMethod,
        parallel: ParallelContext,
        device: torch.device,
        targets: dict[str, tuple[WeightTarget, int]],
    ):
        self._config, self._kernels, self._method = config, kernels, method
        self._parallel, self._device, self._targets = parallel, device, targets

    def layer(self, index: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer `index`; its weights come later."""
        c, place, parallel = self._config, f"model.layers.{index}", self._parallel
        qkv = QKVLinear(
            f"{place}.self_attn.qkv_proj", self._method, parallel,
            c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.qkv_bias,
        )  # fmt: skip
        output = RowLinear(
            f"{place}.self_attn.o_proj", self._method, parallel,
            c.num_heads * c.head_dim, (c.hidden_size,), c.output_bias,
        )  # fmt: skip
        gate_up = MergedLinear(
            f"{place}.mlp.gate_up_proj", self._method, parallel,
            c.hidden_size, (c.intermediate_size, c.intermediate_size), c.mlp_bias,
        )  # fmt: skip
        down = RowLinear(
            f"{place}.mlp.down_proj",
            self._method,
            parallel,
            c.intermediate_size,
            (c.hidden_size,),
            c.mlp_bias,
        )
        for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
            self._targets[f"{place}.self_attn.{name}"] = (qkv, part)
        for part, name in enumerate(("gate_proj", "up_proj")):
            self._targets[f"{place}.mlp.{name}"] = (gate_up, part)
        self._targets[f"{place}.self_attn.o_proj"] = (output, 0)
        self._targets[f"{place}.mlp.down_proj"] = (down, 0)
        has_norms = c.family.qk_norm
        return DecoderLayer(
            input_norm=self.norm(f"{place}.input_layernorm", c.hidden_size),
            qkv=qkv,
            output=output,
            post_norm=self.norm(f"{place}.post_attention_layernorm", c.hidden_size),
            gate_up=gate_up,
            down=down,
            window=c.windows[index],
            rotary=rotary if c.uses_rope[index] else None,
            query_norm=self.norm(f"{place}.self_attn.q_norm", c.head_dim) if has_norms else None,
            key_norm=self.norm(f"{place}.self_attn.k_norm", c.head_dim) if has_norms else None,
        )

    def norm(self, name: str, size: int) -> RMSNorm:
        """A norm of a name in the checkpoint."""
        norm = RMSNorm(name, size, self._config.norm_eps, self._kernels, self._method.dtype, self._device)
        self._targets[name] = (norm, 0)
        return norm
