"""whole_logits: all logits of a text, outside of the engine; to compare models with."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from batchgen.models.decoder import Decoder
from batchgen.worker.input_batch import BatchBuilder

# Rows of logits that are in memory at a time.
_ROWS = 64


def whole_logits(model: Decoder, token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits of every position, some rows at a time; a tensor holds until the next one.

    Args:
        model: with its cache bound, whose first blocks are written over.
        token_ids: of one text, within what the cache holds.
    """
    layout = model.kv_layout
    size, num_groups = layout.spec.block_size, len(layout.windows)
    count = -(-len(token_ids) // size)
    tables = tuple(list(range(group * count, (group + 1) * count)) for group in range(num_groups))
    builder = BatchBuilder(block_size=size, num_groups=num_groups, device=model.device)
    step = SchedulerOutput(0, (ScheduledSequence(0, list(token_ids), 0, tables),))
    with torch.inference_mode():
        batch = builder.build(step, {})
        hidden = model.forward(batch.token_ids, batch.positions, batch.metas).clone()
        for begin in range(0, len(hidden), _ROWS):
            yield model.logits(hidden[begin : begin + _ROWS])
