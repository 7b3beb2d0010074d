"""Adapters in host memory: read in the background; the longest unused go, those in use stay."""

import gc
import threading
import time
import weakref

import pytest
import torch

from batchgen.errors import ModelError
from batchgen.lora.host_memory import HostMemory
from batchgen.lora.packed_adapter import PackedAdapter


class Files:
    """Adapters that are read when a test lets them be."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.broken: set[str] = set()
        self.evicted: list[str] = []
        self.may_read = threading.Semaphore(0)

    def packed(self, adapter: str) -> PackedAdapter:
        assert self.may_read.acquire(timeout=10)
        self.read.append(adapter)
        if adapter in self.broken:
            raise ModelError(f"{adapter} is gone")
        return PackedAdapter(table=torch.zeros(25))

    def memory(self, **limits: int) -> HostMemory:
        budget = limits.pop("budget", 0)
        made = HostMemory(self.packed, lambda adapter: 100, self.evicted.append, **{"least": 1, **limits})
        made.budget = budget
        return made


@pytest.fixture
def files() -> Files:
    return Files()


def arrive(files: Files, memory: HostMemory, *adapters: str) -> None:
    for adapter in adapters:
        memory.begin_step([])
        assert memory.want(adapter) is False
        files.may_read.release()
        deadline = time.monotonic() + 10
        while memory.want(adapter) is False and time.monotonic() < deadline:
            memory.wait(0.1)
        assert memory.want(adapter) is True


def test_an_adapter_arrives_in_the_background(files: Files) -> None:
    memory = files.memory(most=4)
    memory.begin_step([])
    started = time.monotonic()
    assert memory.want("a") is False and memory.want("a") is False
    assert time.monotonic() - started < 1.0
    assert memory.wait(0.01) is True, "it is on its way"
    files.may_read.release()
    while memory.want("a") is False:
        assert memory.wait(1.0)
    assert memory["a"].num_bytes == 100
    assert memory.wait(5.0) is False, "nothing is on its way, and nobody waits"
    assert files.read == ["a"]


def test_the_longest_unused_goes(files: Files) -> None:
    memory = files.memory(most=2)
    arrive(files, memory, "a", "b")
    memory.begin_step([])
    assert memory.want("a") is True
    memory.begin_step([])
    arrive(files, memory, "c")
    assert files.evicted == ["b"]


def test_those_that_run_or_are_wanted_or_pinned_stay(files: Files) -> None:
    memory = files.memory(most=3)
    arrive(files, memory, "a", "b", "c")
    assert memory.pin("c")
    memory.begin_step(["a"])
    assert memory.want("b") is True
    assert memory.want("d") is False
    assert files.evicted == [] and memory.wait(0.0) is False, "there is no room for it"
    # The next step wants b no longer.
    memory.begin_step(["a"])
    assert memory.want("d") is False
    assert files.evicted == ["b"]


def test_pins_leave_room_for_one(files: Files) -> None:
    memory = files.memory(most=2)
    assert memory.pin("a") and memory.pin("a") and not memory.pin("b")


def test_without_a_number_bytes_count_but_slots_are_always_filled(files: Files) -> None:
    memory = files.memory(least=2, budget=250)
    arrive(files, memory, "a", "b")
    assert files.evicted == []
    arrive(files, memory, "c")
    assert files.evicted == ["a"], "three take 300"
    tight = files.memory(least=2, budget=10)
    arrive(files, tight, "x", "y")
    assert files.evicted == ["a"]
    arrive(files, tight, "z")
    assert files.evicted == ["a", "x"]


def test_pinned_ones_beyond_the_budget_do_not_keep_others_out(files: Files) -> None:
    memory = files.memory(least=1, budget=10)
    arrive(files, memory, "a")
    assert memory.pin("a")
    arrive(files, memory, "b", "c")
    assert files.evicted == ["b"]


def test_what_cannot_be_read_is_told_and_tried_again_later(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = files.memory(most=2)
    files.broken.add("a")
    files.may_read.release()
    memory.begin_step([])
    found: bool | str = False
    while found is False:
        found = memory.want("a")
        memory.wait(0.1)
    assert found == "a is gone"
    memory.begin_step([])
    assert memory.want("a") == "a is gone" and files.read == ["a"]
    files.broken.clear()
    memory.forget_failure("a")
    arrive(files, memory, "a")


def test_one_that_is_dropped_on_its_way_does_not_arrive(files: Files) -> None:
    memory = files.memory(most=2)
    memory.begin_step([])
    assert memory.want("a") is False
    memory.drop("a")
    files.may_read.release()
    assert memory.wait(10.0)
    assert len(memory) == 0
    arrive(files, memory, "a")
    memory.drop("a")
    assert len(memory) == 0 and files.evicted == ["a"]


def test_cleared_they_are_read_again(files: Files) -> None:
    memory = files.memory(most=2)
    arrive(files, memory, "a")
    memory.clear()
    assert files.evicted == ["a"]
    arrive(files, memory, "a")
    memory.close()
    memory.close()


def test_its_thread_does_not_keep_it_alive(files: Files) -> None:
    memory = files.memory(most=2)
    arrive(files, memory, "a")
    seen = weakref.ref(memory)
    del memory
    gc.collect()
    assert seen() is None
