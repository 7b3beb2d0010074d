"""InputBatch: a SchedulerOutput as the tensors that the model reads."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import SamplingRow, ScheduledSequence, SchedulerOutput
from batchgen.errors import EngineError
from batchgen.kernels.kv import AttentionMeta

UNKNOWN = -1


@dataclass(slots=True)
class InputBatch:
    """One step's input (T tokens, R rows of logits).

    Args:
        token_ids, positions: [T] int64.
        metas: per KV group.
        logit_rows: [R] int64, the tokens whose logits are needed.
        samples: every draw, in the order of the sequences.
        sample_rows: per draw, which of the R rows it reads.
    """

    token_ids: Tensor
    positions: Tensor
    metas: tuple[AttentionMeta, ...]
    logit_rows: Tensor
    samples: list[SamplingRow]
    sample_rows: list[int]


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
        EngineError: a token id that nobody knows, a sequence without tokens, a token without a block.
    """
    sequences = step.sequences
    count = len(sequences)
    flat = array("q")
    lens = np.empty(count, dtype=np.int32)
    computed = np.empty(count, dtype=np.int32)
    samples: list[SamplingRow] = []
    sample_rows: list[int] = []
    with_logits: list[int] = []
    for index, sequence in enumerate(sequences):
        flat.extend(sequence.token_ids)
        lens[index] = len(sequence.token_ids)
        computed[index] = sequence.num_computed_tokens
        if sequence.samples:
            samples += sequence.samples
            sample_rows += [len(with_logits)] * len(sequence.samples)
            with_logits.append(index)
    if count and not lens.all():
        raise EngineError(f"sequence {sequences[int(lens.argmin())].seq_id} was scheduled without tokens")
    token_ids = np.frombuffer(flat, dtype=np.int64).copy() if flat else np.empty(0, dtype=np.int64)
    ends = np.cumsum(lens, dtype=np.int32)
    starts = ends - lens
    if token_ids.size and token_ids.min() < 0:
        _fill_unknown(token_ids, starts, sequences, newest)
    # Position of token t: its place within the step, counted from what its sequence has computed.
    of_sequence = np.repeat(np.arange(count), lens)
    positions = np.arange(token_ids.size) + np.repeat(computed - starts, lens)
    seq_lens = computed + lens
    query_start_loc = np.concatenate((np.zeros(1, dtype=np.int32), ends))

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    shared_start, shared_lens = tensor(query_start_loc), tensor(seq_lens)
    longest, longest_query = int(seq_lens.max(initial=0)), int(lens.max(initial=0))
    metas = []
    for group in range(num_groups):
        tables = _block_tables(sequences, group, -(-longest // block_size))
        blocks = tables[of_sequence, positions // block_size]
        if blocks.size and blocks.min() < 0:
            sequence = sequences[of_sequence[int(blocks.argmin())]]
            raise EngineError(f"sequence {sequence.seq_id}: no block for a token of this step, group {group}")
        slots = blocks * block_size + (positions % block_size).astype(np.int32)
        metas.append(
            AttentionMeta(
                query_start_loc=shared_start,
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
        logit_rows=tensor(ends[with_logits].astype(np.int64) - 1),
        samples=samples,
        sample_rows=sample_rows,
    )


def _block_tables(sequences: tuple[ScheduledSequence, ...], group: int, width: int) -> np.ndarray:
    tables = np.full((len(sequences), width), -1, dtype=np.int32)
    for index, sequence in enumerate(sequences):
        blocks = sequence.block_ids[group][:width]
        tables[index, : len(blocks)] = blocks
    return tables


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
