"""The order of rows with adapters: few in flight at once, few changes, and no row waits for long."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.messages import EngineRequest
from batchgen.jobs.adapter_turns import AdapterTurns
from batchgen.jobs.window import Ready
from batchgen.sampling_params import SamplingParams

PARAMS = SamplingParams()


def ready(number: int, adapter: str | None) -> Ready:
    request = EngineRequest(
        request_id=str(number), prompt_token_ids=b"", params=PARAMS, adapter=adapter or None
    )
    row: Any = SimpleNamespace(index=number)
    return Ready(row, request, 1)


class Run:
    """Hands rows of these adapters to an engine that has `capacity` rows in flight; the first in ends first.

    `late` keeps each fifth row in flight longer than the others.
    """

    def __init__(
        self, adapters: list[str], max_adapters: int | None, capacity: int = 8, *, late: bool = False
    ):
        self.turns = AdapterTurns(max_adapters, most_ahead=4 * capacity)
        self.sent: list[int] = []
        self.most_adapters = self.num_turns = 0
        rows = [ready(number, adapter) for number, adapter in enumerate(adapters)]
        in_flight: list[Ready] = []
        taken = 0
        while taken < len(rows) or self.turns or in_flight:
            for _ in range(self.turns.room(capacity - len(in_flight))):
                if taken < len(rows):
                    self.turns.put(rows[taken])
                    taken += 1
            while len(in_flight) < capacity and (row := self.turns.next()) is not None:
                adapter = row.request.adapter
                is_there = any(each.request.adapter == adapter for each in in_flight)
                self.num_turns += adapter is not None and not is_there
                in_flight.append(row)
                self.sent.append(row.row.index)
                named = {each.request.adapter for each in in_flight} - {None}
                self.most_adapters = max(self.most_adapters, len(named))
            assert in_flight, "rows wait, and nothing is in flight"
            place = 1 if late and len(in_flight) > 1 and in_flight[0].row.index % 5 == 0 else 0
            self.turns.finish(in_flight.pop(place))

    def most_overtaken(self) -> int:
        """How many later rows went before one row, at most."""
        seen: list[int] = []
        most = 0
        for number in self.sent:
            most = max(most, sum(other > number for other in seen))
            seen.append(number)
        return most


@pytest.mark.parametrize("max_adapters", [None, 3])
def test_where_all_may_be_in_flight_rows_keep_their_order(max_adapters: int | None) -> None:
    run = Run(["a", "", "b", "c", "b"] * 20, max_adapters)
    assert run.sent == list(range(100))


def test_an_adapter_stays_while_it_has_rows_and_few_are_changed() -> None:
    run = Run(["a", "b", "c"] * 200, 1)
    assert sorted(run.sent) == list(range(600))
    assert run.most_adapters == 1
    # One row after the other would change 599 times; the rows that may be read ahead hold it to a few.
    assert run.num_turns <= 60


def test_rows_without_an_adapter_never_wait() -> None:
    run = Run(["a", "b", ""] * 100, 1, capacity=4)
    base = [run.sent.index(number) for number in range(2, 300, 3)]
    assert base == sorted(base)
    assert run.most_overtaken() < 16


@pytest.mark.parametrize("max_adapters", [1, 2])
def test_a_rare_adapter_has_its_turn_among_many_rows_of_others(max_adapters: int) -> None:
    common = [["a"], ["a", "c"]][max_adapters - 1]
    adapters = [common[number % len(common)] for number in range(500)]
    adapters[50] = "b"
    run = Run(adapters, max_adapters)
    place = run.sent.index(50)
    # It waits for half of what may be read ahead, and for one adapter's rows in flight to end.
    assert 50 <= place <= 50 + 16 + 8
    assert run.num_turns <= 2 * max_adapters + 2


def test_others_go_on_while_one_adapter_leaves() -> None:
    # Four adapters, three places: with all but the leaving one going on, no row waits for an empty engine.
    run = Run(["a", "b", "c", "d"] * 100, 3, capacity=12)
    assert run.most_adapters == 3
    assert run.num_turns < 60


@settings(max_examples=200, deadline=None)
@given(
    adapters=st.lists(st.sampled_from(["", "a", "b", "c", "d", "e"]), max_size=150),
    max_adapters=st.integers(1, 4),
    capacity=st.integers(1, 12),
    late=st.booleans(),
)
def test_every_row_goes_once_within_its_bounds(
    adapters: list[str], max_adapters: int, capacity: int, late: bool
) -> None:
    run = Run(adapters, max_adapters, capacity, late=late)
    assert sorted(run.sent) == list(range(len(adapters)))
    assert run.most_adapters <= max_adapters
    assert run.most_overtaken() < 4 * capacity
    for adapter in set(adapters):
        own = [number for number in run.sent if adapters[number] == adapter]
        assert own == sorted(own)
    assert Counter(adapters).keys() == {adapters[number] for number in run.sent}
