"""RotatedSource: a checkpoint as one of the same model whose residual stream is rotated.

The weights of the norms go into the linear layers behind them first, for only a norm without weights
gives the same when its input is turned. Then whatever writes to the stream is turned on its way out, and
whatever reads from it on its way in: the logits are the same, up to rounding of floats.
"""

import torch
from torch import Tensor

from batchgen.models.weight_source import WeightSource
from batchgen.quantization.rotation import Rotation

# Names in the Hugging Face form; a linear layer's input comes from the norm beside it.
_READERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_FINAL_NORM, _HEAD, _TABLE = "model.norm", "lm_head", "model.embed_tokens"


class RotatedSource:
    """The tensors of another checkpoint, turned as they are read.

    Args:
        source: of a decoder with RMSNorm before attention and MLP and before the head, with a table and a
            head of their own (`UntiedSource`).
        rotation: of the residual stream.
    """

    def __init__(self, source: WeightSource, rotation: Rotation):
        self.where, self.shapes = source.where, source.shapes
        self._source, self._rotation = source, rotation

    def read(self, name: str) -> Tensor:
        """One tensor in float32; weights of folded norms are ones."""
        tensor = self._source.read(name)
        module, _, parameter = name.rpartition(".")
        place, in_layer = _split(module)
        if in_layer in _WRITERS:
            return self._rotation.outputs(tensor)
        if module == _FINAL_NORM or in_layer in _READERS.values():
            return torch.ones_like(tensor, dtype=torch.float32)
        if parameter == "weight":
            if module == _TABLE:
                return self._rotation.inputs(tensor)
            norm = _FINAL_NORM if module == _HEAD else f"{place}.{_READERS.get(in_layer)}"
            if module == _HEAD or in_layer in _READERS:
                return self._rotation.inputs(tensor, self._source.read(f"{norm}.weight"))
        return tensor


def _split(module: str) -> tuple[str, str]:
    """A layer and the module in it: model.layers.3 and mlp.up_proj; nothing in it for other modules."""
    parts = module.split(".")
    if parts[:2] != ["model", "layers"]:
        return module, ""
    return ".".join(parts[:3]), ".".join(parts[3:])
