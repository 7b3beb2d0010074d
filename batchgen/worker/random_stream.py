"""uniform, uniforms: random numbers that are a function of a counter, so that no draw depends on another."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def uniforms(keys: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.float64]:
    """`uniform` of many keys at once: [R] float64."""
    return uniforms_at(stream_states(keys), np.array([position for _, _, position in keys], dtype=np.int64))


def stream_states(keys: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.uint64]:
    """What seed and sample of each key make of the stream, whatever the position: [R]."""
    parts = np.array([(seed & _MASK, sample + 1) for seed, sample, _ in keys], np.uint64).reshape(-1, 2)
    return _mix_all(_mix_all(parts[:, 0]) + np.uint64(_GOLDEN) * parts[:, 1])


def uniforms_at(states: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The numbers of streams at a position each: [R] float64."""
    state = _mix_all(states + np.uint64(_GOLDEN) * (positions + 1).astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each; unsigned integers wrap around."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
