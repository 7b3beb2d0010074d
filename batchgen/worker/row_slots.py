"""RowSlots: which adapter's slot each row of a step belongs to, as the kernels read it."""

import numpy as np
import torch

from batchgen.kernels.lora import LoraSegments


class RowSlots:
    """The slots of a step's rows.

    Args:
        of_token: [T], per token a slot, -1 for none.
        logit_rows: [R], the tokens whose logits are needed.
        num_slots: S.
        device: of the segments.

    Attributes:
        tokens: segments of all tokens.
        rows: segments of those whose logits are needed.
        used: the slots with tokens in the step.
    """

    def __init__(self, of_token: np.ndarray, logit_rows: np.ndarray, num_slots: int, device: torch.device):
        self._num_slots, self._device = num_slots, device
        self._of_row = of_token[logit_rows]
        self.used = tuple(np.unique(of_token[of_token >= 0]).tolist())
        self.tokens = self._segments(of_token)
        is_same = len(logit_rows) == len(of_token) and bool((logit_rows == np.arange(len(of_token))).all())
        self.rows = self.tokens if is_same else self._segments(self._of_row)

    def part(self, rows: slice) -> LoraSegments:
        """Segments of some of the rows whose logits are needed, numbered from 0."""
        of_row = self._of_row[rows]
        return self.rows if len(of_row) == len(self._of_row) else self._segments(of_row)

    def _segments(self, of_row: np.ndarray) -> LoraSegments:
        segments = LoraSegments.empty(len(of_row), self._num_slots, self._device)
        segments.fill(of_row)
        return segments
