"""Sampler: rows of logits -> tokens, each row by its own SamplingParams and random stream.

A row's token is a function of its logits, params and key alone: every sum runs over one row, in an order
that the row fixes, in float64. So neighbours, batch size and thread count cannot change a draw.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import SamplingRow
from batchgen.sampling_params import SamplingParams
from batchgen.worker.logits import add_bias, hold_back
from batchgen.worker.random_stream import uniform

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Weights are summed in stretches of this many, so that only one of them is walked for the draw.
_STRETCH = 256
_SHORT_STRETCH = 64
_LIKELY_NUCLEUS = 256


class Sampler:
    """Draws tokens.

    Args:
        vocab_size: ids from here on have no token and are never drawn.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        # Fresh memory of this size would cost as much as the exponentials that fill it.
        self._weights: Floats = np.empty(vocab_size, dtype=np.float64)

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
        """One token per row; of equal logits the lowest id is taken by a greedy row.

        None for a row that holds a NaN, or whose largest logit is infinite: there is nothing to draw from.

        Shapes: logits [R, V] on the CPU or a device; changed in place.
        """
        logits = logits[:, : self.vocab_size]
        for index, row in enumerate(rows):
            if row.params.logit_bias:
                add_bias(logits[index], row.params.logit_bias)
            if row.num_generated < row.params.min_tokens:
                hold_back(logits[index], row.stop_ids)
        drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
        best = _most_likely(logits)
        # A NaN counts as the largest.
        is_finite = logits[torch.arange(len(rows)), best].isfinite().tolist()
        tokens: list[int | None] = [
            token if fine else None for token, fine in zip(best, is_finite, strict=True)
        ]
        if drawn:
            scores = (logits[drawn] if len(drawn) < len(rows) else logits).float().cpu().numpy()
            for values, index in zip(scores, drawn, strict=True):
                if is_finite[index]:
                    row = rows[index]
                    tokens[index] = _draw(values, best[index], row.params, uniform(*row.key), self._weights)
        return tokens


def _most_likely(logits: Tensor) -> list[int]:
    """Per row, the id of the largest logit; the lowest of several."""
    # numpy's search of a row is an order of magnitude faster than torch's on a CPU.
    if logits.is_cpu and logits.dtype == torch.float32:
        best: list[int] = logits.numpy().argmax(axis=1).tolist()
    else:
        best = logits.argmax(dim=1).tolist()
    return best


def _draw(
    scores: npt.NDArray[np.float32], best: int, params: SamplingParams, u: float, buffer: Floats
) -> int:
    """The token at `u` of the distribution that temperature, top_k, top_p and min_p leave of `scores` [V].

    `buffer` [V or more] is written over.
    """
    top = scores[best]
    ids: Ids | None = None
    if 0 < params.top_k < scores.shape[0]:
        ids = np.flatnonzero(scores >= _kth_largest(scores, params.top_k))
        scores = scores[ids]
    # Relative to the best token, whose weight is 1.
    weights = buffer[: scores.shape[0]]
    np.subtract(scores, top, out=weights, dtype=np.float64)
    np.multiply(weights, 1.0 / params.temperature, out=weights)
    np.exp(weights, out=weights)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    place = _at(weights, u)
    return place if ids is None else int(ids[place])


def _kth_largest(scores: npt.NDArray[np.float32], k: int) -> float:
    """The k-th largest value, 1 <= k <= V."""
    # The k-th largest of the stretches' maxima is no larger; what is below it need not be ordered.
    maxima = np.maximum.reduceat(scores, np.arange(0, scores.shape[0], _SHORT_STRETCH))
    if k <= maxima.shape[0]:
        scores = scores[scores >= np.partition(maxima, -k)[-k]]
    return float(np.partition(scores, -k)[-k])


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """The fewest most likely places whose share of all weight reaches top_p, the likeliest first."""
    total = float(_sums(weights)[-1])
    # All places lighter than `safe` together weigh less than what the nucleus may leave out, so it lies among
    # the others. Most nuclei lie among far fewer, which are tried first: the front of one and the same order.
    safe = (1.0 - top_p) * total / weights.shape[0]
    for lightest in (safe * weights.shape[0] / _LIKELY_NUCLEUS, safe, 0.0):
        places = np.flatnonzero(weights >= lightest)
        places = places[np.argsort(-weights[places], kind="stable")]
        # A place is kept when those before it have not reached the share.
        count = 1 + int(np.searchsorted(np.cumsum(weights[places]), top_p * total, side="left"))
        if count <= places.shape[0]:
            break
    return places[:count]


def _at(weights: Floats, u: float) -> int:
    """The place in which u of the running sum of the weights lies; it has a weight above 0."""
    sums = _sums(weights)
    total = float(sums[-1])
    # Below the total even when u * total rounds up to it.
    target = min(u * total, math.nextafter(total, 0.0))
    stretch = int(np.searchsorted(sums, target, side="right"))
    begin = stretch * _STRETCH
    inside = weights[begin : begin + _STRETCH]
    before = float(sums[stretch - 1]) if stretch else 0.0
    place = int(np.searchsorted(before + np.cumsum(inside), target, side="right"))
    # The two ways of summing may differ in the last bit; then it is the stretch's last place.
    return begin + (place if place < inside.shape[0] else int(np.flatnonzero(inside)[-1]))


def _sums(weights: Floats) -> Any:
    """Running sum at the end of every stretch."""
    return np.cumsum(np.add.reduceat(weights, np.arange(0, weights.shape[0], _STRETCH)))
