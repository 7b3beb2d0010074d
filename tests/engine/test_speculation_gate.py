"""When drafting pays: by injected step times and texts that draft well or badly."""

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.engine.speculation import Speculation
from batchgen.engine.step_times import MeasuredTimes
from batchgen.ngram_settings import NgramSettings
from batchgen.testing import FreeDrafts

SETTINGS = NgramSettings(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=2)


def memory_bound(num_tokens: int) -> float:
    """As long as 16 tokens cost the same."""
    return 0.010 * max(num_tokens, 16) / 16


def proportional(num_tokens: int) -> float:
    return 0.001 * num_tokens


def run(num_rows: int, num_steps: int, seconds: Any, *, accept: Any, repeats: bool = True) -> Any:
    """Steps of an engine whose sequences end as before; `accept(index, drafts)` tells how many are right."""
    speculation = Speculation(SETTINGS)
    tokens = array("i", [1, 2, 3, 4, 5, 6, 1, 2, 3] if repeats else range(9))
    sequences = [SimpleNamespace(seq_id=index, token_ids=tokens) for index in range(num_rows)]
    spent, made = 0.0, 0
    for _ in range(num_steps):
        drafts = speculation.draft(sequences, [9] * num_rows, num_rows, 1000)
        size = num_rows + sum(map(len, drafts))
        speculation.step_ended(size, size, seconds(size))
        spent += seconds(size)
        made += num_rows
        for index, draft in enumerate(drafts):
            if draft:
                assert draft == [4, 5, 6, 1][: len(draft)]
                num_accepted = accept(index, len(draft))
                made += num_accepted
                speculation.judged(index, len(draft), num_accepted)
    plain_rate = num_rows / seconds(num_rows)
    return SimpleNamespace(choices=speculation.choices, speedup=made / spent / plain_rate)


def everything(index: int, num_drafted: int) -> int:
    return num_drafted


def nothing(index: int, num_drafted: int) -> int:
    return 0


def test_a_small_batch_drafts() -> None:
    ran = run(1, 400, memory_bound, accept=everything)
    assert ran.choices["draft"] > 380
    assert ran.speedup > 4.5


def test_a_large_batch_does_not_and_trying_costs_nothing_that_could_be_measured() -> None:
    ran = run(64, 3000, proportional, accept=lambda index, drafted: drafted // 2)
    assert ran.choices["draft"] == 0
    assert 0 < ran.choices["draft_trial"] <= 30
    assert ran.speedup > 0.997


def test_drafts_that_fail_are_given_up_on_any_batch() -> None:
    ran = run(4, 3000, memory_bound, accept=nothing)
    # 4 + 4 · 4 tokens cost more than 4.
    assert ran.choices["draft"] + ran.choices["draft_trial"] < 100
    assert ran.speedup > 0.99


def test_only_those_sequences_draft_whose_drafts_are_accepted() -> None:
    drafted: Counter[int] = Counter()

    def accept(index: int, num_drafted: int) -> int:
        drafted[index] += num_drafted
        return num_drafted if index == 2 else 0

    ran = run(8, 1000, memory_bound, accept=accept)
    # While a step has room for more tokens at no cost, the others may try again.
    assert drafted[2] > 3900
    assert max(count for index, count in drafted.items() if index != 2) < 1000
    assert ran.speedup > 1.25


def test_one_step_now_and_then_goes_without_drafts_to_be_measured() -> None:
    ran = run(1, 2000, memory_bound, accept=everything)
    assert 10 <= ran.choices["draft_not"] <= 20


def test_a_text_without_repetition_costs_no_steps() -> None:
    ran = run(3, 500, memory_bound, accept=everything, repeats=False)
    assert ran.choices == {"draft_not": 500}


def test_nobody_drafts_beyond_room_and_budget() -> None:
    speculation = Speculation(SETTINGS, times=FreeDrafts())
    tokens = array("i", [1, 2, 3, 4, 5, 6, 1, 2, 3])
    sequences = [SimpleNamespace(seq_id=index, token_ids=tokens) for index in range(4)]
    for _ in range(100):
        drafts = speculation.draft(sequences, [9, 0, 2, -1], 4, 5)
        assert sum(map(len, drafts)) <= 5
        assert all(len(draft) <= max(room, 0) for draft, room in zip(drafts, [4, 0, 2, 0], strict=True))
        assert any(drafts)


def test_the_cost_of_a_token_is_measured_on_larger_steps() -> None:
    times = MeasuredTimes()
    assert times.seconds(4) is None and times.more_s(4, 100) is None
    for size, seconds in ((4, 0.1), (64, 0.22), (128, 0.5)):
        times.observe(size, seconds)
    assert times.seconds(4) == pytest.approx(0.1)
    assert times.seconds(5) is None
    assert times.more_s(4, 63) is None
    assert times.more_s(4, 64) == pytest.approx(0.12 / 60)
    assert times.more_s(4, 128) == pytest.approx((0.12 + 0.4) / (60 + 124))
    assert times.more_s(64, 128) == pytest.approx(0.28 / 64)


def test_one_slow_step_does_not_count_for_much() -> None:
    times = MeasuredTimes()
    for seconds in (0.1, 0.1, 0.1, 9.0):
        times.observe(4, seconds)
    assert times.seconds(4) < 0.13


def test_it_says_when_it_turns_itself_off_and_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "batchgen.engine.speculation"):
        run(64, 300, proportional, accept=lambda index, drafted: drafted // 2)
        run(1, 300, memory_bound, accept=everything)
    off, on = (record.getMessage() for record in caplog.records)
    assert "speculation is off at 64 sequences" in off
    assert "speculation is on at 1 sequences" in on
