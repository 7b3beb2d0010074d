"""RotatedSource: a checkpoint as one of the same model whose residual stream is rotated.

The weights of the norms go into the linear layers behind them first, for only a norm without weights
gives the same when its input is turned. Then whatever writes to the stream is turned on its way out, and
whatever reads from it on its way in: the logits are the same, up to rounding of floats.
"""

import torch
from torch import Tensor

from batchgen.models.stream import TABLE, is_norm_of_stream, norm_before, writes_stream
from batchgen.models.weight_source import WeightSource
from batchgen.quantization.rotation import Rotation


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
        if writes_stream(module):
            return self._rotation.outputs(tensor)
        if is_norm_of_stream(module):
            return torch.ones_like(tensor, dtype=torch.float32)
        if parameter == "weight":
            if module == TABLE:
                return self._rotation.inputs(tensor)
            norm = norm_before(module)
            if norm is not None:
                return self._rotation.inputs(tensor, self._source.read(f"{norm}.weight"))
        return tensor
