"""InputBatch: a SchedulerOutput as the tensors that the model reads."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import (
    PromptScores,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
)
from batchgen.errors import EngineError
from batchgen.kernels.kv import AttentionMeta

UNKNOWN = -1


@dataclass(slots=True)
class InputBatch:
    """One step's input (T tokens, R rows of logits).

    Args:
        token_ids, positions: [T] int64.
        metas: per KV group.
        logit_rows: [R] int64, the tokens whose logits are needed: first those of draws, then those of scores.
        samples: every draw, in the order of the sequences.
        sample_rows: per draw, which of the R rows it reads.
        scores: (seq_id, prompt tokens to be scored); each target has a row of its own.
        num_score_rows: how many of the R rows are theirs.
    """

    token_ids: Tensor
    positions: Tensor
    metas: tuple[AttentionMeta, ...]
    logit_rows: Tensor
    samples: list[SamplingRow]
    sample_rows: list[int]
    scores: list[tuple[int, PromptScores]]
    num_score_rows: int


def build_batch(
    step: SchedulerOutput,
    *,
    block_size: int,
    num_groups: int,
    device: torch.device,
    newest: Mapping[int, int],
) -> InputBatch:
    """Lay a step's sequences out one after the other.

    Args:
        step: from the scheduler; no sequence without tokens.
        block_size: B.
        num_groups: KV groups.
        device: of the tensors.
        newest: seq_id -> the token it drew last, for token ids that the scheduler did not know yet.

    Raises:
        EngineError: a token id that nobody knows, a sequence without tokens, a token without a block, logits
            of a token that is not in the step.
    """
    sequences = step.sequences
    token_ids, lens, computed, wanted = _flattened(sequences)
    ends = np.cumsum(lens, dtype=np.int32)
    starts = ends - lens
    if token_ids.size and token_ids.min() < 0:
        _fill_unknown(token_ids, starts, sequences, newest)
    # Position of token t: its place within the step, counted from what its sequence has computed.
    of_sequence = np.repeat(np.arange(len(sequences)), lens)
    positions = np.arange(token_ids.size) + np.repeat(computed - starts, lens)
    seq_lens = computed + lens

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    query_start_loc = tensor(np.concatenate((np.zeros(1, dtype=np.int32), ends)))
    shared_lens = tensor(seq_lens)
    longest, longest_query = int(seq_lens.max(initial=0)), int(lens.max(initial=0))
    metas = []
    for group in range(num_groups):
        tables = _block_tables(sequences, group, -(-longest // block_size))
        slots = _slots(tables, positions, of_sequence, block_size)
        if slots.size and slots.min() < 0:
            sequence = sequences[of_sequence[int(slots.argmin())]]
            raise EngineError(f"sequence {sequence.seq_id}: no block for a token of this step, group {group}")
        metas.append(
            AttentionMeta(
                query_start_loc=query_start_loc,
                seq_lens=shared_lens,
                block_tables=tensor(tables),
                slot_mapping=tensor(slots),
                max_query_len=longest_query,
                max_seq_len=longest,
            )
        )
    return InputBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        metas=tuple(metas),
        logit_rows=tensor(np.array(wanted.drawn + wanted.scored, dtype=np.int64)),
        samples=wanted.samples,
        sample_rows=wanted.sample_rows,
        scores=wanted.scores,
        num_score_rows=len(wanted.scored),
    )


class _Wanted:
    """Which tokens of a step need logits, and for what; places are those in the flat step."""

    def __init__(self) -> None:
        self.samples: list[SamplingRow] = []
        self.sample_rows: list[int] = []
        self.drawn: list[int] = []
        self.scores: list[tuple[int, PromptScores]] = []
        self.scored: list[int] = []

    def add(self, sequence: ScheduledSequence, begin: int) -> None:
        """A sequence whose tokens begin at place `begin`."""
        count = len(sequence.token_ids)
        rows: dict[int, int] = {}
        for sample in sequence.samples:
            at = sample.token_index + count if sample.token_index < 0 else sample.token_index
            if not 0 <= at < count:
                raise EngineError(
                    f"sequence {sequence.seq_id}: a draw from token {sample.token_index} of {count}"
                )
            row = rows.get(at)
            if row is None:
                row = rows[at] = len(self.drawn)
                self.drawn.append(begin + at)
            self.samples.append(sample)
            self.sample_rows.append(row)
        scores = sequence.scores
        if scores is not None:
            first = scores.start - 1 - sequence.num_computed_tokens
            if first < 0 or first + len(scores.targets) > count:
                raise EngineError(
                    f"sequence {sequence.seq_id}: {len(scores.targets)} scores from position {scores.start} "
                    f"on, of {count} tokens from {sequence.num_computed_tokens} on"
                )
            self.scores.append((sequence.seq_id, scores))
            self.scored += range(begin + first, begin + first + len(scores.targets))


def _flattened(
    sequences: tuple[ScheduledSequence, ...],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, _Wanted]:
    """Token ids one after the other [T], and per sequence how many there are and were computed before."""
    flat = array("q")
    lens = np.empty(len(sequences), dtype=np.int32)
    computed = np.empty(len(sequences), dtype=np.int32)
    wanted = _Wanted()
    for index, sequence in enumerate(sequences):
        begin = len(flat)
        flat.extend(sequence.token_ids)
        lens[index] = len(sequence.token_ids)
        computed[index] = sequence.num_computed_tokens
        if sequence.samples or sequence.scores is not None:
            wanted.add(sequence, begin)
    if sequences and not lens.all():
        raise EngineError(f"sequence {sequences[int(lens.argmin())].seq_id} was scheduled without tokens")
    token_ids = np.frombuffer(flat, dtype=np.int64).copy() if flat else np.empty(0, dtype=np.int64)
    return token_ids, lens, computed, wanted


def _block_tables(sequences: tuple[ScheduledSequence, ...], group: int, width: int) -> np.ndarray:
    tables = np.full((len(sequences), width), -1, dtype=np.int32)
    for index, sequence in enumerate(sequences):
        blocks = sequence.block_ids[group][:width]
        tables[index, : len(blocks)] = blocks
    return tables


def _slots(tables: np.ndarray, positions: np.ndarray, of_sequence: np.ndarray, block_size: int) -> np.ndarray:
    """Where each token's keys and values go [T]; below 0 if it has no block."""
    blocks: np.ndarray = tables[of_sequence, positions // block_size]
    return blocks * block_size + (positions % block_size).astype(np.int32)


def _fill_unknown(
    token_ids: np.ndarray,
    starts: np.ndarray,
    sequences: tuple[ScheduledSequence, ...],
    newest: Mapping[int, int],
) -> None:
    for at in np.flatnonzero(token_ids < 0):
        sequence = sequences[int(np.searchsorted(starts, at, side="right")) - 1]
        if token_ids[at] != UNKNOWN or sequence.seq_id not in newest:
            raise EngineError(
                f"sequence {sequence.seq_id}: token id {token_ids[at]} stands for no known token"
            )
        token_ids[at] = newest[sequence.seq_id]
