"""A step's sequences as tensors: positions, slots, tables, rows of logits, tokens not known yet."""

import pytest
import torch

from batchgen.engine.scheduler_output import (
    DrawRules,
    PromptScores,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
)
from batchgen.errors import EngineError
from batchgen.sampling_params import SamplingParams
from batchgen.worker.input_batch import BatchBuilder, InputBatch

PARAMS = SamplingParams(temperature=0)


def sample(slot: int, index: int = 0) -> SamplingRow:
    return SamplingRow(slot, DrawRules(PARAMS), (slot, index, 0), 0)


def build(*sequences: ScheduledSequence, newest: dict[int, int] | None = None, groups: int = 1) -> InputBatch:
    return builder(groups).build(SchedulerOutput(3, sequences), newest or {})


def builder(groups: int = 1) -> BatchBuilder:
    return BatchBuilder(block_size=16, num_groups=groups, device=torch.device("cpu"))


def test_a_chunk_beside_a_decode() -> None:
    batch = build(
        ScheduledSequence(7, [5, 6, 7], 15, ([4, 2],)),
        ScheduledSequence(8, [9], 32, ([1, 0, 9],), (sample(8),)),
    )
    assert batch.token_ids.tolist() == [5, 6, 7, 9]
    assert batch.positions.tolist() == [15, 16, 17, 32]
    meta = batch.metas[0]
    assert meta.slot_mapping.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 9 * 16]
    assert meta.query_start_loc.tolist() == [0, 3, 4]
    assert meta.seq_lens.tolist() == [18, 33]
    assert meta.block_tables.tolist() == [[4, 2, -1], [1, 0, 9]]
    assert (meta.max_query_len, meta.max_seq_len) == (3, 33)
    assert batch.logit_rows.tolist() == [3]
    assert [str(t.dtype) for t in (meta.slot_mapping, meta.seq_lens, meta.block_tables, batch.positions)] == [
        "torch.int32", "torch.int32", "torch.int32", "torch.int64",
    ]  # fmt: skip


def test_several_samples_read_one_row() -> None:
    batch = build(
        ScheduledSequence(1, [1, 2], 0, ([0],), (sample(1), sample(2, 1), sample(3, 2))),
        ScheduledSequence(4, [1], 0, ([1],)),
        ScheduledSequence(5, [1], 0, ([2],), (sample(5),)),
    )
    assert batch.logit_rows.tolist() == [1, 3]
    assert batch.sample_rows == [0, 0, 0, 1]
    assert [row.slot for row in batch.samples] == [1, 2, 3, 5]


def test_draws_from_several_tokens_of_a_sequence() -> None:
    def at(slot: int, index: int) -> SamplingRow:
        return SamplingRow(slot, DrawRules(PARAMS), (slot, 0, index), 0, index)

    batch = build(
        ScheduledSequence(1, [1, 2, 3], 4, ([0],), (at(1, 0), at(1, 1), at(1, 2))),
        ScheduledSequence(2, [4], 4, ([1],), (at(2, -1),)),
        ScheduledSequence(3, [5, 6], 4, ([2],), (at(3, 1), at(3, 0), at(3, -1))),
    )
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 5, 4]
    assert batch.sample_rows == [0, 1, 2, 3, 4, 5, 4]
    with pytest.raises(EngineError, match="sequence 1: a draw from token 3 of 3"):
        build(ScheduledSequence(1, [1, 2, 3], 4, ([0],), (at(1, 3),)))


def test_scores_read_the_logits_before_their_tokens() -> None:
    batch = build(
        ScheduledSequence(1, [1, 2, 3], 0, ([0],), scores=PromptScores(1, [2, 3, 4], PARAMS)),
        ScheduledSequence(2, [7], 4, ([1],), (sample(2),)),
        ScheduledSequence(
            3, [5, 6, 7, 8], 16, ([2, 3],), (sample(3),), scores=PromptScores(18, [7, 8], PARAMS)
        ),
    )
    assert batch.logit_rows.tolist() == [3, 7, 0, 1, 2, 5, 6]
    assert batch.num_score_rows == 5
    assert [seq_id for seq_id, _ in batch.scores] == [1, 3]
    for start, targets in ((16, [5]), (20, [1, 2])):
        with pytest.raises(EngineError, match=r"sequence 4: . scores from position"):
            build(
                ScheduledSequence(4, [5, 6, 7, 8], 16, ([2, 3],), scores=PromptScores(start, targets, PARAMS))
            )


def test_blocks_kept_for_later_are_not_read() -> None:
    batch = build(ScheduledSequence(1, [1], 3, ([5, 6, 7, 8],)))
    assert batch.metas[0].block_tables.tolist() == [[5]]


def test_every_group_has_tables_of_its_own() -> None:
    batch = build(ScheduledSequence(1, [1, 2], 15, ([3, 4], [9, 8])), groups=2)
    assert batch.metas[0].slot_mapping.tolist() == [3 * 16 + 15, 4 * 16]
    assert batch.metas[1].slot_mapping.tolist() == [9 * 16 + 15, 8 * 16]


def test_blocks_behind_a_window_may_be_gone_but_those_written_to_may_not() -> None:
    batch = build(ScheduledSequence(1, [1, 2], 31, ([3, 4, 5], [-1, 8, 9])), groups=2)
    assert batch.metas[1].block_tables.tolist() == [[-1, 8, 9]]
    assert batch.metas[1].slot_mapping.tolist() == [8 * 16 + 15, 9 * 16]
    for lost in ([3, -1, 5], [3, 4, -1], [3, 4]):
        with pytest.raises(EngineError, match="sequence 1: no block for a token of this step, group 0"):
            build(ScheduledSequence(1, [1, 2], 31, (lost,)))


def test_tokens_not_known_yet_are_those_drawn_last() -> None:
    batch = build(
        ScheduledSequence(7, [-1], 4, ([0],)), ScheduledSequence(8, [3, -1], 4, ([1],)), newest={7: 70, 8: 80}
    )
    assert batch.token_ids.tolist() == [70, 3, 80]
    with pytest.raises(EngineError, match="sequence 8: token id -1"):
        build(ScheduledSequence(7, [-1], 4, ([0],)), ScheduledSequence(8, [-1], 4, ([1],)), newest={7: 70})


def test_a_sequence_without_tokens_is_a_mistake() -> None:
    with pytest.raises(EngineError, match="sequence 9 was scheduled without tokens"):
        build(ScheduledSequence(7, [1], 4, ([0],)), ScheduledSequence(9, [], 4, ([1],)))
