"""Blocks of GGUF files: the C kernel gives the bits of the gguf package for any content."""

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from batchgen.kernels.cpu.dequantize import dequantize as by_kernel
from batchgen.kernels.cpu.library import Library, load

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_blocks", [1, 3, 2000])
def test_any_bytes_give_what_the_gguf_package_gives(name: str, num_blocks: int) -> None:
    if not isinstance(load(), Library):
        pytest.skip("no C kernels")
    kind = GGMLQuantizationType[name]
    num_values, num_bytes = GGML_QUANT_SIZES[kind]
    # Scales of all kinds are among these: tiny, negative, infinite and not a number.
    raw = np.random.default_rng(3).integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    found = by_kernel(int(kind), torch.from_numpy(raw), num_blocks * num_values)
    assert found is not None
    with np.errstate(invalid="ignore", over="ignore"):
        expected = dequantize(raw, kind).reshape(-1)
    np.testing.assert_array_equal(found.numpy(), expected)
    same_sign = np.signbit(found.numpy()) == np.signbit(expected)
    assert (same_sign | np.isnan(expected)).all()


def test_a_type_that_is_not_there_is_left_to_others() -> None:
    assert by_kernel(int(GGMLQuantizationType.Q2_K), torch.zeros(84, dtype=torch.uint8), 256) is None
