"""Why samples end in the core, and in which order the reasons are asked."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.scheduler_output import GrammarState, SchedulerOutput, StepResult
from batchgen.engine.sequence import Sequence
from batchgen.engine.stop import check_stop, repeats
from batchgen.outputs import FailureCode, RowFailure
from batchgen.sampling_parts import RepetitionDetectionParams

MakeSequence = Callable[..., Sequence]


def ended(make_sequence: MakeSequence, tokens: list[int], is_complete: bool = False, **values: Any) -> Any:
    sequence = make_sequence([1, 1], **values)
    sequence.request.eos_ids = frozenset() if values.get("ignore_eos") else frozenset({0})
    sequence.token_ids += array("i", tokens)
    stop = check_stop(sequence, is_complete)
    return None if stop is None else (str(stop.finish_reason), stop.stop_reason)


AGAIN = RepetitionDetectionParams(max_pattern_size=2, min_count=3)


@pytest.mark.parametrize(
    ("tokens", "values", "right"),
    [
        ([5, 6], {}, None),
        ([5, 0], {"stop_token_ids": [0], "max_tokens": 2}, ("stop", None)),
        ([5, 0], {"stop_token_ids": [0], "max_tokens": 2, "ignore_eos": True}, ("stop", 0)),
        ([5, 6], {"stop_token_ids": [6], "max_tokens": 2}, ("stop", 6)),
        ([5, 6], {"max_tokens": 2}, ("length", None)),
        ([5, 6], {"max_tokens": 2, "is_complete": True}, ("stop", None)),
        ([5, 6], {"max_tokens": 9, "min_tokens": 5, "is_complete": True}, ("stop", None)),
        ([5, 6], {"stop_token_ids": [6], "is_complete": True}, ("stop", 6)),
        ([6, 6, 6], {"max_tokens": 3, "repetition_detection": AGAIN}, ("length", None)),
        ([6, 6, 6], {"max_tokens": 9, "repetition_detection": AGAIN}, ("repetition", None)),
        ([6, 6, 6], {"max_tokens": 9, "min_tokens": 3, "repetition_detection": AGAIN}, ("repetition", None)),
        ([6, 6, 6], {"max_tokens": 9, "min_tokens": 4, "repetition_detection": AGAIN}, None),
    ],
)
def test_reasons_come_in_their_order(
    make_sequence: MakeSequence, tokens: list[int], values: dict[str, Any], right: Any
) -> None:
    assert ended(make_sequence, tokens, **values) == right


@pytest.mark.parametrize(
    ("tokens", "largest", "smallest", "count", "right"),
    [
        ([1, 2, 1, 2, 1, 2], 2, 1, 3, True),
        ([1, 2, 1, 2, 1, 2], 1, 1, 2, False),
        ([9, 1, 2, 1, 2, 1], 2, 1, 3, False),
        ([3, 1, 2, 1, 2], 4, 2, 2, True),
        ([7, 7, 7, 7], 2, 2, 2, True),
        ([7, 7, 7], 2, 2, 2, False),
        ([7, 7], 5, 1, 2, True),
        ([7, 8], 5, 1, 2, False),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4], 3, 1, 2, False),
        ([7, 7, 7], 0, 1, 2, False),
    ],
)
def test_a_pattern_must_stand_at_the_end_so_many_times(
    tokens: list[int], largest: int, smallest: int, count: int, right: bool
) -> None:
    detection = RepetitionDetectionParams(
        max_pattern_size=largest, min_pattern_size=smallest, min_count=count
    )
    assert repeats(array("i", [*[7] * 9, *tokens]), 9, detection) is right


def test_a_prompt_is_no_repetition(make_scheduler: Any, make_request: Any, execute: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [7] * 30, max_tokens=9, repetition_detection=AGAIN))
    outputs = []
    while scheduler.has_work:
        outputs += scheduler.update(execute(scheduler.schedule()))
    assert len(outputs) == 3
    assert outputs[-1].finish_reason == "repetition"


def test_a_grammar_at_its_end_ends_the_sample_and_says_whether_it_is_valid(
    make_scheduler: Any, make_request: Any
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("whole", [1], max_tokens=9))
    scheduler.add(make_request("cut", [1], max_tokens=2))

    def draw(step: SchedulerOutput, *states: tuple[bool, bool]) -> list[tuple[str, bool | None, str | None]]:
        grammar = {row: GrammarState(*state) for row, state in enumerate(states)}
        outputs = scheduler.update(StepResult(step.step, [7] * len(states), grammar=grammar))
        return [(each.request_id, each.valid, each.finish_reason) for each in outputs]

    assert draw(scheduler.schedule(), (False, False), (True, False)) == [
        ("whole", False, None),
        ("cut", True, None),
    ]
    assert draw(scheduler.schedule(), (True, True), (False, False)) == [
        ("whole", True, "stop"),
        ("cut", False, "length"),
    ]


def test_what_cannot_be_drawn_ends_the_sample_with_the_executors_words(
    make_scheduler: Any, make_request: Any
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], n=2, temperature=1.0))
    step = scheduler.schedule()
    outputs = scheduler.update(StepResult(step.step, [7, None], failures={1: "no token is allowed"}))
    assert [each.finish_reason for each in outputs] == [None, "error"]
    # The same again would fail again: no engine error, which is worth another try.
    assert outputs[1].error == RowFailure(
        FailureCode.INVALID_PARAMETER, "generated token 1 cannot be drawn: no token is allowed"
    )
