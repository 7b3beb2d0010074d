"""RotaryEmbedding: the table of cosines and sines, and the rotation of queries and keys by it."""

import math

import torch
from torch import Tensor

from batchgen.kernels.ops import Kernels
from batchgen.models.model_config import RopeConfig
from batchgen.trigonometry import cos_and_sin

# Positions of a table that are computed at a time: in float64 they are four times as large on the way.
_SLAB_POSITIONS = 1 << 16


class RotaryEmbedding:
    """Rotation by position, of the pairs (i, i + dim / 2).

    Args:
        rope: kind and numbers.
        num_positions: positions from 0 that the table serves.
        kernels: the model's operations.
        device: of the table.
        divisors: per frequency, by what it is divided beside (`rope_freqs` of a GGUF file), [dim / 2].
    """

    def __init__(
        self,
        rope: RopeConfig,
        num_positions: int,
        kernels: Kernels,
        device: torch.device,
        divisors: Tensor | None = None,
    ):
        frequencies = inverse_frequencies(rope)
        if divisors is not None:
            frequencies = frequencies / divisors.to(torch.float32)
        self.cos_sin = _table(num_positions, frequencies).to(device)
        self._kernels = kernels

    def __call__(self, query: Tensor, key: Tensor, positions: Tensor) -> None:
        """Rotate in place: query [T, H, D], key [T, G, D]; positions [T] or [rows, T]: the first row counts.

        Several rows are for models that rotate sections of a head by different positions (M-RoPE); in text
        all rows are equal.
        """
        self._kernels.rotary(query, key, positions if positions.dim() == 1 else positions[0], self.cos_sin)


def _table(num_positions: int, frequencies: Tensor) -> Tensor:
    """Cosines, then sines, of each position's angles: [positions, dim] float32."""
    half = len(frequencies)
    table = torch.empty(num_positions, 2 * half)
    for begin in range(0, num_positions, _SLAB_POSITIONS):
        positions = torch.arange(begin, min(begin + _SLAB_POSITIONS, num_positions), dtype=torch.float32)
        # The angle is rounded to float32 before the cosine, as in the code that trained the models.
        cosine, sine = cos_and_sin(positions.unsqueeze(1) * frequencies)
        rows = table[begin : begin + len(positions)]
        rows[:, :half], rows[:, half:] = cosine, sine
    return table


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each pair, [dim / 2] float32."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).to(torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide long wavelengths by the factor, leave short ones, blend between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    shortest_divided = rope.original_max_len / rope.low_freq_factor
    longest_kept = rope.original_max_len / rope.high_freq_factor
    share_kept = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share_kept) * frequencies / rope.factor + share_kept * frequencies
    divided = torch.where(wavelengths > shortest_divided, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, divided)
