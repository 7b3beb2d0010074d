"""AsyncLLM over real engines: EchoEngine, and the core with a CountingExecutor, here and in a child."""

import asyncio
import gc
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchgen import AsyncLLM, RequestOutputKind, SamplingParams
from batchgen.api.output_stream import OutputStream, joined
from batchgen.api.prompt_forms import read_prompt
from batchgen.counting import CountingExecutor
from batchgen.engine.child_client import ChildClient
from batchgen.engine.core import EngineCore
from batchgen.engine.in_process import InProcessClient
from batchgen.errors import ConfigError, EngineError
from batchgen.outputs import CompletionOutput, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=5)
LONG = SamplingParams(temperature=0, max_tokens=200)


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AsyncLLM]]:
    """An AsyncLLM whose engine counts instead of running a model, in this process or in a child."""
    made: list[AsyncLLM] = []

    def make(loader: str | None = None, before_step: Any = None, **engine_args: Any) -> AsyncLLM:
        def start(config: Any, tokenizer: Any, in_process: bool, on_loading: Any) -> Any:
            if loader is not None:
                return ChildClient(config, tokenizer, executor=f"batchgen.counting:{loader}")
            executor = CountingExecutor(config, vocab_size=258, before_step=before_step)
            return InProcessClient(EngineCore(config, executor), tokenizer)

        monkeypatch.setattr("batchgen.api.caller.start_engine", start)
        made.append(AsyncLLM("echo:", **engine_args))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


async def read(
    llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, *args: Any
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, *args)]


def test_outputs_grow_until_the_last_is_finished(make_llm: Any) -> None:
    outputs = asyncio.run(read(make_llm("load_counting"), [1, 2, 3]))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    final = outputs[-1].outputs[0].token_ids
    assert len(final) == 5
    for output in outputs:
        ids = output.outputs[0].token_ids
        assert ids == final[: len(ids)]


def test_each_kind_of_output(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm(before_step=lambda step: time.sleep(0.002))
        whole = (await read(llm, [1, 2, 3], SamplingParams(temperature=0, max_tokens=9)))[-1].outputs[0]
        kinds = {
            kind: SamplingParams(temperature=0, max_tokens=9, output_kind=kind) for kind in RequestOutputKind
        }
        deltas = await read(llm, [1, 2, 3], kinds[RequestOutputKind.DELTA])
        ids = [token for output in deltas for sample in output.outputs for token in sample.token_ids]
        assert ids == whole.token_ids
        assert "".join(sample.text for output in deltas for sample in output.outputs) == whole.text
        (only,) = await read(llm, [1, 2, 3], kinds[RequestOutputKind.FINAL_ONLY])
        assert only.outputs[0].token_ids == whole.token_ids

    asyncio.run(main())


def test_many_at_once_are_served_together(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm("load_counting")
        tasks = [asyncio.create_task(read(llm, [number, 7], GREEDY, f"r{number}")) for number in range(100)]
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert outputs[-1].request_id == f"r{number}"
            assert outputs[-1].prompt_token_ids == [number, 7]
            assert len(outputs[-1].outputs[0].token_ids) == 5
        assert llm.in_flight() == []
        assert (await llm.get_metrics()).num_requests_finished == 100

    asyncio.run(main())


def test_the_event_loop_is_never_kept_waiting(make_llm: Any) -> None:  # BG-37
    async def main() -> float:
        llm = make_llm(before_step=lambda step: time.sleep(0.05))
        task = asyncio.create_task(read(llm, "x" * 100, SamplingParams(temperature=0, max_tokens=10)))
        worst = 0.0
        while not task.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - before)
        return worst

    assert asyncio.run(main()) < 0.04, "a step takes 50 ms and must not be felt"


def test_starting_does_not_keep_the_event_loop_waiting() -> None:
    async def main() -> None:
        ticks = 0
        task = asyncio.create_task(AsyncLLM.start("echo:?load_s=0.2"))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        assert ticks > 5
        async with await task as llm:
            assert (await read(llm, "hello"))[-1].outputs[0].text == "hello"

    asyncio.run(main())


def test_abort_ends_the_generator_with_what_there_is(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm("load_slow")
        outputs = []
        async for output in llm.generate([1], LONG, "a"):
            outputs.append(output)
            if len(output.outputs[0].token_ids) >= 2 and not output.finished:
                await llm.abort("a")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert 2 <= len(outputs[-1].outputs[0].token_ids) < 50
        await llm.abort(["a", "unknown"])
        assert llm.in_flight() == []
        again = await read(llm, [1], GREEDY, "a")
        assert again[-1].outputs[0].finish_reason == "length", "the id may be used again"

    asyncio.run(main())


@pytest.mark.parametrize("how", ["break", "close", "cancel"])
def test_leaving_a_generator_aborts_its_request(make_llm: Any, how: str) -> None:
    async def main() -> None:
        llm = make_llm("load_slow")
        if how == "cancel":
            task = asyncio.create_task(read(llm, [1], LONG))
            await asyncio.sleep(0.1)
            assert len(llm.in_flight()) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            generator = llm.generate([1], LONG)
            async for _ in generator:
                break
            if how == "close":
                await generator.aclose()
            del generator
            gc.collect()
        await until_idle(llm)
        assert (await llm.get_metrics()).generation_tokens < 100

    asyncio.run(main())


async def until_idle(llm: AsyncLLM) -> None:
    """Wait until nothing is in flight and every block is free."""
    for _ in range(500):
        stats = await llm.get_metrics()
        if not llm.in_flight() and not stats.num_running and not stats.num_waiting:
            assert stats.num_used_blocks == 0
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still in flight: {llm.in_flight()}, {stats}")


@pytest.mark.parametrize("loader", [None, "load_counting"])
def test_an_abort_storm_leaves_nothing_behind(make_llm: Any, loader: str | None) -> None:
    async def one(llm: AsyncLLM, number: int, rng: random.Random) -> str:
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(1, 40), n=1, output_kind=rng.choice(list(RequestOutputKind))
        )
        fate = rng.choice(["read", "abort", "break", "cancel"])
        task = asyncio.create_task(read(llm, [number % 100, 5, 6], params, f"r{number}"))
        await asyncio.sleep(rng.random() * 0.02)
        if fate == "abort":
            await llm.abort(f"r{number}")
        elif fate in ("break", "cancel"):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return fate
        outputs = await task
        assert outputs[-1].finished
        reason = outputs[-1].outputs[0].finish_reason
        assert reason == "length" or (fate == "abort" and reason == "abort")
        return fate

    async def main() -> None:
        llm = make_llm(loader, num_gpu_blocks_override=24, max_num_seqs=6)
        rng = random.Random(3)
        fates = await asyncio.gather(*(one(llm, number, rng) for number in range(300)))
        assert set(fates) == {"read", "abort", "break", "cancel"}
        await until_idle(llm)
        assert len((await read(llm, [9], GREEDY, "r1"))[-1].outputs[0].token_ids) == 5

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited, say
        asyncio.run(main())


def test_a_dying_engine_is_an_error_for_everyone_who_waits_and_its_requests_are_known(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm("load_slow")
        tasks = [asyncio.create_task(read(llm, [number], LONG, f"r{number}")) for number in range(5)]
        while len(llm.in_flight()) < 5:
            await asyncio.sleep(0.01)
        os.kill(llm.info.pid, signal.SIGKILL)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, EngineError) and "SIGKILL" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == 5
        assert sorted(llm.in_flight()) == [f"r{number}" for number in range(5)]
        with pytest.raises(EngineError, match="SIGKILL"):
            await read(llm, [1])
        for call in (llm.get_metrics(), llm.abort("r1"), llm.sleep(), llm.reset_prefix_cache()):
            with pytest.raises(EngineError, match="SIGKILL"):
                await call

    asyncio.run(main())


def test_an_engine_that_died_unnoticed_shows_at_the_next_request(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm("load_counting")
        os.kill(llm.info.pid, signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(EngineError, match="SIGKILL"):
            await read(llm, [1])

    asyncio.run(main())


def test_an_exception_in_a_step_reaches_those_who_wait(make_llm: Any) -> None:
    def fail(step: Any) -> None:
        if step.step == 2:
            raise RuntimeError("the third step is one too many")

    llm = make_llm(before_step=fail)
    with pytest.raises(EngineError, match="the third step is one too many"):
        asyncio.run(read(llm, [1]))


def test_an_exception_in_what_was_asked_reaches_who_asked(make_llm: Any, monkeypatch: Any) -> None:
    def fail(*args: object) -> None:
        raise OSError("the weights are gone")

    async def main() -> None:
        llm = make_llm()
        monkeypatch.setattr(InProcessClient, "sleep", fail)
        with pytest.raises(EngineError, match="the weights are gone"):
            await asyncio.wait_for(llm.sleep(), 10)
        with pytest.raises(EngineError, match="the weights are gone"):
            await asyncio.wait_for(read(llm, [1]), 10)

    asyncio.run(main())


def test_priorities_are_whole_numbers(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm(scheduling_policy="priority")
        for priority in ("1", float("nan"), True):
            with pytest.raises(ConfigError, match="priority must be a whole number"):
                async for _ in llm.generate([1], GREEDY, priority=priority):
                    pass
        async for output in llm.generate([1], GREEDY, priority=-(10**30)):
            assert output.error is None

    asyncio.run(main())


def test_a_salt_is_any_text(make_llm: Any) -> None:
    llm = make_llm("load_counting")
    (*_, output) = asyncio.run(read(llm, {"prompt_token_ids": [1], "cache_salt": "\ud83d"}))
    assert output.finished and output.error is None


def test_shutdown_ends_those_who_wait(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm("load_slow")
        task = asyncio.create_task(read(llm, [1], LONG))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineError, match="was shut down"):
            await task
        with pytest.raises(EngineError, match="was shut down"):
            await read(llm, [1])
        llm.shutdown()

    asyncio.run(main())


def test_an_llm_that_nobody_holds_takes_its_engine_along(make_llm: Any, monkeypatch: Any) -> None:
    async def main() -> int:
        clients: list[ChildClient] = []

        def start(config: Any, tokenizer: Any, in_process: bool, on_loading: Any) -> Any:
            clients.append(ChildClient(config, tokenizer, executor="batchgen.counting:load_counting"))
            return clients[-1]

        monkeypatch.setattr("batchgen.api.caller.start_engine", start)
        llm = AsyncLLM("echo:")
        await read(llm, [1])
        del llm
        gc.collect()
        process = clients[0]._process
        deadline = time.monotonic() + 20
        while not process.has_ended and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return process.has_ended

    assert asyncio.run(main())


def test_several_loops_in_several_threads_share_one_engine(make_llm: Any) -> None:
    llm = make_llm("load_counting")
    found: dict[int, list[int]] = {}

    async def main(number: int) -> None:
        results = await asyncio.gather(*(read(llm, [number, index]) for index in range(10)))
        found[number] = [len(outputs[-1].outputs[0].token_ids) for outputs in results]

    threads = [threading.Thread(target=lambda n=n: asyncio.run(main(n)), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [5] * 10 for number in range(4)}


def test_a_loop_closed_with_requests_in_flight_leaves_nothing_behind(make_llm: Any) -> None:
    llm = make_llm("load_slow")
    loop = asyncio.new_event_loop()
    stream = OutputStream("lost", LONG, loop)
    llm._thread.add(llm._caller.request(read_prompt([1]), LONG, request_id="lost", streams=True), stream)
    loop.close()
    asyncio.run(until_idle(llm))


def test_what_is_wrong_is_refused_and_disturbs_nobody(make_llm: Any) -> None:
    async def main() -> None:
        llm = make_llm("load_slow")
        task = asyncio.create_task(read(llm, [1], SamplingParams(temperature=0, max_tokens=15), "a"))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="'a' is already in flight"):
            await read(llm, [1], GREEDY, "a")
        for prompt, params, options, words in [
            (None, GREEDY, {}, "prompt 0 must be"),
            ([1], {"n": 1}, {}, "sampling_params must be SamplingParams"),
            ([1], SamplingParams(logprobs=21), {}, "'logprobs' is 21"),
            ([1], GREEDY, {"priority": 1}, "priority has no effect under scheduling_policy: fcfs"),
            ([1], GREEDY, {"request_id": ["b"]}, r"request id must be a non-empty text; got \['b'\]"),
        ]:
            with pytest.raises(ConfigError, match=words):
                async for _ in llm.generate(prompt, params, **options):
                    pass
        for ids in (5, [["b"]], ""):
            with pytest.raises(ConfigError, match="request id must be a non-empty text"):
                await llm.abort(ids)
        empty = await read(llm, [])
        assert empty[-1].error is not None and empty[-1].error.code == "empty_prompt"
        assert len((await task)[-1].outputs[0].token_ids) == 15

    asyncio.run(main())


def test_chat_renders_one_conversation(make_llm: Any) -> None:
    async def main() -> None:
        async with AsyncLLM("echo:") as llm:
            generator = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
            (output,) = [output async for output in generator]
            assert output.prompt == "[user]\nhi\n\n[assistant]\n"
            with pytest.raises(ConfigError, match="one conversation at a time; got 0"):
                async for _ in llm.chat([], GREEDY):
                    pass

    asyncio.run(main())


def test_sleep_and_wake_up(make_llm: Any) -> None:
    async def main() -> None:
        async with AsyncLLM("echo:") as llm:
            await llm.sleep(1)
            assert await llm.is_sleeping()
            with pytest.raises(EngineError, match="sleeps"):
                await read(llm, "x")
            await llm.wake_up()
            await llm.wake_up(["weights", "kv_cache"])
            assert (await read(llm, "x"))[-1].finished
            assert await llm.reset_prefix_cache()
            with pytest.raises(ConfigError, match="level must be 1 or 2"):
                await llm.sleep(3)
            with pytest.raises(ConfigError, match="wakes the engine whole"):
                await llm.wake_up(["weights"])

    asyncio.run(main())


def test_deltas_that_nobody_read_are_joined() -> None:
    def delta(text: str, reason: str | None = None, index: int = 0) -> RequestOutput:
        logprobs = [{ord(char): None} for char in text]
        sample = CompletionOutput(
            index, text, [ord(c) for c in text], logprobs=logprobs, finish_reason=reason
        )
        return RequestOutput("a", None, [1], [sample], finished=reason is not None)

    both = joined(joined(delta("ab"), delta("c", index=1)), delta("d", "stop"))
    assert [(each.index, each.text, each.finish_reason) for each in both.outputs] == [
        (0, "abd", "stop"),
        (1, "c", None),
    ]
    assert [list(position) for position in both.outputs[0].logprobs] == [[97], [98], [100]]
    assert both.finished
