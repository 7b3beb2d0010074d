"""Ceilings: the rates that bound every kernel on a machine."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of all threads together.

    Args:
        float_ops: float32 operations a second; a fused multiply-add is two.
        int8_ops: operations a second on 8-bit integers, by the fastest instruction that there is.
        read_bytes: bytes of memory read in a second.
    """

    float_ops: float
    int8_ops: float
    read_bytes: float

    @staticmethod
    def best(samples: Sequence["Ceilings"]) -> "Ceilings":
        """The highest rates; a sample is now and then disturbed, never helped."""
        return Ceilings(*map(max, zip(*map(astuple, samples), strict=True)))

    @staticmethod
    def mean(samples: Sequence["Ceilings"]) -> "Ceilings":
        """The rates of a time over which samples were taken evenly."""
        return Ceilings(*(sum(rates) / len(samples) for rates in zip(*map(astuple, samples), strict=True)))
