"""Ceilings: the rates that bound every kernel on a machine."""

from dataclasses import dataclass


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

    def best_of(self, other: "Ceilings") -> "Ceilings":
        """The higher of both; a measurement is now and then disturbed, never helped."""
        return Ceilings(
            max(self.float_ops, other.float_ops),
            max(self.int8_ops, other.int8_ops),
            max(self.read_bytes, other.read_bytes),
        )
