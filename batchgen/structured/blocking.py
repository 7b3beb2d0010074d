"""Blocker: sets logits to minus infinity where masks do not allow their tokens."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.structured.vocabulary import Bits

NEVER = float("-inf")

# Byte of a mask -> the largest value that each of its 8 tokens may have.
_LIMITS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.inf, NEVER).astype(np.float32)


class Blocker:
    """Applies masks to the rows of one batch after the other.

    On a CPU a row is done at once, by one thread: a pass over it takes some 15 us at 49 152 tokens, less than
    waking another thread may cost.
    """

    def __init__(self) -> None:
        self._limits: npt.NDArray[np.float32] = np.empty((0, 8), dtype=np.float32)
        self._values: npt.NDArray[np.float32] | None = None
        self._waiting: list[tuple[int, Bits]] = []

    def begin(self, logits: Tensor) -> None:
        """Take a batch of logits: [R, V] float32, to be changed in place."""
        self._waiting.clear()
        self._values = logits.numpy() if logits.is_cpu else None

    def block(self, row: int, bits: Bits) -> None:
        """Leave to a row what its mask allows: [ceil(V / 32)] or more."""
        if self._values is None:
            # The memory of the mask is used again before the rows are all there.
            self._waiting.append((row, bits.copy()))
            return
        values = self._values[row]
        num_bytes = -(-values.shape[0] // 8)
        if self._limits.shape[0] != num_bytes:
            self._limits = np.empty((num_bytes, 8), dtype=np.float32)
        # Without "clip", which cannot happen here, numpy would make a copy.
        np.take(_LIMITS, bits.view(np.uint8)[:num_bytes], axis=0, out=self._limits, mode="clip")
        # A NaN stays one.
        np.minimum(values, self._limits.reshape(-1)[: values.shape[0]], out=values)

    def finish(self, logits: Tensor) -> None:
        """On a device: all rows of the batch in one transfer."""
        if not self._waiting:
            return
        rows = torch.tensor([row for row, _ in self._waiting], device=logits.device)
        words = torch.from_numpy(np.stack([bits for _, bits in self._waiting])).to(logits.device)
        logits[rows] = logits[rows].masked_fill(~spread(words)[:, : logits.shape[1]], NEVER)


def spread(words: Tensor) -> Tensor:
    """Bits as booleans, the lowest of each word first: [R, W] int32 -> [R, 32 W]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
