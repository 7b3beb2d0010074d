"""The random-stream keys of rows: one 64-bit mix, so that a row's seed depends on nothing but its place."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A 64-bit number whose every bit depends on every bit of `value` (splitmix64's output step)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def row_seed(seed: int, file: int, row: int) -> int:
    """The key of a row's random stream: the job's seed mixed with the ordinal of the file and the row in it.

    Returns: 0 <= key < 2**63, so that it fits a signed 64-bit integer.
    """
    return mix64(mix64(mix64(seed & _MASK) ^ (file & _MASK)) ^ (row & _MASK)) >> 1
