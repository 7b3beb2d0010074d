"""whole_texts_batch: whole texts as one step's input, outside of the engine."""

from collections.abc import Sequence

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from batchgen.models.decoder import Decoder
from batchgen.worker.input_batch import BatchBuilder, InputBatch


def whole_texts_batch(model: Decoder, texts: Sequence[Sequence[int]]) -> tuple[InputBatch, int]:
    """A step that computes all of some texts, and how many blocks from the first on it writes to.

    Args:
        model: that will compute it.
        texts: token ids.
    """
    layout = model.kv_layout
    size, num_groups = layout.spec.block_size, len(layout.windows)
    sequences, num_blocks = [], 0
    for number, ids in enumerate(texts):
        count = -(-len(ids) // size)
        begins = [num_blocks + group * count for group in range(num_groups)]
        num_blocks += num_groups * count
        tables = tuple(list(range(begin, begin + count)) for begin in begins)
        sequences.append(ScheduledSequence(number, list(ids), 0, tables))
    builder = BatchBuilder(block_size=size, num_groups=num_groups, device=model.device)
    return builder.build(SchedulerOutput(0, tuple(sequences)), {}), num_blocks
