"""SteadyBatch: the input of steps in which the same sequences go on and nobody joins, in the same memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from batchgen.engine.scheduler_output import Continued
from batchgen.worker.step_parts import UNKNOWN

if TYPE_CHECKING:
    from batchgen.worker.input_batch import InputBatch


class SteadyBatch:
    """A batch on the host of sequences with one token and one draw each, moved on by a token at a time.

    After the kernels of a step nothing of numpy and torch is left in the processor's caches: what such a step
    costs is the number of their functions that it calls. So arrays are filled again, not made again.

    Args:
        batch: laid out for one step; it is changed in place.
        block_size: B.
    """

    def __init__(self, batch: "InputBatch", block_size: int):
        self._batch, self._block_size = batch, block_size
        count = len(batch.part.lens)
        self._rows = list(range(count))
        self._places = np.arange(count)
        self._slots = [meta.slot_mapping.numpy() for meta in batch.metas]
        # Where sequences have blocks for later, what is read is a copy of a part.
        self._reads_tables = all(
            table.shape[1] == meta.block_tables.shape[1]
            for table, meta in zip(batch.part.tables, batch.metas, strict=True)
        )

    def moved_on(self, continued: Continued, drawn: Sequence[int | None]) -> "InputBatch | None":
        """The next step's batch, if all go on in their order and the tables are as wide as before.

        If not, it is None, and nothing has happened that laying the step out anew does not do too.
        """
        if continued.rows != self._rows or not self._reads_tables:
            return None
        part, size = self._batch.part, self._block_size
        longest = self._batch.metas[0].max_seq_len + 1
        width = -(-longest // size)
        if any(table.shape[1] != width for table in part.tables):
            return None
        for place, blocks in continued.tables.items():
            for table, row in zip(part.tables, blocks, strict=True):
                if len(row) > width:
                    return None
                table[place, : len(row)] = row
                table[place, len(row) :] = UNKNOWN
        # The new token stands behind all that were there.
        in_table, offset = np.divmod(part.seq_lens, size)
        for table, slots in zip(part.tables, self._slots, strict=True):
            blocks_of_tokens = table[self._places, in_table]
            if blocks_of_tokens.min() < 0:
                return None
            np.multiply(blocks_of_tokens, size, out=slots)
            np.add(slots, offset, out=slots)
        part.token_ids[:] = drawn
        np.add(part.positions, 1, out=part.positions)
        np.add(part.seq_lens, 1, out=part.seq_lens)
        for meta in self._batch.metas:
            meta.max_seq_len = longest
        return self._batch
