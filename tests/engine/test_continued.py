"""A scheduler whose steps name the sequences that go on schedules what one does that spells all out."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.engine.messages import SampleOutput
from batchgen.engine.scheduler_output import SchedulerOutput, StepResult
from batchgen.whole_steps import WholeSteps

SHAPES = st.lists(
    st.tuples(st.integers(1, 50), st.sampled_from([1, 2, 17, 40]), st.sampled_from([1, 1, 3])),
    min_size=1,
    max_size=8,
)


def drawn(step: SchedulerOutput) -> list[int | None]:
    """A token for each row, a function of sequence and position alone; now and then none."""
    tokens: list[int | None] = []
    for part in step.sequences:
        for row in part.samples:
            mixed = (row.key[0] * 31 + row.key[1] * 7 + row.key[2] * 13) % 101
            tokens.append(None if mixed == 3 else mixed)
    return tokens


def parts(step: SchedulerOutput) -> dict[int, Any]:
    """What each sequence computes and draws, whatever the order."""
    return {
        part.seq_id: (
            part.token_ids,
            part.num_computed_tokens,
            part.block_ids,
            [(row.slot, row.key, row.num_generated, row.num_candidates) for row in part.samples],
        )
        for part in step.sequences
    }


def by_sample(outputs: list[SampleOutput]) -> list[tuple[Any, ...]]:
    """What is told, whatever the order."""
    return sorted((each.request_id, each.index, each.token_ids, each.finish_reason) for each in outputs)


def rest_of(scheduler: Any, whole: WholeSteps) -> dict[tuple[str, int], Any]:
    """What is told of each sample until all have ended."""
    found: dict[tuple[str, int], Any] = {}
    while scheduler.has_work:
        step = scheduler.schedule()
        if step.is_empty:
            told = scheduler.take_outputs()
        else:
            tokens = drawn(whole.spelled_out(step))
            whole.drawn(tokens)
            told = scheduler.update(StepResult(step.step, tokens))
        for each in told:
            before, _ = found.get((each.request_id, each.index), (b"", None))
            found[each.request_id, each.index] = (before + each.token_ids, each.finish_reason)
    return found


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES,
    num_blocks=st.sampled_from([5, 8, 60]),
    budget=st.sampled_from([6, 33, 200]),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None, 20)]),
    drops=st.sets(st.integers(1, 30), max_size=3),
)
@example(  # some ended in another order
    shapes=[(1, 2, 3), (1, 2, 1), (1, 2, 3)],
    num_blocks=8,
    budget=6,
    caching=False,
    windows=(None,),
    drops=set(),
)
def test_steps_are_the_same_spelled_out(
    make_scheduler: Any,
    make_request: Any,
    mode: str,
    shapes: list[tuple[int, int, int]],
    num_blocks: int,
    budget: int,
    caching: bool,
    windows: tuple[int | None, ...],
    drops: set[int],
) -> None:
    plain, going_on = (
        make_scheduler(
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            group_windows=windows,
            num_cpu_blocks=6,
            preemption_mode=mode,
            eos_token_ids=(5,),
            continues=continues,
        )
        for continues in (False, True)
    )
    whole, spelled_out = WholeSteps(), WholeSteps()
    for number, (length, new, samples) in enumerate(shapes):
        request = make_request(
            str(number), range(3, 3 + length), max_tokens=new, n=samples, temperature=1.0, seed=number
        )
        for scheduler in (plain, going_on):
            scheduler.add(request)
    num_steps = num_continued = num_idle = num_following = 0
    before: set[int] = set()
    while plain.has_work or going_on.has_work:
        num_steps += 1
        if num_steps in drops:
            for scheduler in (plain, going_on):
                scheduler.table.drop(str(num_steps % len(shapes)))
        expected, step = plain.schedule(), going_on.schedule()
        num_continued += 0 if step.continued is None else len(step.continued.rows)
        num_following += sum(part.seq_id in before for part in expected.sequences)
        before = {part.seq_id for part in expected.sequences}
        assert expected.num_tokens == step.num_tokens and expected.num_sequences == step.num_sequences
        num_idle = num_idle + 1 if step.is_empty else 0
        assert step.is_empty == expected.is_empty and num_idle < 4
        if step.is_empty:
            told = [scheduler.take_outputs() for scheduler in (plain, going_on)]
        else:
            found = whole.spelled_out(step)
            tokens = drawn(found)
            whole.drawn(tokens)
            spelled_out.drawn(drawn(spelled_out.spelled_out(expected)))
            if found.finished_seq_ids != expected.finished_seq_ids:
                # Those that go on are taken in first, so some ended in another order and blocks came free in
                # another. From here on others than before may hold them, and nothing but the end is the same.
                assert sorted(found.finished_seq_ids) == sorted(expected.finished_seq_ids)
                told_plain = plain.update(StepResult(expected.step, drawn(expected)))
                assert by_sample(told_plain) == by_sample(going_on.update(StepResult(step.step, tokens)))
                assert rest_of(plain, spelled_out) == rest_of(going_on, whole)
                return
            assert parts(found) == parts(expected)
            assert (found.block_copies, found.swap_out, found.swap_in) == (
                expected.block_copies, expected.swap_out, expected.swap_in,
            )  # fmt: skip
            told = [
                plain.update(StepResult(expected.step, drawn(expected))),
                going_on.update(StepResult(step.step, tokens)),
            ]
        assert by_sample(told[0]) == by_sample(told[1])
    # With room for all, whoever was in the step before goes on, but for chunks of prompts and first tokens.
    if num_blocks == 60 and num_following > 100:
        assert num_continued > 0
