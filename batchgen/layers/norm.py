"""RMSNorm: a weight vector and the kernel that applies it."""

import torch
from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.kernels.ops import Activation, Kernels


class RMSNorm:
    """Root-mean-square norm of size E, the same on every rank.

    Args:
        name: for messages.
        size: E.
        eps: added to the mean square.
        kernels: the model's operations.
        dtype, device: of the weight.
    """

    def __init__(
        self, name: str, size: int, eps: float, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ):
        self.name, self.size, self.eps, self.kernels = name, size, eps, kernels
        self._dtype, self._device = dtype, device
        self.weight: Tensor | None = None

    def load(self, part: int, parameter: str, tensor: Tensor) -> None:
        """Take the weight."""
        if parameter != "weight" or tensor.shape != (self.size,):
            raise WeightsError(
                f"{self.name}: {parameter} has shape {list(tensor.shape)}, the model needs weight "
                f"[{self.size}]"
            )
        self.weight = tensor.to(dtype=self._dtype, device=self._device, copy=True)

    def missing(self) -> list[tuple[int, str]]:
        """(part, parameter) of the tensors that have not come."""
        return [(0, "weight")] if self.weight is None else []

    def tensors(self) -> list[Tensor]:
        """The weight in memory."""
        return [] if self.weight is None else [self.weight]

    def __call__(self, x: Tensor, out: Activation | None = None) -> Activation:
        """Norm the last dimension of x [T, E] or [T, H, E]."""
        assert self.weight is not None
        return self.kernels.rms_norm(x, self.weight, self.eps, out)

    def add(self, x: Tensor, residual: Tensor, out: Activation | None = None) -> Activation:
        """Add x to the residual in place and norm the sum: x, residual [T, E] -> [T, E]."""
        assert self.weight is not None
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps, out)[0]
