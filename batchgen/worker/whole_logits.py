"""whole_logits: all logits of a text, outside of the engine; to compare models with."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from batchgen.models.decoder import Decoder
from batchgen.worker.whole_texts import whole_texts_batch

# Rows of logits that are in memory at a time.
_ROWS = 64


def whole_logits(model: Decoder, token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits of every position, some rows at a time; a tensor holds until the next one.

    Args:
        model: with its cache bound, whose first blocks are written over.
        token_ids: of one text, within what the cache holds.
    """
    with torch.inference_mode():
        batch, _ = whole_texts_batch(model, [token_ids])
        hidden = model.forward(batch.token_ids, batch.positions, batch.metas).clone()
        for begin in range(0, len(hidden), _ROWS):
            yield model.logits(hidden[begin : begin + _ROWS])
