"""What tests of batchgen and of code built on it need: doubles, and measures of error."""

from typing import Any

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.counting import CountingExecutor, counting_token
from batchgen.echo import EchoEngine, EchoOptions

__all__ = [
    "ByteTokenizer",
    "CountingExecutor",
    "EchoEngine",
    "EchoOptions",
    "counting_token",
    "relative_error",
]


def relative_error(actual: Any, expected: Any) -> float:
    """Relative RMS error of a tensor against the truth, computed in float64.

    Args:
        actual: a tensor of any dtype.
        expected: the truth, of the same shape.

    Returns:
        rms(actual - expected) / rms(expected); infinite where `actual` is not finite; the absolute RMS error
        when the truth is all zeros.

    Raises:
        AssertionError: the shapes differ.
    """
    import torch

    left, right = torch.as_tensor(actual).double().cpu(), torch.as_tensor(expected).double().cpu()
    assert left.shape == right.shape, f"shapes differ: {tuple(left.shape)} and {tuple(right.shape)}"
    if left.numel() == 0:
        return 0.0
    if not torch.isfinite(left).all():
        return float("inf")
    error, size = (left - right).pow(2).mean().sqrt().item(), right.pow(2).mean().sqrt().item()
    return error / size if size > 0 else error
