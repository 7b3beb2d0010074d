"""Who runs in each step, against a simulator that shares no code with the scheduler and knows only counts."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.messages import EngineRequest, pack_ids
from batchgen.engine.policy import POLICIES
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import StepResult
from batchgen.sampling_params import SamplingParams

BLOCK = 16
MAX_LEN = 120

# What a step does: (request, first position, tokens) of everybody, and blocks swapped out and in.
Trace = list[tuple[list[tuple[int, int, int]], int, int]]


@dataclass(frozen=True)
class Ask:
    """A request of one sample, its length at the end, and the step it comes at."""

    length: int
    max_tokens: int
    comes_at: int = 0
    priority: int = 0


@dataclass(frozen=True)
class World:
    """Everything that decides who runs."""

    blocks: int
    seqs: int
    tokens: int
    host: int = 0
    has_priorities: bool = False
    window: int = 8
    bound: int = 32
    threshold: int = 0
    is_chunked: bool = True
    token_cost: float = 1.0
    block_cost: float = 1.0
    mode: str | None = None


class Simulator:
    """One token budget, blocks as counts, three sets of request numbers."""

    def __init__(self, asks: list[Ask], world: World):
        self.asks, self.world = asks, world
        self.known = [ask.length for ask in asks]
        self.done, self.held, self.host, self.passed = ([0] * len(asks) for _ in range(4))
        self.running: set[int] = set()
        self.waiting: set[int] = set()
        self.swapped: set[int] = set()

    def run(self) -> Trace:
        trace: Trace = []
        for now in range(3000):
            for number, ask in enumerate(self.asks):
                if ask.comes_at == now and size(ask.length) <= self.world.blocks:
                    self.waiting.add(number)
            self.work, self.out, self.into = [], 0, 0
            self.budget, self.has_preempted = self.world.tokens, False
            present = len(self.running | self.waiting | self.swapped)
            self.most = self.world.threshold if self.world.threshold and present > 1 else self.world.tokens
            self.evict()
            for number in sorted(self.running, key=self.order):
                self.compute(number)
            if not self.has_preempted:
                self.admit()
            for number, _, _ in self.work:
                if self.done[number] == self.known[number]:
                    self.known[number] += 1
                    ask = self.asks[number]
                    if self.known[number] == min(ask.length + ask.max_tokens, MAX_LEN):
                        self.stop(number)
            if self.work or self.out or self.into:
                trace.append((self.work, self.out, self.into))
            if not (self.running or self.waiting or self.swapped) and now > 15:
                return trace
        raise AssertionError("the simulator does not end")

    def order(self, number: int) -> tuple[int, int]:
        return self.rank(number), number

    def rank(self, number: int) -> int:
        return self.asks[number].priority if self.world.has_priorities else 0

    def free(self) -> int:
        return self.world.blocks - sum(self.held)

    def chunk(self, rest: int) -> int:
        if not self.world.is_chunked and self.budget < rest <= self.world.tokens:
            return 0
        return min(rest, self.budget, self.most)

    def stop(self, number: int) -> None:
        self.running.discard(number)
        self.held[number] = self.done[number] = 0

    def preempt(self, number: int) -> None:
        self.has_preempted = True
        blocks, world = size(self.done[number]), self.world
        swap_is_cheaper = 2 * blocks * world.block_cost < self.done[number] * world.token_cost
        wants_swap = world.mode == "swap" or (world.mode is None and swap_is_cheaper)
        if wants_swap and 0 < blocks <= world.host - sum(self.host) and not self.into:
            self.host[number], self.held[number] = blocks, 0
            self.out += blocks
            self.running.remove(number)
            self.swapped.add(number)
        else:
            self.stop(number)
            self.waiting.add(number)

    def evict(self) -> None:
        head = min(self.waiting | self.swapped, key=self.order, default=None)
        if head is None:
            return
        behind = sorted((n for n in self.running if self.rank(n) > self.rank(head)), key=self.order)[::-1]
        if behind and head in self.waiting and size(self.known[head]) > self.world.blocks:
            self.waiting.remove(head)  # it has grown too big
            return
        seats = 1 - (self.world.seqs - len(self.running))
        blocks = size(self.known[head]) - self.free()
        if seats <= 0 and blocks <= 0:
            return
        for count in range(1, len(behind) + 1):
            if count >= seats and sum(self.held[n] for n in behind[:count]) >= blocks:
                for victim in behind[: min(count, 4)]:
                    self.preempt(victim)
                if head in self.swapped and not self.out and self.fits(head):
                    self.swap_in(head)
                elif head in self.waiting and count <= 4:
                    self.let_in(head)
                return

    def fits(self, number: int) -> bool:
        return len(self.running) < self.world.seqs and size(self.known[number]) <= self.free()

    def let_in(self, number: int) -> None:
        self.waiting.discard(number)
        self.running.add(number)
        self.held[number] = size(self.known[number])
        self.passed[number] = 0

    def swap_in(self, number: int) -> None:
        self.swapped.discard(number)
        self.running.add(number)
        self.into += self.host[number]
        self.held[number], self.host[number] = self.host[number], 0
        self.passed[number] = 0

    def compute(self, number: int) -> None:
        if number not in self.running or self.budget == 0:
            return
        count = self.chunk(self.known[number] - self.done[number])
        need = max(size(self.done[number] + count) - self.held[number], 0) if count else 0
        while number in self.running and need > self.free():
            if len(self.running) == 1:
                self.stop(number)  # it has outgrown the pool
            else:
                self.preempt(max(self.running, key=self.order))
        if count and number in self.running:
            self.held[number] += need
            self.work.append((number, self.done[number], count))
            self.done[number] += count
            self.budget -= count

    def admit(self) -> None:
        passed_over: list[int] = []
        for number in sorted(self.swapped, key=self.order):
            if self.budget == 0 or len(self.running) == self.world.seqs:
                return
            if size(self.known[number]) > self.world.blocks:
                self.swapped.remove(number)
                self.host[number] = self.done[number] = 0
                self.waiting.add(number)
            elif self.fits(number):
                self.swap_in(number)
                self.compute(number)
            else:
                passed_over.append(number)
                break
        allowed = self.world.window + len(passed_over)
        for number in sorted(self.waiting, key=self.order):
            if self.budget == 0 or len(self.running) == self.world.seqs:
                return
            if any(
                self.rank(number) > self.rank(other)
                or (self.rank(number) == self.rank(other) and self.passed[other] >= self.world.bound)
                for other in passed_over
            ):
                return
            if size(self.known[number]) > self.world.blocks:
                self.waiting.remove(number)
            elif self.fits(number) and self.chunk(self.known[number]):
                self.let_in(number)
                self.compute(number)
                for other in passed_over:
                    self.passed[other] += self.rank(number) == self.rank(other)
            else:
                passed_over.append(number)
                if len(passed_over) > allowed:
                    return


def size(length: int) -> int:
    return (length + BLOCK - 1) // BLOCK


class Costs:
    """The world's costs, as the scheduler asks for them: a block is one byte."""

    def __init__(self, world: World):
        self._world = world

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self._world.token_cost

    def swap_s(self, num_bytes: int) -> float:
        return num_bytes * self._world.block_cost

    def observe(self, *step: Any) -> None:
        raise AssertionError("nobody measures here")


def schedule_all(asks: list[Ask], world: World, make_scheduler: Any, check: Any) -> tuple[Trace, Scheduler]:
    scheduler = make_scheduler(
        num_blocks=world.blocks,
        max_num_seqs=world.seqs,
        max_num_batched_tokens=world.tokens,
        max_model_len=MAX_LEN,
        enable_prefix_caching=False,
        num_cpu_blocks=world.host,
        block_bytes=1,
        costs=Costs(world),
        preemption_mode=world.mode,
        rank=POLICIES["priority" if world.has_priorities else "fcfs"],
        skip_window=world.window,
        most_overtaken=world.bound,
        long_prefill_token_threshold=world.threshold,
        enable_chunked_prefill=world.is_chunked,
    )
    trace: Trace = []
    for now in range(3000):
        for number, ask in enumerate(asks):
            if ask.comes_at == now:
                params = SamplingParams(max_tokens=ask.max_tokens, temperature=0)
                scheduler.add(
                    EngineRequest(
                        request_id=str(number),
                        prompt_token_ids=pack_ids([1] * ask.length),
                        params=params,
                        priority=ask.priority,
                    )
                )
        step = scheduler.schedule()
        check(scheduler)
        if step.is_empty:
            scheduler.take_outputs()
        else:
            work = [(each.seq_id, each.num_computed_tokens, len(each.token_ids)) for each in step.sequences]
            trace.append((work, len(step.swap_out), len(step.swap_in)))
            drawn = [7 for each in step.sequences for _ in each.samples]
            scheduler.update(StepResult(step.step, drawn))
        if not scheduler.has_work and now > 15:
            return trace, scheduler
    raise AssertionError(f"{list(scheduler.table.requests)} wait for ever")


asks = st.builds(
    Ask,
    length=st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 100]),
    max_tokens=st.sampled_from([1, 2, 15, 17, 40]),
    comes_at=st.integers(0, 12),
    priority=st.sampled_from([0, 0, 1, 2, -3]),
)
worlds = st.builds(
    World,
    blocks=st.sampled_from([2, 3, 5, 8, 14, 60]),
    seqs=st.sampled_from([1, 2, 4, 16]),
    tokens=st.sampled_from([1, 7, 16, 64, 500]),
    host=st.sampled_from([0, 2, 5, 40]),
    has_priorities=st.booleans(),
    window=st.sampled_from([0, 1, 8]),
    bound=st.sampled_from([1, 3, 32]),
    threshold=st.sampled_from([0, 0, 9]),
    is_chunked=st.booleans(),
    token_cost=st.just(1.0),
    block_cost=st.sampled_from([0.01, 4.0, 7.9, 8.0, 100.0]),
    mode=st.sampled_from([None, None, "swap", "recompute"]),
)


@settings(max_examples=150, deadline=None)
@given(stream=st.lists(asks, min_size=1, max_size=12), world=worlds)
def test_who_runs_is_what_an_independent_simulator_says(
    make_scheduler: Any, check_blocks: Any, stream: list[Ask], world: World
) -> None:
    stream = sorted(stream, key=lambda ask: ask.comes_at)
    trace, _ = schedule_all(stream, world, make_scheduler, check_blocks)
    assert trace == Simulator(stream, world).run()


@pytest.mark.parametrize(
    ("world", "choices"),
    [
        (World(blocks=8, seqs=8, tokens=64, host=40, block_cost=0.01), {"preempt_swap"}),
        (World(blocks=8, seqs=8, tokens=64, host=40, block_cost=100.0), {"preempt_recompute"}),
        # A block there and back costs a little less than its 16 tokens: only full blocks are worth it.
        (World(blocks=8, seqs=8, tokens=64, host=40, block_cost=7.9), {"preempt_swap", "preempt_recompute"}),
        (
            World(blocks=8, seqs=8, tokens=64, host=2, block_cost=0.01),
            {"preempt_swap", "preempt_recompute", "swap_pool_full"},
        ),
    ],
)
def test_the_way_of_preemption_follows_the_costs(
    make_scheduler: Any, check_blocks: Any, world: World, choices: set[str]
) -> None:
    stream = [Ask(length=10 + 3 * number, max_tokens=40) for number in range(8)]
    trace, scheduler = schedule_all(stream, world, make_scheduler, check_blocks)
    assert trace == Simulator(stream, world).run()
    assert set(scheduler.counters.choices) == choices
