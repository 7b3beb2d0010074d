"""Steps that name the sequences that go on give what steps give that spell them out."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.engine.messages import EngineRequest, SampleOutput, pack_ids
from batchgen.engine.scheduler_output import (
    Continued,
    DrawRules,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
)
from batchgen.errors import EngineError
from batchgen.sampling_params import SamplingParams
from batchgen.worker.input_batch import BatchBuilder, InputBatch
from batchgen.worker.model_runner import ModelRunner

WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": list(range(0, 300, 2))},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z]{3,9}"}},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0, "use_beam_search": True, "best_of": 2, "n": 2},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 0, "bad_words": ["e"]},
]


def requests(count: int) -> list[EngineRequest]:
    draw = random.Random(5)
    found = []
    for index in range(count):
        params = SamplingParams(**{"max_tokens": draw.randint(2, 40), **WAYS[index % len(WAYS)]})
        prompt = [draw.randrange(3, 200) for _ in range(draw.randint(1, 40))]
        found.append(
            EngineRequest(request_id=str(index), prompt_token_ids=pack_ids(prompt), params=params, seed=index)
        )
    return found


def outputs(core: EngineCore, asked: list[EngineRequest]) -> tuple[dict[tuple[str, int], Any], int]:
    """What each sample became, and in how many steps some went on."""
    told: dict[tuple[str, int], list[SampleOutput]] = {}
    steps: list[SchedulerOutput] = []
    execute = core.executor.execute

    def watched(step: SchedulerOutput) -> Any:
        steps.append(step)
        return execute(step)

    core.executor.execute = watched  # type: ignore[method-assign]
    waiting = list(asked)
    while waiting or core.has_work:
        # They come one by one, so that steps are of all kinds.
        for request in waiting[:1]:
            core.add(request)
        del waiting[:1]
        for output in core.step():
            told.setdefault((output.request_id, output.index), []).append(output)
    found = {
        key: (
            b"".join(each.token_ids for each in parts),
            parts[-1].finish_reason,
            [entry for each in parts for entry in each.logprobs or ()],
            parts[-1].error,
            parts[-1].valid,
        )
        for key, parts in told.items()
    }
    return found, sum(step.continued is not None for step in steps)


@pytest.mark.parametrize(
    "limits", [{}, {"num_gpu_blocks_override": 12}, {"max_num_seqs": 3, "max_num_batched_tokens": 16}]
)
def test_tokens_and_all_that_is_told_are_the_same(
    load: Callable[..., ModelRunner], folder: Path, limits: dict[str, Any]
) -> None:
    found = []
    for continues in (True, False):
        executor = load(folder, max_model_len=128, **limits)
        assert executor.info.continues
        executor.info = replace(executor.info, continues=continues)
        core = EngineCore(EngineConfig.from_engine_args(model=str(folder), max_model_len=128), executor)
        found.append(outputs(core, requests(24)))
        core.shutdown()
    (going_on, num_steps), (spelled_out, none) = found
    assert num_steps > 20 and none == 0
    assert going_on == spelled_out


PARAMS = SamplingParams(temperature=0)


def decode(slot: int, position: int, blocks: list[int]) -> ScheduledSequence:
    draw = SamplingRow(slot, DrawRules(PARAMS), (slot, 0, position + 1), 0)
    return ScheduledSequence(slot, [slot], position, (blocks,), (draw,))


def test_a_batch_that_goes_on_is_laid_out_as_if_it_were_spelled_out() -> None:
    builder = BatchBuilder(block_size=16, num_groups=1, device=torch.device("cpu"))
    builder.build(SchedulerOutput(4, tuple(decode(slot, 13 + slot, [slot]) for slot in range(3))), {})
    step = SchedulerOutput(5, (decode(9, 30, [7, 8]),), continued=Continued(4, [0, 2], {1: ([2, 6],)}))
    batch = builder.build(step, {}, [50, 51, 52])
    assert batch.token_ids.tolist() == [50, 52, 9]
    assert batch.positions.tolist() == [14, 16, 30]
    meta = batch.metas[0]
    assert meta.query_start_loc.tolist() == [0, 1, 2, 3]
    assert meta.seq_lens.tolist() == [15, 17, 31]
    assert meta.block_tables.tolist() == [[0, -1], [2, 6], [7, 8]]
    assert meta.slot_mapping.tolist() == [14, 6 * 16, 8 * 16 + 14]
    assert batch.logit_rows.tolist() == batch.sample_rows == [0, 1, 2]
    assert [row.slot for row in batch.samples] == [9]
    # Then the newcomer alone.
    batch = builder.build(SchedulerOutput(6, (), continued=Continued(5, [2], {})), {}, [1, 2, 3])
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([3], [31])
    assert batch.metas[0].block_tables.tolist() == [[7, 8]]


def test_only_the_step_before_can_be_gone_on_from() -> None:
    builder = BatchBuilder(block_size=16, num_groups=1, device=torch.device("cpu"))
    step = SchedulerOutput(5, (), continued=Continued(4, [0], {}))
    with pytest.raises(EngineError, match="step 5 goes on from step 4, which was not the one before"):
        builder.build(step, {}, [1])
    builder.build(SchedulerOutput(4, (decode(3, 15, [0]),)), {})
    with pytest.raises(EngineError, match="row 0 that goes on: no block for a token of this step, group 0"):
        builder.build(step, {}, [1])


def same(batch: InputBatch, expected: InputBatch) -> None:
    """All tensors of two batches are equal."""
    for ours, theirs in zip(batch.metas, expected.metas, strict=True):
        for name in ("query_start_loc", "seq_lens", "block_tables", "slot_mapping"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
        assert (ours.max_query_len, ours.max_seq_len) == (theirs.max_query_len, theirs.max_seq_len)
    assert batch.token_ids.tolist() == expected.token_ids.tolist()
    assert batch.positions.tolist() == expected.positions.tolist()
    assert batch.logit_rows.tolist() == batch.sample_rows == expected.logit_rows.tolist()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_batch_that_goes_on_for_long_stays_in_its_memory(groups: int) -> None:
    def builder() -> BatchBuilder:
        return BatchBuilder(block_size=4, num_groups=groups, device=torch.device("cpu"))

    draw, going_on = random.Random(groups), builder()
    # Sequence -> tokens computed so far; the last three have more blocks than they need yet.
    lengths = {slot: draw.randint(1, 9) for slot in range(7)}
    free = iter(range(1000))
    tables = {slot: tuple([next(free) for _ in range(3)] for _ in range(groups)) for slot in lengths}
    for slot in list(lengths)[-3:]:
        for table in tables[slot]:
            table.append(next(free))

    def spelled_out(number: int) -> SchedulerOutput:
        parts = [
            ScheduledSequence(
                slot,
                [100 * slot + length],
                length,
                tuple(t.copy() for t in tables[slot]),
                (row(slot, length),),
            )
            for slot, length in lengths.items()
        ]
        return SchedulerOutput(number, tuple(parts))

    def row(slot: int, length: int) -> SamplingRow:
        return SamplingRow(slot, DrawRules(PARAMS), (slot, 0, length + 1), 0)

    going_on.build(spelled_out(0), {})
    rows, batches = list(range(len(lengths))), []
    for number in range(1, 40):
        if number == 25:  # one is gone, and the others go on
            lengths.pop(3)
            rows = [0, 1, 2, 4, 5, 6]
        changed: dict[int, tuple[list[int], ...]] = {}
        for place, slot in enumerate(lengths):
            lengths[slot] += 1
            if lengths[slot] // 4 >= len(tables[slot][0]):
                for table in tables[slot]:
                    table.append(next(free))
            elif groups == 2 and number % 5 == slot and lengths[slot] >= 4:
                tables[slot][1][0] = -1  # behind a window
            else:
                continue
            changed[place] = tuple(table.copy() for table in tables[slot])
        drawn = [100 * slot + length for slot, length in lengths.items()]
        if number == 25:
            drawn.insert(3, -7)
        batch = going_on.build(
            SchedulerOutput(number, (), continued=Continued(number - 1, rows, changed)), {}, drawn
        )
        same(batch, builder().build(spelled_out(number), {}))
        rows = list(range(len(lengths)))
        batches.append(batch)
    # Laid out anew when a table gets wider or somebody leaves, not else.
    assert len({id(batch) for batch in batches}) < 20
