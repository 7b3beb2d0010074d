"""uniform: random numbers that are a function of a counter, so that no draw depends on another."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits; the same three whole numbers always give the same one.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood 2014), once for each part of the key.
    """
    state = _mix(seed & _MASK)
    state = _mix((state + _GOLDEN * (sample + 1)) & _MASK)
    state = _mix((state + _GOLDEN * (position + 1)) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
