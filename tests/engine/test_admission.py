"""Who is let in: order, room, adapters, delays, chunks, and who may overtake whom."""

from collections.abc import Callable

import pytest

from batchgen.engine.messages import EngineRequest, Limits
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import SchedulerOutput, StepResult

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., EngineRequest]
Execute = Callable[[SchedulerOutput], StepResult]


def running(scheduler: Scheduler) -> list[str]:
    return [group.request.request_id for group in scheduler.table.running]


def waiting(scheduler: Scheduler) -> list[str]:
    return [group.request.request_id for group in scheduler.table.waiting]


def order_of_ends(scheduler: Scheduler, execute: Execute) -> list[str]:
    ends: list[str] = []
    for _ in range(3000):
        if not scheduler.has_work:
            return ends
        step = scheduler.schedule()
        outputs = scheduler.take_outputs() if step.is_empty else scheduler.update(execute(step))
        ends += [each.request_id for each in outputs if each.finish_reason]
    raise AssertionError(f"{list(scheduler.table.requests)} never end")


@pytest.mark.parametrize(("window", "admitted"), [(0, "a"), (1, "acd"), (2, "acdf")])
def test_those_behind_a_group_without_room_are_tried_within_a_window(
    make_scheduler: MakeScheduler, make_request: MakeRequest, window: int, admitted: str
) -> None:
    scheduler = make_scheduler(
        num_blocks=6, enable_prefix_caching=False, skip_window=window, max_num_batched_tokens=200
    )
    for name, length in (("a", 40), ("b", 60), ("c", 10), ("d", 16), ("e", 50), ("f", 5)):
        scheduler.add(make_request(name, [1] * length))
    # b is the first that is passed over, e the second.
    scheduler.schedule()
    assert running(scheduler) == list(admitted)


def test_nobody_is_overtaken_more_often_than_the_bound(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False, most_overtaken=3)
    scheduler.add(make_request("long", [1] * 30, max_tokens=25))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.add(make_request("big", [2] * 60, max_tokens=1))
    for number in range(20):
        scheduler.add(make_request(f"small {number}", [3] * 8, max_tokens=2))
    ends = order_of_ends(scheduler, execute)
    assert ends.index("big") == 4, "three small ones and the long one go before it"
    assert set(ends[:4]) == {"long", "small 0", "small 1", "small 2"}


def test_a_stream_of_small_requests_starves_nobody(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(num_blocks=5, enable_prefix_caching=False)
    scheduler.add(make_request("small", [3] * 8, max_tokens=4))
    scheduler.add(make_request("big", [2] * 70, max_tokens=4))
    ends: list[str] = []
    for number in range(400):
        scheduler.add(make_request(f"small {number}", [3] * 8, max_tokens=4))
        outputs = scheduler.update(execute(scheduler.schedule()))
        ends += [each.request_id for each in outputs if each.finish_reason]
        if "big" in ends:
            break
    assert ends.index("big") <= 32 + 5


def test_adapters_without_a_slot_keep_their_place_while_others_pass(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(max_loras=1)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None), ("e", "y")):
        scheduler.add(make_request(name, [1], adapter=adapter, max_tokens=3))
    step = scheduler.schedule()
    assert [each.adapter for each in step.sequences] == ["x", "x", None]
    assert running(scheduler) == ["a", "c", "d"]
    assert waiting(scheduler) == ["b", "e"]
    assert scheduler.counters.choices["skip_adapter"] == 2
    scheduler.update(execute(step))
    assert order_of_ends(scheduler, execute) == ["a", "c", "d", "b", "e"]


def test_a_group_that_waits_for_an_adapter_slot_is_not_passed_for_ever(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(max_loras=1, most_overtaken=4, max_num_seqs=2)
    scheduler.add(make_request("x", [1], adapter="x", max_tokens=3))
    scheduler.add(make_request("y", [1], adapter="y", max_tokens=2))
    for number in range(30):
        scheduler.add(make_request(f"x {number}", [1], adapter="x", max_tokens=2))
    assert order_of_ends(scheduler, execute).index("y") == 1 + 4


def test_several_slots_hold_several_adapters(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_loras=2)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "y")):
        scheduler.add(make_request(name, [1], adapter=adapter))
    scheduler.schedule()
    assert running(scheduler) == ["a", "b", "d"]


def test_new_prompts_wait_while_others_run_for_a_multiple_of_a_prompt_step(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    now = [100.0]
    scheduler = make_scheduler(delay_factor=2.0, clock=lambda: now[0])

    def step(seconds: float) -> None:
        scheduler.update(execute(scheduler.schedule()))
        now[0] += seconds

    scheduler.add(make_request("a", [1] * 9, max_tokens=50))
    step(0.5)  # nothing runs, so a is let in at once; its step takes half a second
    scheduler.add(make_request("b", [1] * 9, max_tokens=50))
    step(0.6)
    assert waiting(scheduler) == ["b"]
    scheduler.add(make_request("c", [1] * 9, max_tokens=50))
    step(0.4)
    assert waiting(scheduler) == ["b", "c"], "b has waited 0.6 s, not more than 2 x 0.5 s"
    step(0.1)
    assert waiting(scheduler) == ["b", "c"], "1.0 s is not more than that"
    step(0.1)
    assert running(scheduler) == ["a", "b", "c"], "the oldest lets in the others too"


def test_without_anybody_running_no_prompt_is_delayed(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    now = [0.0]
    scheduler = make_scheduler(delay_factor=1e9, clock=lambda: now[0])
    for name in "ab":
        scheduler.add(make_request(name, [1], max_tokens=1))
        step = scheduler.schedule()
        assert len(step.sequences) == 1
        scheduler.update(execute(step))


def test_one_long_prompt_leaves_room_for_others_and_takes_all_when_alone(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=10, enable_prefix_caching=False)
    scheduler.add(make_request("long", [1] * 200))
    assert scheduler.schedule().num_tokens == 64
    scheduler.add(make_request("other", [1] * 25, max_tokens=1))
    sizes = []
    for _ in range(4):
        step = scheduler.schedule()
        sizes.append([len(each.token_ids) for each in step.sequences])
        scheduler.update(execute(step))
    assert sizes == [[10, 10], [10, 10], [10, 5], [64]]


def test_without_chunks_a_prompt_is_computed_whole_or_waits(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(
        enable_chunked_prefill=False, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    for name, length in (("a", 30), ("b", 40), ("c", 34), ("d", 64)):
        scheduler.add(make_request(name, [1] * length, max_tokens=4))
    sizes = []
    while scheduler.has_work:
        step = scheduler.schedule()
        sizes.append([len(each.token_ids) for each in step.sequences])
        scheduler.update(execute(step))
    # c passes b, which does not fit beside a; d needs a step of its own.
    assert sizes[:2] == [[30, 34], [1, 1, 40]]
    assert [64] in sizes
    assert all(count in (1, 30, 34, 40, 64) for step_sizes in sizes for count in step_sizes)


def test_without_chunks_a_lowered_budget_still_lets_long_prompts_through(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False)
    scheduler.add(make_request("a", [1] * 60, max_tokens=4))
    scheduler.set_limits(Limits(max_num_batched_tokens=20))
    assert order_of_ends(scheduler, execute) == ["a"]


def test_samples_that_find_no_room_wait_together(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    scheduler.add(make_request("a", [1] * 20, max_tokens=2))
    scheduler.add(make_request("fan", [2] * 20, n=8, temperature=1.0, max_tokens=3))
    scheduler.add(make_request("b", [1] * 20, max_tokens=2))
    step = scheduler.schedule()
    assert [len(each.samples) for each in step.sequences] == [1, 3]
    assert [(group.sequences[0].index, group.pending) for group in scheduler.table.waiting] == [
        (3, [4, 5, 6, 7]),
        (0, []),
    ]
    scheduler.update(execute(step))
    scheduler.update(execute(scheduler.schedule()))
    step = scheduler.schedule()
    # A seat is free: one more of the fan, of whose prompt 16 tokens are cached.
    assert [len(each.token_ids) for each in step.sequences] == [1, 1, 1, 4]
    scheduler.update(execute(step))
    assert order_of_ends(scheduler, execute)[-1] == "b"


def test_limits_count_every_sequence_and_token_once(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(max_num_seqs=5, max_num_batched_tokens=23)
    for number in range(9):
        scheduler.add(
            make_request(str(number), [number] * 4, n=1 + number % 2, temperature=1.0, max_tokens=9)
        )
    most_seqs = most_tokens = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        most_seqs = max(most_seqs, sum(group.width for group in scheduler.table.running))
        most_tokens = max(most_tokens, step.num_tokens)
        scheduler.update(execute(step))
    assert most_seqs == 5
    assert most_tokens == 4 + 4 + 4 + 4


def test_a_group_wider_than_a_lowered_limit_is_split(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=6)
    scheduler.add(make_request("first", [1] * 40, max_tokens=40))
    scheduler.add(make_request("fan", [2] * 30, n=4, temperature=1.0, max_tokens=25))
    while not scheduler.counters.num_preemptions:
        scheduler.update(execute(scheduler.schedule()))
    scheduler.set_limits(Limits(max_num_seqs=2))
    most = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        most = max(most, sum(group.width for group in scheduler.table.running))
        scheduler.update(execute(step))
    assert most == 2
