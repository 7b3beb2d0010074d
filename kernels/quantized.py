"""Quantized: activations as small integers, one scale for each token."""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 64  # the values of a token are padded with zeros to a multiple of this
LEVELS = {8: 127, 16: 32767}  # bits -> largest value
# Most inputs of a layer: a sum over them of 255 * 128 each is an int32.
MAX_WIDTH = (2**31 - 1) // (255 * 128) // GROUP * GROUP


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations [T, K] as integers: x[t, k] = scale[t] * value[t, k], about.

    A token of zeros has scale 0. One that holds a NaN or an infinity has scale NaN and zeros as values, so
    that whatever is computed from it is NaN.

    Args:
        values: int8 [T, planes, padded K]. One plane ("8 bits") is the value itself, -127 to 127. Two
            ("16 bits") are the high and the low byte of the value, -32767 to 32767; the low byte counts
            from 0 to 255.
        scale: float32 [T], the largest |x| of the token divided by the largest value.
        width: K; values past it are zeros.
    """

    values: Tensor
    scale: Tensor
    width: int

    @staticmethod
    def empty(rows: int, width: int, bits: int, device: str | torch.device = "cpu") -> "Quantized":
        """Room for that many tokens, uninitialised."""
        planes = {8: 1, 16: 2}[bits]
        values = torch.empty((rows, planes, -(-width // GROUP) * GROUP), dtype=torch.int8, device=device)
        return Quantized(values, torch.empty(rows, dtype=torch.float32, device=device), width)

    @property
    def bits(self) -> int:
        """8 or 16."""
        return 8 * self.values.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(T, K), as of the activations themselves."""
        return self.values.shape[0], self.width

    def __getitem__(self, rows: slice) -> "Quantized":
        """Some of the tokens, without a copy."""
        return Quantized(self.values[rows], self.scale[rows], self.width)

    def integers(self) -> Tensor:
        """The values themselves: int32 [T, K]."""
        values = self.values[:, :, : self.width].to(torch.int32)
        if values.shape[1] == 1:
            return values[:, 0]
        return 256 * values[:, 0] + (values[:, 1] & 255)

    def dense(self) -> Tensor:
        """The activations: float32 [T, K]."""
        values = self.values[:, 0, : self.width] if self.bits == 8 else self.integers()
        return values * self.scale[:, None]
