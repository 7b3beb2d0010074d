"""PromptScorer: log probabilities of prompt tokens, from hidden states in chunks that the memory allows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.engine.scheduler_output import PromptScores, TokenLogprobs
from batchgen.worker.device import free_memory
from batchgen.worker.logprobs import LogprobReader
from batchgen.worker.step_head import StepHead

# Of the free memory. Logits are held once in the model's dtype, and once or more while they are read.
_SHARE = 0.1
_BYTES_PER_LOGIT = 16
# The logits of a chunk stay allocated; more rows at once would not be faster.
_MOST_ROWS = 256


class PromptScorer:
    """Scores prompt tokens by the logits before them.

    Args:
        reader: of log probabilities; nothing of a prompt is processed.
    """

    def __init__(self, reader: LogprobReader):
        self._reader = reader

    def score(
        self, head: StepHead, hidden: Tensor, scores: Sequence[tuple[int, PromptScores]], first: int = 0
    ) -> dict[int, list[TokenLogprobs]]:
        """One entry for each target of each sequence.

        Args:
            head: for the logits.
            hidden: [S, E], the states before the targets, one sequence after the other.
            scores: (seq_id, what is wanted of it).
            first: number of the first state among all of the step.
        """
        tokens, num_top, others = [], [], []
        for _, each in scores:
            count = len(each.targets)
            tokens += each.targets
            num_top += [each.params.prompt_logprobs or 0] * count
            others += [each.params.prompt_logprob_token_ids or ()] * count
        entries: list[TokenLogprobs] = []
        size = chunk_rows(free_memory(hidden.device), head.model.config.vocab_size)
        for begin in range(0, len(tokens), size):
            part = slice(begin, begin + size)
            logits = head.logits(hidden[part], first + begin).to(torch.float32)
            entries += self._reader.read(logits, tokens[part], num_top[part], others[part])
        found, begin = {}, 0
        for seq_id, each in scores:
            found[seq_id] = entries[begin : begin + len(each.targets)]
            begin += len(each.targets)
        return found


def chunk_rows(free_bytes: int, vocab_size: int) -> int:
    """How many rows of logits are made at once."""
    return max(1, min(_MOST_ROWS, int(free_bytes * _SHARE) // (vocab_size * _BYTES_PER_LOGIT)))
