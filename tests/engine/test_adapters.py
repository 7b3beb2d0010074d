"""Requests that name adapters: by content, once it is in memory; what is not loaded, lost or taken back."""

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.engine.in_process import InProcessClient
from batchgen.engine.messages import AdapterInfo, SampleOutput
from batchgen.engine.scheduler_output import SchedulerOutput
from batchgen.errors import ConfigError
from batchgen.outputs import FailureCode, RowFailure
from batchgen.testing import ByteTokenizer, CountingExecutor

Made = SimpleNamespace


class Shelf:
    """An AdapterMemory whose adapters arrive when a test says so; the content is the path."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.coming: set[str] = set()
        self.lost: dict[str, str] = {}
        self.dropped: list[str] = []
        self.pinned: list[str] = []
        self.running: list[set[str]] = []
        self.num_waits = 0
        self.arrives_by_itself = True

    def load(self, name: str, path: str) -> AdapterInfo:
        if path == "broken":
            raise ConfigError(f"adapter {name!r}: {path}")
        return AdapterInfo(name=name, path=path, content_hash=path.encode().hex(), warnings=("odd",))

    def drop(self, adapter: str) -> None:
        self.dropped.append(bytes.fromhex(adapter).decode())
        self.there.discard(adapter)

    def pin(self, adapter: str) -> None:
        self.pinned.append(bytes.fromhex(adapter).decode())

    def begin_step(self, running: Collection[str]) -> None:
        self.running.append(set(running))

    def want(self, adapter: str) -> bool | RowFailure:
        if adapter in self.lost:
            return RowFailure(FailureCode.ENGINE_ERROR, self.lost[adapter])
        if adapter not in self.there:
            self.coming.add(adapter)
        return adapter in self.there

    def wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        has_some = bool(self.coming - self.there)
        if self.arrives_by_itself:
            self.arrive()
        return has_some

    def arrive(self) -> None:
        self.there |= self.coming


@pytest.fixture
def make(make_config: Callable[..., EngineConfig]) -> Callable[..., Made]:
    """An engine with slots, whose steps' adapters are kept."""

    def make(**engine_args: Any) -> Made:
        steps: list[SchedulerOutput] = []
        config = make_config(**{"enable_lora": True, **engine_args})
        shelf = Shelf()
        executor = CountingExecutor(config, before_step=steps.append, adapters=shelf)
        core = EngineCore(config, executor)
        client = InProcessClient(core, ByteTokenizer())
        return Made(core=core, client=client, shelf=shelf, steps=steps)

    return make


def run(core: EngineCore, most: int = 200) -> list[SampleOutput]:
    outputs = []
    for _ in range(most):
        if not core.has_work:
            return outputs
        outputs += core.step()
    raise AssertionError("the engine does not end")


def adapters(step: SchedulerOutput) -> list[str | None]:
    return [None if each.adapter is None else bytes.fromhex(each.adapter).decode() for each in step.sequences]


def test_names_of_equal_content_are_one_adapter_and_share_blocks(make: Any, make_request: Any) -> None:
    made = make(max_loras=1)
    for name, path in (("a", "p"), ("b", "p"), ("c", "q")):
        made.client.load_adapter(name, path)
    hits = []
    for number, name in enumerate(["a", "b", "c", None, "b", "c", None]):
        made.core.add(make_request(str(number), range(40), max_tokens=1, adapter=name))
        hits += [output.num_cached_tokens for output in run(made.core)]
    assert hits == [0, 32, 0, 0, 32, 32, 32]
    assert [adapters(step) for step in made.steps] == [["p"], ["p"], ["q"], [None], ["p"], ["q"], [None]]


def test_another_adapter_under_a_name_is_for_those_that_come_after(make: Any, make_request: Any) -> None:
    made = make()
    made.client.load_adapter("a", "old")
    made.core.add(make_request("before", [1], max_tokens=6, adapter="a"))
    made.shelf.there |= {b"old".hex(), b"new".hex()}
    made.core.step()
    made.client.load_adapter("a", "new")
    assert made.shelf.dropped == [], "somebody computes with it"
    made.core.add(make_request("after", [1], max_tokens=2, adapter="a"))
    run(made.core)
    assert [adapters(step) for step in made.steps[:2]] == [["old"], ["old", "new"]]
    assert made.shelf.dropped == ["old"]
    (known,) = made.client.adapters()
    assert (known.name, known.path) == ("a", "new")


def test_what_is_unloaded_serves_those_in_flight_and_no_others(
    make: Any, make_request: Any, joined: Any
) -> None:
    made = make()
    made.client.load_adapter("a", "p")
    made.client.load_adapter("twin", "p")
    made.core.add(make_request("first", [1], max_tokens=4, adapter="a"))
    made.core.step()
    assert made.client.unload_adapter("a") is True
    assert made.client.unload_adapter("a") is False
    made.core.add(make_request("late", [1], max_tokens=4, adapter="a"))
    ends = joined(run(made.core))
    assert ends["first", 0].finish_reason == "length"
    assert ends["late", 0].error.code is FailureCode.UNKNOWN_ADAPTER
    assert "'a' is not loaded" in ends["late", 0].error.message and "twin" in ends["late", 0].error.message
    assert made.shelf.dropped == [], "it has another name"
    made.client.unload_adapter("twin")
    assert made.shelf.dropped == ["p"]


def test_a_name_that_is_nearly_one_is_answered_with_it(make: Any, make_request: Any, joined: Any) -> None:
    made = make()
    made.client.load_adapter("summaries", "p")
    made.core.add(make_request("a", [1], adapter="sumaries"))
    assert "did you mean 'summaries'?" in joined(run(made.core))["a", 0].error.message


def test_an_engine_without_slots_says_what_to_set(make_client: Any, make_request: Any, joined: Any) -> None:
    core = make_client().core
    core.add(make_request("a", [1], adapter="x"))
    error = joined(run(core))["a", 0].error
    assert error.code is FailureCode.INVALID_PARAMETER and "set enable_lora: true" in error.message
    with pytest.raises(ConfigError, match=r"adapter 'x' \(p\): .*set enable_lora: true"):
        core.load_adapter("x", "p")
    assert core.adapters() == [] and not core.unload_adapter("x") and not core.pin_adapter("x")


def test_others_run_while_an_adapter_is_on_its_way(make: Any, make_request: Any, joined: Any) -> None:
    made = make()
    made.shelf.arrives_by_itself = False
    made.client.load_adapter("slow", "p")
    made.core.add(make_request("waits", [1], max_tokens=2, adapter="slow"))
    made.core.add(make_request("runs", [1], max_tokens=5))
    outputs = []
    for _ in range(3):
        outputs += made.core.step()
    assert [adapters(step) for step in made.steps] == [[None]] * 3
    made.shelf.arrive()
    ends = joined([*outputs, *run(made.core)])
    assert adapters(made.steps[3])[-1] == "p"
    assert {ends[name, 0].finish_reason for name in ("waits", "runs")} == {"length"}
    assert made.core.stats().choices["await_adapter"] >= 3


def test_an_engine_that_only_waits_for_an_adapter_gives_nobody_up(
    make: Any, make_request: Any, joined: Any
) -> None:
    made = make()
    made.shelf.arrives_by_itself = False
    made.client.load_adapter("slow", "p")
    made.core.add(make_request("a", [1], max_tokens=2, adapter="slow"))
    for _ in range(20):
        assert made.core.step() == []
    assert made.shelf.num_waits == 20 and made.core.has_work
    made.shelf.arrive()
    assert joined(run(made.core))["a", 0].finish_reason == "length"


def test_an_adapter_that_is_lost_fails_its_rows_and_no_others(
    make: Any, make_request: Any, joined: Any
) -> None:
    made = make(max_loras=1)
    for name in ("good", "bad"):
        made.client.load_adapter(name, name)
    made.shelf.lost[b"bad".hex()] = "adapter 'bad' cannot be read any more: gone"
    for number, name in enumerate(["bad", "good", "bad", None, "bad"]):
        made.core.add(make_request(str(number), [1], max_tokens=3, adapter=name))
    ends = joined(run(made.core))
    for number in (0, 2, 4):
        assert "'bad' cannot be read" in ends[str(number), 0].error.message
    assert ends["1", 0].finish_reason == ends["3", 0].finish_reason == "length"


def test_no_more_adapters_run_at_once_than_there_are_slots(make: Any, make_request: Any) -> None:
    made = make(max_loras=2, max_num_seqs=8)
    for number in range(5):
        made.client.load_adapter(str(number), str(number))
    for number in range(20):
        made.core.add(make_request(f"r{number}", [number], max_tokens=3, adapter=str(number % 5)))
    run(made.core, most=400)
    assert {len(running) for running in made.shelf.running} <= {0, 1, 2}
    assert all(len(set(adapters(step)) - {None}) <= 2 for step in made.steps)


def test_pins_are_by_name(make: Any) -> None:
    made = make()
    made.client.load_adapter("a", "p")
    assert made.client.pin_adapter("a") is True and made.client.pin_adapter("b") is False
    assert made.shelf.pinned == ["p"]


def test_what_is_odd_about_an_adapter_is_logged(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = make()
    with caplog.at_level("WARNING", "batchgen"):
        made.client.load_adapter("a", "p")
    assert "adapter a (p): odd" in caplog.text
    with pytest.raises(ConfigError, match="adapter 'b': broken"):
        made.client.load_adapter("b", "broken")
    assert [info.name for info in made.client.adapters()] == ["a"]


def test_preempted_rows_come_back_with_their_adapter(
    make: Any, make_request: Any, joined: Any, expected_tokens: Any
) -> None:
    made = make(num_gpu_blocks_override=6, max_num_seqs=4)
    made.client.load_adapter("a", "p")
    requests = [
        make_request(str(number), range(10), max_tokens=40, adapter="a" if number % 2 else None)
        for number in range(4)
    ]
    for request in requests:
        made.core.add(request)
    ends = joined(run(made.core, most=600))
    assert made.core.stats().num_preemptions
    for request in requests:
        tokens = ends[request.request_id, 0].token_ids
        assert len(tokens) == 160 and list(memoryview(tokens).cast("i")) == expected_tokens(request)
    for step in made.steps:
        for sequence in step.sequences:
            assert sequence.adapter in (None, b"p".hex())
