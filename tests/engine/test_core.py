import gc
import logging
import threading
import time
import weakref
from typing import Any

import pytest

from batchgen.engine.messages import Feature, Limits, SampleOutput, unpack_ids
from batchgen.engine.scheduler_output import SchedulerOutput
from batchgen.engine.watchdog import Watchdog
from batchgen.errors import ConfigError
from batchgen.outputs import FailureCode


def run(core: Any) -> list[SampleOutput]:
    outputs: list[SampleOutput] = []
    while core.has_work:
        outputs += core.step()
    return outputs


def test_the_core_serves_streams_of_requests(
    make_client: Any, make_request: Any, expected_tokens: Any, joined: Any
) -> None:
    core = make_client(eos=(3, 50)).core
    requests = [make_request(str(number), [number] * 20, max_tokens=30) for number in range(20)]
    for request in requests:
        core.add(request)
    core.abort(["4", "unknown"])
    ends = joined(run(core))
    assert set(ends) == {(str(number), 0) for number in range(20) if number != 4}
    for request in requests[:4]:
        assert unpack_ids(ends[request.request_id, 0].token_ids) == expected_tokens(request, eos=(3, 50))
    core.shutdown()
    core.shutdown()


# BG-15: the ids of all sources are joined, and ignore_eos ignores them all.
def test_every_end_of_sequence_id_ends_a_sample_unless_ignored(
    make_config: Any, make_client: Any, make_request: Any, joined: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from batchgen.engine.core import EngineCore
    from batchgen.testing import CountingExecutor

    with caplog.at_level(logging.INFO):
        executor = CountingExecutor(make_config(), eos_token_ids=(2, 0))
        core = EngineCore(make_config(), executor, tokenizer_eos_ids=(7, 2))
    assert core.info.eos_token_ids == (0, 2, 7)
    assert [record.getMessage() for record in caplog.records].count("end-of-sequence ids: 0, 2, 7") == 1
    for end in (0, 2, 7):
        core.add(make_request(f"{end}", [1, 1], logit_bias={end: 100}, max_tokens=9))
        core.add(make_request(f"{end} ignored", [1, 1], logit_bias={end: 100}, max_tokens=9, ignore_eos=True))
    ends = joined(run(core))
    for end in (0, 2, 7):
        stopped, ignored = ends[f"{end}", 0], ends[f"{end} ignored", 0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
        assert unpack_ids(stopped.token_ids) == [end]
        assert ignored.finish_reason == "length"
        assert unpack_ids(ignored.token_ids) == [end] * 9


# BG-13
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("length", [3, 40])
@pytest.mark.parametrize("forced", [2, 9, 5])
def test_min_tokens_holds_back_every_stop_id_and_counts_generated_tokens_only(
    make_client: Any, make_request: Any, joined: Any, min_tokens: int, length: int, forced: int
) -> None:
    core = make_client(eos=(2, 9)).core
    values = {"max_tokens": 32, "min_tokens": min_tokens, "stop_token_ids": [5]}
    core.add(make_request("a", [1] * length, logit_bias={forced: 100}, **values))
    core.add(make_request("b", [1] * length, logit_bias={forced: 100}, ignore_eos=True, **values))
    ends = joined(run(core))
    tokens = unpack_ids(ends["a", 0].token_ids)
    assert len(tokens) == min_tokens + 1
    assert not {2, 9, 5} & set(tokens[:-1])
    assert tokens[-1] == forced
    assert ends["a", 0].finish_reason == "stop"
    assert ends["a", 0].stop_reason == (5 if forced == 5 else None)
    ignoring = unpack_ids(ends["b", 0].token_ids)
    if forced == 5:
        assert len(ignoring) == min_tokens + 1
    else:
        assert ignoring == [forced] * 32


def test_stop_ids_beyond_the_vocabulary_are_no_mask(make_client: Any, make_request: Any) -> None:
    core = make_client(eos=(2, 1000)).core
    seen: list[SchedulerOutput] = []
    execute = core.executor.execute
    core.executor.execute = lambda step: (seen.append(step), execute(step))[1]
    core.add(make_request("a", [1], stop_token_ids=[5, 101], max_tokens=2, min_tokens=1))
    run(core)
    assert seen[0].sequences[0].samples[0].stop_ids == {2, 5}


def test_what_is_not_built_is_refused_as_a_row_failure(
    make_client: Any, make_request: Any, joined: Any
) -> None:
    core = make_client().core
    core.add(make_request("b", [1], features=(Feature(0, 1, b"x"),)))
    core.add(make_request("c", [1], max_tokens=1))
    ends = joined(run(core))
    assert ends["b", 0].error.code is FailureCode.INVALID_PARAMETER
    assert "not built" in ends["b", 0].error.message
    assert ends["c", 0].finish_reason == "length"


def test_requests_with_different_salts_share_no_blocks(make_client: Any, make_request: Any) -> None:
    core = make_client().core
    hits = []
    for number, salt in enumerate([None, "a", "b", "a", None]):
        core.add(make_request(str(number), range(40), max_tokens=1, cache_salt=salt))
        hits += [output.num_cached_tokens for output in run(core)]
    assert hits == [0, 0, 0, 32, 32]


def test_paused_it_computes_nothing_and_keeps_everything(
    make_client: Any, make_request: Any, joined: Any, expected_tokens: Any
) -> None:
    core = make_client().core
    request = make_request("a", range(20), max_tokens=9)
    core.add(request)
    outputs = core.step()
    core.pause()
    assert not core.has_work
    assert core.step() == []
    assert core.stats().is_paused
    assert core.stats().num_running == 1
    core.resume()
    assert unpack_ids(joined(outputs + run(core))["a", 0].token_ids) == expected_tokens(request)


@pytest.mark.parametrize("level", [1, 2])
def test_requests_in_flight_sleep_too_and_are_computed_anew(
    make_client: Any, make_request: Any, joined: Any, expected_tokens: Any, level: int
) -> None:
    core = make_client(num_gpu_blocks_override=9, max_num_seqs=4).core
    levels: list[int] = []
    core.executor.sleep = levels.append
    requests = [
        make_request(str(number), [number] * 20, n=1 + number % 2, temperature=1.0, max_tokens=30)
        for number in range(5)
    ]
    outputs: list[SampleOutput] = []
    for request in requests:
        core.add(request)
    for _ in range(20):
        outputs += core.step()
    core.sleep(level)
    assert levels == [level]
    assert not core.has_work and core.stats().is_paused
    assert core.stats().num_used_blocks == core.stats().num_cached_blocks == 0
    assert core.step() == []
    core.wake_up()
    ends = joined(outputs + run(core))
    for request in requests:
        for index in range(request.params.n):
            assert unpack_ids(ends[request.request_id, index].token_ids) == expected_tokens(request, index)


def test_an_executor_that_cannot_sleep_leaves_the_engine_awake(make_client: Any, make_request: Any) -> None:
    core = make_client().core

    def refuse(level: int) -> None:
        raise ConfigError(f"no level {level}")

    core.executor.sleep = refuse
    core.add(make_request("a", [1], max_tokens=4))
    core.step()
    with pytest.raises(ConfigError, match="no level 3"):
        core.sleep(3)
    assert run(core)[-1].finish_reason == "length"


def test_what_the_executor_cannot_draw_is_refused_at_once(make_client: Any, make_request: Any) -> None:
    core = make_client().core
    core.executor.refusal = lambda params: "no grammar here" if params.logprobs == 3 else None
    core.add(make_request("bad", [1], n=2, temperature=1.0, logprobs=3))
    core.add(make_request("good", [1], max_tokens=1))
    bad = core.step()
    assert [each.error.code for each in bad if each.error] == [FailureCode.INVALID_PARAMETER] * 2
    assert bad[0].error.message == "no grammar here"
    assert bad[-1].finish_reason == "length"


def test_a_forced_way_of_preemption_reaches_the_scheduler(make_config: Any, make_request: Any) -> None:
    from batchgen.engine.core import EngineCore
    from batchgen.testing import CountingExecutor

    for mode in ("swap", "recompute"):
        config = make_config(num_gpu_blocks_override=5, max_num_seqs=4, preemption_mode=mode)
        core = EngineCore(config, CountingExecutor(config, num_cpu_blocks=20))
        for number in range(4):
            core.add(make_request(str(number), [number] * 14, max_tokens=20))
        seen = 0
        while core.has_work:
            core.step()
            seen = max(seen, core.stats().num_used_cpu_blocks)
        stats = core.stats()
        assert stats.num_preemptions == stats.choices[f"preempt_{mode}"] > 0
        assert stats.num_cpu_blocks == 20 and stats.num_used_cpu_blocks == 0
        assert (seen > 0) is (mode == "swap")


def test_stats_count_what_happened(make_client: Any, make_request: Any) -> None:
    core = make_client(num_gpu_blocks_override=5, max_num_seqs=4).core
    for number in range(4):
        core.add(make_request(str(number), [number] * 14, max_tokens=20))
    core.step()
    early = core.stats(with_block_map=True)
    assert (early.num_running, early.num_waiting, early.num_swapped) == (4, 0, 0)
    assert (early.num_blocks, early.num_used_blocks) == (5, 4)
    assert early.block_map is not None
    assert len(early.block_map) == 5
    run(core)
    core.set_limits(Limits(max_num_seqs=3))
    late = core.stats()
    assert late.num_used_blocks == 0
    assert late.num_cached_blocks > 0
    assert late.prompt_tokens == 4 * 14
    assert late.generation_tokens == 4 * 20
    assert late.num_requests_finished == 4
    assert late.num_preemptions == late.choices["preempt_recompute"] > 0
    assert late.prefix_cache_queries > late.prefix_cache_hits > 0
    assert late.num_steps == len(core.executor.steps)
    assert late.step_time_s > 0
    assert late.max_num_seqs == 3
    assert late.block_map is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("failing_step", [0, 1, 2, 5])
def test_after_an_interrupted_step_everything_is_computed_again(
    make_client: Any,
    make_request: Any,
    expected_tokens: Any,
    joined: Any,
    error: type[BaseException],
    failing_step: int,
) -> None:
    fuse = {"step": failing_step}

    def blow(step: SchedulerOutput) -> None:
        if step.step == fuse["step"]:
            fuse["step"] = -1
            raise error

    core = make_client(before_step=blow, max_num_batched_tokens=48).core
    requests = [
        make_request(str(number), range(40), n=1 + number % 3, temperature=1.0, seed=number, max_tokens=9)
        for number in range(4)
    ]
    for request in requests:
        core.add(request)
    outputs: list[SampleOutput] = []
    with pytest.raises(error):
        while core.has_work:
            outputs += core.step()
    assert core.stats().num_used_blocks == core.stats().num_cached_blocks == 0
    ends = joined(outputs + run(core))
    for request in requests:
        for index in range(request.params.n):
            assert unpack_ids(ends[request.request_id, index].token_ids) == expected_tokens(request, index)


def test_a_request_that_cannot_move_is_named_and_given_up(
    make_client: Any, make_request: Any, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_client(num_gpu_blocks_override=6).core
    core._blocks.pool.allocate(4)  # a leak, as no bug of ours should make
    core.add(make_request("row 17", [1] * 40, max_tokens=4))
    core.add(make_request("row 18", [1] * 4, max_tokens=4))
    ends = [output for output in run(core) if output.finish_reason]
    assert [output.request_id for output in ends] == ["row 18", "row 17"]
    assert ends[0].finish_reason == "length"
    assert ends[1].error is not None
    assert ends[1].error.code is FailureCode.ENGINE_ERROR
    assert "row 17 cannot move: it needs 3 blocks, 2 of 6 are free" in ends[1].error.message
    assert any("row 17" in record.getMessage() for record in caplog.records)


def test_a_pool_smaller_than_the_context_is_said_at_the_start(
    make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    make_client(num_gpu_blocks_override=10, max_model_len=160)
    assert not caplog.records
    make_client(num_gpu_blocks_override=10, max_model_len=161)
    assert "holds 160 tokens, fewer than max_model_len (161)" in caplog.text


def test_windows_make_a_pool_hold_more(make_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    from batchgen.engine.core import EngineCore
    from batchgen.testing import CountingExecutor

    for max_model_len in (320, 321):
        config = make_config(num_gpu_blocks_override=24, max_model_len=max_model_len)
        EngineCore(config, CountingExecutor(config, group_windows=(None, 40)))
        # 20 blocks of the full group, and the 4 that the 40 tokens before a query can touch.
        assert ("holds 320 tokens, fewer than max_model_len (321)" in caplog.text) is (max_model_len == 321)


def test_a_core_that_nobody_holds_is_freed_with_its_model(make_client: Any) -> None:
    made = make_client()
    executor = weakref.ref(made.executor)
    del made
    gc.collect()
    assert executor() is None


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be 1 or more; got 0"):
        Limits(max_num_seqs=0)


def test_the_watchdog_names_who_is_concerned_by_an_endless_step(caplog: pytest.LogCaptureFixture) -> None:
    reported = threading.Event()

    def describe() -> str:
        reported.set()
        return "3 sequences, of requests row 5"

    watchdog = Watchdog(describe, patience_s=0.05)
    time.sleep(0.2)
    assert not reported.is_set(), "nothing runs, so nothing is late"
    watchdog.begin()
    assert reported.wait(30)
    watchdog.end()
    watchdog.stop()
    deadline = time.monotonic() + 30
    while "row 5" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "one step is still computing 3 sequences, of requests row 5" in caplog.text
