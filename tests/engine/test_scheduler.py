import logging
from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.messages import EngineRequest, Limits, SampleOutput, unpack_ids
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scheduler_output import SchedulerOutput, StepResult
from batchgen.errors import EngineError
from batchgen.outputs import FailureCode
from batchgen.testing import CountingExecutor

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., EngineRequest]
Execute = Callable[[SchedulerOutput], StepResult]


def work(step: SchedulerOutput) -> list[tuple[int, int, int]]:
    """(sequence, first position, tokens) of each part of a step."""
    return [(each.seq_id, each.num_computed_tokens, len(each.token_ids)) for each in step.sequences]


def run_to_end(scheduler: Scheduler, execute: Execute, most_steps: int = 5000) -> list[SampleOutput]:
    outputs: list[SampleOutput] = []
    for _ in range(most_steps):
        if not scheduler.has_work:
            return outputs + scheduler.take_outputs()
        step = scheduler.schedule()
        outputs += scheduler.update(execute(step)) if step.sequences else scheduler.take_outputs()
    raise AssertionError(f"requests {list(scheduler.table.requests)} never end")


def test_prefill_chunks_and_decodes_share_one_budget(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20)
    scheduler.add(make_request("a", range(10)))
    scheduler.add(make_request("b", range(50, 80)))
    step = scheduler.schedule()
    assert work(step) == [(0, 0, 10), (1, 0, 10)]
    assert [len(each.samples) for each in step.sequences] == [1, 0]
    assert step.num_tokens == 20
    scheduler.update(execute(step))
    step = scheduler.schedule()
    assert work(step) == [(0, 10, 1), (1, 10, 19)]
    scheduler.update(execute(step))
    step = scheduler.schedule()
    assert work(step) == [(0, 11, 1), (1, 29, 1)]
    assert [each.samples[0].key for each in step.sequences] == [(0, 0, 12), (0, 0, 30)]
    assert [each.samples[0].num_generated for each in step.sequences] == [2, 0]


def test_a_sequence_whose_numbers_overflow_ends_alone_with_what_it_has(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("sick", [1, 2], max_tokens=9))
    scheduler.add(make_request("well", [3, 4], max_tokens=2))
    told = scheduler.update(execute(scheduler.schedule()))
    assert [len(unpack_ids(each.token_ids)) for each in told] == [1, 1]
    step = scheduler.schedule()
    sick, well = scheduler.update(StepResult(step.step, [None, 7]))
    assert sick.finish_reason == "error" and unpack_ids(sick.token_ids) == []
    assert sick.error is not None and sick.error.code is FailureCode.ENGINE_ERROR
    assert "token 2 are not finite" in sick.error.message
    assert well.finish_reason == "length" and well.error is None
    assert not scheduler.has_work and scheduler.blocks.pool.num_free == scheduler.blocks.num_blocks


def test_max_num_seqs_and_the_order_of_arrival_hold(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1, 2, 3], max_tokens=2))
    step = scheduler.schedule()
    assert [each.seq_id for each in step.sequences] == [0, 1]
    scheduler.update(execute(step))
    scheduler.set_limits(Limits(max_num_seqs=3))
    step = scheduler.schedule()
    assert work(step) == [(0, 3, 1), (1, 3, 1), (2, 0, 3)]
    outputs = scheduler.update(execute(step))
    assert [(each.request_id, each.finish_reason) for each in outputs if each.finish_reason] == [
        ("a", "length"),
        ("b", "length"),
    ]
    assert scheduler.schedule().finished_seq_ids == (0, 1)


def test_lower_limits_stop_nobody_who_runs(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler()
    for name in "abcd":
        scheduler.add(make_request(name, [1, 2], max_tokens=5))
    scheduler.update(execute(scheduler.schedule()))
    scheduler.set_limits(Limits(max_num_seqs=1, max_num_batched_tokens=3))
    step = scheduler.schedule()
    assert [each.seq_id for each in step.sequences] == [0, 1, 2]
    scheduler.update(execute(step))
    assert len(run_to_end(scheduler, execute)) > 0


def test_the_last_arrival_is_preempted_keeps_its_tokens_and_comes_back_first(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(num_blocks=3, enable_prefix_caching=False, skip_window=0)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name) % 50] * 14, max_tokens=6))
    scheduler.add(make_request("d", [1, 2], max_tokens=6))
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.update(execute(step))
    assert [group.sequences[0].num_tokens for group in scheduler.table.running] == [17, 17, 17]
    step = scheduler.schedule()
    # a takes c's block, then b, which needs one too, is the last itself.
    assert work(step) == [(0, 16, 1)]
    assert [group.sequences[0].seq_id for group in scheduler.table.waiting] == [1, 2, 3]
    assert scheduler.counters.num_preemptions == 2
    scheduler.update(execute(step))
    step = scheduler.schedule()
    assert work(step) == [(0, 17, 1)], "b needs two blocks now; nobody overtakes it"
    outputs = scheduler.update(execute(step)) + run_to_end(scheduler, execute)
    counts = dict.fromkeys("abcd", 0)
    for output in outputs:
        counts[output.request_id] += len(unpack_ids(output.token_ids))
    assert counts == {"a": 2, "b": 3, "c": 3, "d": 6}


def test_nobody_overtakes_without_a_window(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False, skip_window=0)
    scheduler.add(make_request("a", range(30), max_tokens=30))
    scheduler.add(make_request("b", range(16), max_tokens=30))
    for _ in range(3):
        scheduler.update(execute(scheduler.schedule()))
    scheduler.add(make_request("c", [1], max_tokens=1))
    scheduler.update(execute(scheduler.schedule()))
    assert scheduler.counters.num_preemptions == 1
    assert [each.request.request_id for each in scheduler.table.running] == ["a"]
    scheduler.update(execute(scheduler.schedule()))
    assert [each.request.request_id for each in scheduler.table.waiting] == ["b", "c"]


# BG-23
def test_a_request_that_can_never_fit_is_a_row_failure_and_others_go_on(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler(num_blocks=50, max_model_len=8192, max_num_batched_tokens=512)
    scheduler.add(make_request("short", range(20), max_tokens=4))
    scheduler.add(make_request("big", [1] * 1000, max_tokens=4))
    scheduler.add(make_request("also short", range(30), max_tokens=4))
    outputs = run_to_end(scheduler, execute)
    ends = {each.request_id: each for each in outputs if each.finish_reason}
    assert ends["short"].finish_reason == ends["also short"].finish_reason == "length"
    big = ends["big"]
    assert big.finish_reason == "error"
    assert big.error is not None
    assert big.error.code is FailureCode.NEVER_FITS
    assert "needs 63 blocks, pool has 50" in big.error.message


# BG-23, second half
def test_a_sequence_that_outgrows_the_pool_alone_keeps_its_tokens(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute, joined: Any
) -> None:
    scheduler = make_scheduler(num_blocks=50, max_model_len=8192, max_num_batched_tokens=512)
    scheduler.add(make_request("growing", [1] * 700, max_tokens=400))
    scheduler.add(make_request("short", range(20), max_tokens=4))
    ends = joined(run_to_end(scheduler, execute))
    growing = ends["growing", 0]
    assert growing.finish_reason == "error"
    assert growing.error.code is FailureCode.KV_CAPACITY
    assert "needs 51 blocks, pool has 50" in growing.error.message
    assert (
        len(unpack_ids(growing.token_ids)) == 101
    )  # 800 in the blocks, and the one drawn from the last of them
    assert ends["short", 0].finish_reason == "length"
    assert scheduler.counters.num_preemptions <= 1
    assert scheduler.blocks.pool.num_free == 50


# BG-21
def test_prompt_lengths_around_max_model_len(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute, joined: Any
) -> None:
    scheduler = make_scheduler(max_model_len=64)
    lengths = [10, 63, 64, 65, 500, 10]
    for row, length in enumerate(lengths):
        scheduler.add(make_request(str(row), [1] * length, max_tokens=8))
    ends = joined(run_to_end(scheduler, execute))
    found = [(ends[str(row), 0].finish_reason, len(ends[str(row), 0].token_ids) // 4) for row in range(6)]
    assert found == [("length", 8), ("length", 1), ("error", 0), ("error", 0), ("error", 0), ("length", 8)]
    for row in (2, 3, 4):
        error = ends[str(row), 0].error
        assert error.code is FailureCode.PROMPT_TOO_LONG
        assert str(lengths[row]) in error.message
        assert "64" in error.message


@pytest.mark.parametrize(
    ("prompt", "values", "code", "words"),
    [
        ([], {}, FailureCode.EMPTY_PROMPT, "no tokens"),
        ([1, 101], {}, FailureCode.TOKEN_OUT_OF_RANGE, "id 101 at position 1"),
        ([-1], {}, FailureCode.TOKEN_OUT_OF_RANGE, "0 to 100"),
        ([1], {"logit_bias": {100: 1.0, 101: 1.0}}, FailureCode.INVALID_PARAMETER, "101"),
    ],
)
def test_requests_that_no_memory_would_help_are_refused(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    prompt: list[int],
    values: dict[str, Any],
    code: FailureCode,
    words: str,
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("bad", prompt, n=2, **values))
    scheduler.add(make_request("good", [100], logit_bias={100: 1.0}))
    assert [each.seq_id for each in scheduler.schedule().sequences] == [2]
    outputs = scheduler.take_outputs()
    assert [(each.request_id, each.index, each.finish_reason) for each in outputs] == [
        ("bad", 0, "error"),
        ("bad", 1, "error"),
    ]
    assert all(each.error is not None and each.error.code is code for each in outputs)
    assert outputs[0].error is not None
    assert words in outputs[0].error.message
    assert list(scheduler.table.requests) == ["good"]


def test_an_id_in_flight_is_refused_and_may_be_used_again_later(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=1))
    with pytest.raises(EngineError, match="'a' is already in flight"):
        scheduler.add(make_request("a", [1]))
    run_to_end(scheduler, execute)
    scheduler.add(make_request("a", [1], max_tokens=1))
    assert len(run_to_end(scheduler, execute)) == 1


def test_requests_that_do_not_stream_speak_once(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("quiet", [1], max_tokens=5, streams=False))
    scheduler.add(make_request("loud", [1], max_tokens=5))
    outputs = run_to_end(scheduler, execute)
    assert [len(each.token_ids) // 4 for each in outputs if each.request_id == "quiet"] == [5]
    assert [len(each.token_ids) // 4 for each in outputs if each.request_id == "loud"] == [1] * 5


def test_preemptions_are_logged_at_the_first_the_51st_and_the_101st(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    execute: Execute,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    with caplog.at_level(logging.WARNING):
        for number in range(60):
            scheduler.add(make_request(f"row {number}", [1] * 14, max_tokens=40))
        run_to_end(scheduler, execute)
    assert 101 <= scheduler.counters.num_preemptions < 151
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split("preemption ")[1].split(")")[0] for message in messages] == ["1", "51", "101"]
    assert all("max_num_seqs" in message and "row " in message for message in messages)


def test_admission_leaves_a_share_free_while_others_run(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_blocks=200, max_model_len=4000, max_num_batched_tokens=8000)
    assert scheduler.blocks.watermark_blocks == 2
    for name, num_blocks in (("a", 150), ("too big now", 49), ("b", 48)):
        scheduler.add(make_request(name, [ord(name[0])] * (16 * num_blocks)))
    assert [len(each.token_ids) // 16 for each in scheduler.schedule().sequences] == [150, 48]
    alone = make_scheduler(num_blocks=200, max_model_len=4000, max_num_batched_tokens=8000)
    alone.add(make_request("all", [1] * 3200))
    assert alone.schedule().num_tokens == 3200


def test_aborted_requests_leave_no_block_and_no_word(
    make_scheduler: MakeScheduler, make_request: MakeRequest, execute: Execute, check_blocks: Any
) -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for name in "abcde":
        scheduler.add(make_request(name, [1] * 20, max_tokens=9))
    step = scheduler.schedule()
    for name in ("b", "d", "unknown"):
        scheduler.table.drop(name)
    check_blocks(scheduler)
    assert {each.request_id for each in scheduler.update(execute(step))} == {"a", "c"}
    check_blocks(scheduler)
    assert {each.request_id for each in run_to_end(scheduler, execute)} == {"a", "c", "e"}
    assert scheduler.blocks.pool.num_free == 64
    assert scheduler.counters.num_requests_finished == 3


def test_a_refusal_not_told_yet_is_dropped_with_its_request(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("bad", []))
    scheduler.table.drop("bad")
    assert scheduler.take_outputs() == []


def test_a_step_with_the_wrong_number_of_tokens_is_an_error(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    step = scheduler.schedule()
    with pytest.raises(EngineError, match="drew 0 tokens; 1 were due"):
        scheduler.update(StepResult(step.step, []))


# BG-25
@pytest.mark.parametrize("length", [16, 32, 48])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_prompt_wholly_in_the_cache_gives_the_same_tokens(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    make_config: Any,
    joined: Any,
    length: int,
    max_tokens: int,
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    executor = CountingExecutor(make_config())
    found = []
    for number in range(3):
        scheduler.add(make_request(str(number), range(length), max_tokens=max_tokens))
        (end,) = joined(run_to_end(scheduler, executor.execute)).values()
        found.append(end.token_ids)
        assert end.num_cached_tokens == (0 if number == 0 else length - 16)
    assert found[0] == found[1] == found[2]
    assert set(scheduler.blocks.pool.ref_counts) == {0}


def test_prompts_admitted_together_share_what_the_first_of_them_computes(
    make_scheduler: MakeScheduler, make_request: MakeRequest, make_config: Any, expected_tokens: Any
) -> None:
    scheduler = make_scheduler()
    executor = CountingExecutor(make_config())
    requests = [make_request(str(number), [*range(32), number], max_tokens=4) for number in range(4)]
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule()
    assert [len(each.token_ids) for each in step.sequences] == [33, 1, 1, 1]
    outputs = scheduler.update(executor.execute(step)) + run_to_end(scheduler, executor.execute)
    for request in requests:
        tokens = [
            token
            for each in outputs
            if each.request_id == request.request_id
            for token in unpack_ids(each.token_ids)
        ]
        assert tokens == expected_tokens(request)
