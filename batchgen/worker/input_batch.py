"""InputBatch: a SchedulerOutput as the tensors that the model reads.

All of a step is laid out with numpy; the sequences that go on from the step before are taken from what was
laid out for that one, without a look at each, and in the same memory if nothing else changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import (
    Continued,
    PromptScores,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
)
from batchgen.errors import EngineError
from batchgen.kernels.kv import AttentionMeta
from batchgen.worker.device import is_host
from batchgen.worker.row_slots import RowSlots
from batchgen.worker.steady_batch import SteadyBatch
from batchgen.worker.step_parts import (
    UNKNOWN,
    StepPart,
    WantedLogits,
    block_tables,
    blocks_beyond,
    cut_tables,
    fill_unknown,
    flat_tokens,
    joined_parts,
    widened_tables,
)

_NO_SLOTS: Mapping[str, int] = {}


@dataclass(slots=True)
class InputBatch:
    """One step's input (T tokens, R rows of logits); it holds until the next one is laid out.

    Args:
        token_ids, positions: [T] int64.
        metas: per KV group.
        logit_rows: [R] int64, the tokens whose logits are needed: first those of draws, then those of scores.
        samples: every draw of a sequence that does not merely go on, in the order of the sequences.
        sample_rows: per draw, those of sequences that go on first, which of the R rows it reads.
        scores: (seq_id, prompt tokens to be scored); each target has a row of its own.
        num_score_rows: how many of the R rows are theirs.
        part: the arrays of all sequences; on the host the tensors are their memory.
        slots: which of the rows belong to which adapter's slot; None: none to any.
    """

    token_ids: Tensor
    positions: Tensor
    metas: tuple[AttentionMeta, ...]
    logit_rows: Tensor
    samples: list[SamplingRow]
    sample_rows: list[int]
    scores: list[tuple[int, PromptScores]]
    num_score_rows: int
    part: StepPart
    slots: RowSlots | None = None


@dataclass(slots=True)
class _Layout:
    """What must be remembered of a step for those that go on from it.

    Args:
        step: its number.
        part: its sequences.
        sequence_of_draw: per draw the place of its sequence in the step.
        steady: the batch, if its sequences may go on in the same memory.
    """

    step: int
    part: StepPart
    sequence_of_draw: np.ndarray
    steady: SteadyBatch | None


class BatchBuilder:
    """Lays out one step after the other.

    Args:
        block_size: B.
        num_groups: KV groups.
        device: of the tensors.
        num_slots: of adapters.
    """

    def __init__(self, *, block_size: int, num_groups: int, device: torch.device, num_slots: int = 0):
        self._block_size = block_size
        self._num_groups = num_groups
        self._device = device
        self._num_slots = num_slots
        self._last: _Layout | None = None

    def build(
        self,
        step: SchedulerOutput,
        newest: Mapping[int, int],
        drawn: Sequence[int | None] = (),
        slots: Mapping[str, int] = _NO_SLOTS,
    ) -> InputBatch:
        """Lay a step's sequences out one after the other.

        Args:
            step: from the scheduler; no sequence without tokens.
            newest: seq_id -> the token it drew last, for token ids that the scheduler did not know yet.
            drawn: what the step before drew, in the order of its rows.
            slots: those of the adapters of `step.sequences`.

        Raises:
            EngineError: a token id that nobody knows, a sequence without tokens, a token without a block,
                logits of a token that is not in the step, sequences that go on from another step.
        """
        parts, num_continued = [], 0
        if step.continued is not None:
            last = self._checked_last(step, step.continued)
            if last.steady is not None and not step.sequences:
                batch = last.steady.moved_on(step.continued, drawn)
                if batch is not None:
                    last.step = step.step
                    return batch
            parts.append(self._continued(last, step.continued, drawn))
            num_continued = len(step.continued.rows)
        wanted = WantedLogits(num_continued)
        if step.sequences or not parts:
            parts.append(self._fresh(step.sequences, newest, wanted, slots))
        part = parts[0] if len(parts) == 1 else joined_parts(*parts)
        of_draws = np.array(wanted.sequence_of_sample, dtype=np.int64)
        if num_continued:
            of_draws = np.concatenate((np.arange(num_continued), of_draws))
        batch = self._batch(step, part, wanted)
        steady = None
        if step.continued is not None and not step.sequences and is_host(self._device):
            steady = SteadyBatch(batch, self._block_size)
        self._last = _Layout(step.step, part, of_draws, steady)
        return batch

    def slots_going_on(self, step: SchedulerOutput) -> set[int]:
        """The adapters' slots that sequences of a step, yet to be laid out, bring from the one before."""
        if step.continued is None or self._last is None or self._last.part.slots is None:
            return set()
        places = self._last.sequence_of_draw[np.array(step.continued.rows, dtype=np.int64)]
        return set(self._last.part.slots[places].tolist()) - {UNKNOWN}

    def _checked_last(self, step: SchedulerOutput, continued: Continued) -> _Layout:
        if self._last is None or self._last.step != continued.step:
            raise EngineError(
                f"step {step.step} goes on from step {continued.step}, which was not the one before"
            )
        return self._last

    def _fresh(
        self,
        sequences: tuple[ScheduledSequence, ...],
        newest: Mapping[int, int],
        wanted: WantedLogits,
        slots: Mapping[str, int],
    ) -> StepPart:
        token_ids, lens, computed = flat_tokens(sequences, wanted)
        starts = np.cumsum(lens, dtype=np.int32) - lens
        if token_ids.size and token_ids.min() < 0:
            fill_unknown(token_ids, starts, sequences, newest)
        # Position of token t: its place within the step, counted from what its sequence has computed.
        positions = np.arange(token_ids.size) + np.repeat(computed - starts, lens)
        tables = [block_tables(sequences, group) for group in range(self._num_groups)]
        of_adapters = None
        if slots and any(sequence.adapter is not None for sequence in sequences):
            found = [UNKNOWN if each.adapter is None else slots[each.adapter] for each in sequences]
            of_adapters = np.array(found, dtype=np.int32)
        return StepPart(token_ids, positions, lens, computed + lens, tables, of_adapters)

    @staticmethod
    def _continued(last: _Layout, continued: Continued, drawn: Sequence[int | None]) -> StepPart:
        """The sequences that go on, each with the token that it drew."""
        rows = np.array(continued.rows, dtype=np.int64)
        places = last.sequence_of_draw[rows]
        # The new token stands behind all that were there.
        positions = last.part.seq_lens[places]
        tables = [table[places] for table in last.part.tables]
        slots = None if last.part.slots is None else last.part.slots[places]
        for place, blocks in continued.tables.items():
            for group, row in enumerate(blocks):
                if len(row) > tables[group].shape[1]:
                    tables[group] = widened_tables(tables[group], len(row))
                tables[group][place, : len(row)] = row
                tables[group][place, len(row) :] = UNKNOWN
        return StepPart(
            np.array([drawn[row] for row in continued.rows], dtype=np.int64),
            positions.astype(np.int64),
            np.ones(len(rows), dtype=np.int32),
            positions + np.int32(1),
            tables,
            slots if slots is not None and slots.max(initial=UNKNOWN) > UNKNOWN else None,
        )

    def _batch(self, step: SchedulerOutput, part: StepPart, wanted: WantedLogits) -> InputBatch:
        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self._device)

        num_sequences, size = len(part.lens), self._block_size
        query_start_loc = np.zeros(num_sequences + 1, dtype=np.int32)
        np.cumsum(part.lens, out=query_start_loc[1:])
        longest, longest_query = int(part.seq_lens.max(initial=0)), int(part.lens.max(initial=0))
        of_sequence = np.arange(num_sequences)
        if longest_query > 1:
            of_sequence = np.repeat(of_sequence, part.lens)
        starts, lens = tensor(query_start_loc), tensor(part.seq_lens)
        in_table, offset = np.divmod(part.positions, size)
        metas = []
        for group, whole in enumerate(part.tables):
            tables = cut_tables(whole, -(-longest // size))
            if not blocks_beyond(whole, tables.shape[1]):
                part.tables[group] = tables
            blocks = tables[of_sequence, in_table]
            if blocks.size and blocks.min() < 0:
                self._complain_of_block(step, int(of_sequence[int(blocks.argmin())]), group)
            metas.append(
                AttentionMeta(
                    query_start_loc=starts,
                    seq_lens=lens,
                    block_tables=tensor(tables),
                    slot_mapping=tensor((blocks * size + offset).astype(np.int32)),
                    max_query_len=longest_query,
                    max_seq_len=longest,
                )
            )
        logit_rows = wanted.logit_rows()
        slots = None
        if part.slots is not None:
            of_token = part.slots[of_sequence]
            slots = RowSlots(of_token, logit_rows, self._num_slots, self._device)
        return InputBatch(
            token_ids=tensor(part.token_ids),
            positions=tensor(part.positions),
            metas=tuple(metas),
            logit_rows=tensor(logit_rows),
            samples=wanted.samples,
            sample_rows=wanted.sample_rows,
            scores=wanted.scores,
            num_score_rows=len(wanted.scored),
            part=part,
            slots=slots,
        )

    @staticmethod
    def _complain_of_block(step: SchedulerOutput, place: int, group: int) -> None:
        num_continued = 0 if step.continued is None else len(step.continued.rows)
        known = f"row {place} that goes on"
        if place >= num_continued:
            known = f"sequence {step.sequences[place - num_continued].seq_id}"
        raise EngineError(f"{known}: no block for a token of this step, group {group}")
