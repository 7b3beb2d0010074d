"""The table of cosines and sines that queries and keys are rotated by."""

import math

import numpy as np
import pytest
import torch

from batchgen.kernels.ops import choose
from batchgen.layers import rotary
from batchgen.models.model_config import RopeConfig


@pytest.mark.parametrize("slab", [7, 1 << 16])
def test_every_entry_is_the_float_next_to_the_exact_one(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(rotary, "_SLAB_POSITIONS", slab)
    kernels = choose("cpu", "float32", backend="reference", head_dim=16)
    rope = RopeConfig(dim=16, theta=10000.0)
    table = rotary.RotaryEmbedding(rope, 40, kernels, torch.device("cpu")).cos_sin
    frequencies = rotary.inverse_frequencies(rope)
    assert table.shape == (40, 16) and table.dtype == torch.float32
    for position in range(40):
        for pair, frequency in enumerate(frequencies.numpy()):
            angle = float(np.float32(position) * frequency)
            assert table[position, pair] == np.float32(math.cos(angle))
            assert table[position, 8 + pair] == np.float32(math.sin(angle))
