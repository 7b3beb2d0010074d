"""Log probabilities: what a row of logits says of the token that stands there and of others."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.kernels.ops import Kernels
from batchgen.kernels.sampling import Scores

# logprobs_mode -> whether penalties, masks, temperature and filters come first; whether logits are told as
# they are.
MODES = {
    "raw_logprobs": (False, False),
    "processed_logprobs": (True, False),
    "raw_logits": (False, True),
    "processed_logits": (True, True),
}


class LogprobReader:
    """Reads log probabilities, or logits, out of rows of logits.

    Args:
        kernels: for the sums and ranks.
        mode: a `logprobs_mode`.
    """

    def __init__(self, kernels: Kernels, mode: str = "raw_logprobs"):
        self._kernels = kernels
        self.is_processed, self._tells_logits = MODES[mode]

    def read(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        num_top: Sequence[int],
        others: Sequence[Sequence[int]],
    ) -> list[TokenLogprobs]:
        """One entry for each row.

        Args:
            logits: [S, V] float32.
            tokens: the token that stands in each row.
            num_top: how many of the likeliest are told; -1 for all.
            others: ids that are told besides.
        """
        rows, width = logits.shape
        asked = np.full((rows, 1 + max(map(len, others), default=0)), -1, dtype=np.int64)
        asked[:, 0] = tokens
        for row, ids in enumerate(others):
            asked[row, 1 : 1 + len(ids)] = ids
        numbers = [width if number == -1 else min(number, width) for number in num_top]
        scores = self._kernels.score_tokens(
            logits, torch.from_numpy(asked), torch.tensor(numbers, dtype=torch.int64)
        )
        return self._entries(scores, asked, numbers, [len(ids) for ids in others])

    def _entries(
        self, scores: Scores, asked: np.ndarray, numbers: Sequence[int], others: Sequence[int]
    ) -> list[TokenLogprobs]:
        totals = np.zeros(len(numbers)) if self._tells_logits else scores.log_total.numpy()
        values = (scores.values.numpy() - totals[:, None]).tolist()
        top_values = scores.top_values.numpy()
        top_logprobs = (top_values - totals[:, None]).tolist()
        top_ranks = _ranks(top_values)
        ids, ranks, top_ids = asked.tolist(), scores.ranks.tolist(), scores.top_ids.tolist()
        entries = []
        for row, (number, count) in enumerate(zip(numbers, others, strict=True)):
            end = 1 + count
            entries.append(
                TokenLogprobs(
                    (ids[row][0], *top_ids[row][:number], *ids[row][1:end]),
                    (values[row][0], *top_logprobs[row][:number], *values[row][1:end]),
                    (ranks[row][0], *top_ranks[row][:number], *ranks[row][1:end]),
                )
            )
        return entries


def _ranks(values: np.ndarray) -> list[list[int]]:
    """Ranks of values that are in order, the largest first: equal ones share a rank."""
    places = np.arange(values.shape[1])
    is_new = np.ones(values.shape, dtype=bool)
    is_new[:, 1:] = values[:, 1:] != values[:, :-1]
    ranks: list[list[int]] = (1 + np.maximum.accumulate(np.where(is_new, places, 0), axis=1)).tolist()
    return ranks
