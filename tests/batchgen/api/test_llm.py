import asyncio
import gc
import logging
import math
import threading
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import batchgen
from batchgen import LLM, BeamSearchParams, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from batchgen.api.beams import beam_output
from batchgen.api.prompt_forms import Read
from batchgen.api.scoring import Pair, make_pairs, waves
from batchgen.api.stats_log import StatsLog, stats_line
from batchgen.counting import CountingExecutor
from batchgen.engine.core import EngineCore
from batchgen.engine.in_process import InProcessClient
from batchgen.engine.messages import EngineStats
from batchgen.errors import ConfigError, EngineError
from batchgen.testing import ByteTokenizer
from batchgen.tokenizer.chat import ChatTemplate

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def llm():
    with LLM("echo:?jitter=5&batch=4") as made:
        yield made


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_stand_in_the_order_of_the_prompts(llm) -> None:
    prompts = [f"prompt {number}" for number in range(50)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert all(
        output.finished and prompt in text
        for output, prompt, text in zip(outputs, prompts, texts(outputs), strict=True)
    )


def test_every_form_of_a_prompt(llm) -> None:
    ids = llm.get_tokenizer().encode("hello")
    forms = ("hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}, ["hello"], [ids])
    for prompt in (*forms, np.array(ids), [np.array(ids)], iter(["hello"])):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == ids
        assert "hello" in output.outputs[0].text


def test_no_prompts_are_no_outputs(llm) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_parameters_one_for_all_or_one_each(llm) -> None:
    each = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 2, 3)]
    outputs = llm.generate(["abcdef"] * 3, each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(ConfigError, match="sampling_params: 3 given for 2 prompts"):
        llm.generate(["a", "b"], each, use_tqdm=False)


def test_without_parameters_the_models_own_are_used(llm) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.generate("hello", use_tqdm=False)[0].finished


def test_seeds_make_texts_repeatable(llm) -> None:
    def draw(seed: int | None) -> str:
        return texts(llm.generate("hello", SamplingParams(seed=seed, max_tokens=64), use_tqdm=False))[0]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)  # the running number of the request


def test_chat_takes_one_conversation_or_many(llm) -> None:
    one = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(one, GREEDY, use_tqdm=False)
    assert "[user]\nhi" in output.outputs[0].text
    both = llm.chat([one, [{"role": "user", "content": "bye"}]], GREEDY, use_tqdm=False)
    assert ["hi" in texts(both)[0], "bye" in texts(both)[1]] == [True, True]


def test_a_prompt_that_cannot_be_served_is_an_output_with_an_error() -> None:
    with LLM("echo:", max_model_len=20) as llm:
        outputs = llm.generate(
            ["short", "x" * 30, ""], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    assert [output.error and output.error.code.value for output in outputs][:2] == [None, "prompt_too_long"]
    assert outputs[1].outputs == [] or outputs[1].outputs[0].finish_reason == "error"


def test_wrong_prompts_and_settings_are_refused(llm) -> None:
    with pytest.raises(
        ConfigError, match="prompt 0: unknown key 'text'; known: cache_salt, prompt, prompt_token_ids"
    ):
        llm.generate({"text": "x"}, GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="needs 'prompt' or 'prompt_token_ids'"):
        llm.generate({"prompt": None}, GREEDY, use_tqdm=False)
    for wrong in (None, 5, b"abc", ["a", None], [[1.5]], [[2**40]], {"prompt_token_ids": "abc"}):
        with pytest.raises(ConfigError, match=r"prompts? .*must be|prompt 0: token ids must be"):
            llm.generate(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="prompt 1: token ids must be whole numbers of 32 bits; got 'a'"):
        llm.generate([[1], [1, "a"]], GREEDY, use_tqdm=False)
    for wrong in (["a", "b"], [{"prompt": "a"}], [[1]]):
        with pytest.raises(ConfigError, match=r"one prompt is taken at a time, .* got a list with"):
            llm.pin_prefix(wrong)
    for wrong in ({"temperature": 0}, 5, "x", [GREEDY, None]):
        with pytest.raises(ConfigError, match="sampling_params must be SamplingParams"):
            llm.generate(["a", "b"], wrong, use_tqdm=False)
    with pytest.raises(ConfigError, match="sampling_params: 0 given for 1 prompt;"):
        llm.generate("a", [], use_tqdm=False)
    for wrong in (None, "hi", {"role": "user", "content": "x"}, [["hi"]], [None]):
        with pytest.raises(ConfigError, match="must be a list of mappings with 'role' and 'content'"):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        LLM("echo:", blok_size=16)


def test_an_interrupted_call_leaves_the_engine_clean() -> None:
    with LLM("echo:?delay_ms=5&batch=2") as llm:
        prompts = ["hello"] * 50

        class Stop(Exception):
            pass

        def stop_soon(timeout_s=None, *, real=llm._engine.poll):
            outputs = real(timeout_s)
            if outputs:
                raise Stop
            return outputs

        llm._engine.poll = stop_soon
        with pytest.raises(Stop):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        del llm._engine.poll
        assert llm._engine.in_flight() == []
        assert texts(llm.generate("again", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)) == [
            "again"
        ]


def test_works_inside_a_running_event_loop_and_in_a_thread(llm) -> None:  # BG-37
    params = SamplingParams(temperature=0, max_tokens=3)

    async def main() -> list[str]:
        ticks = asyncio.create_task(asyncio.sleep(0))
        found = texts(llm.generate(["one"], params, use_tqdm=False))
        with pytest.raises(ConfigError):
            llm.generate([None], params, use_tqdm=False)
        found += texts(llm.generate(["two"], params, use_tqdm=False))
        await ticks  # the loop goes on after all this
        return found + texts(await asyncio.to_thread(llm.generate, ["ten"], params, False))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited, say
        assert asyncio.run(main()) == ["one", "two", "ten"]
        gc.collect()
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.extend(texts(llm.generate(["two"], params, use_tqdm=False)))
    )
    thread.start()
    thread.join(timeout=60)
    assert found == ["two"]


def test_outputs_come_whole_whatever_their_kind(monkeypatch) -> None:
    def counting(config, tokenizer, in_process, on_loading):
        return InProcessClient(EngineCore(config, CountingExecutor(config)), tokenizer)

    monkeypatch.setattr("batchgen.api.caller.start_engine", counting)
    bias = {ord("a"): 100}
    with LLM("echo:") as llm:
        for kind in RequestOutputKind:
            params = SamplingParams(n=2, stop=["aaa"], max_tokens=9, logit_bias=bias, output_kind=kind,
                                    include_stop_str_in_output=True)  # fmt: skip
            (output,) = llm.generate([1, 2], params, use_tqdm=False)
            assert [sample.text for sample in output.outputs] == ["aaa", "aaa"], kind


def test_control_text_in_a_message_stays_text(llm) -> None:
    control = next(iter(llm.get_tokenizer().special_tokens))
    (output,) = llm.chat([{"role": "user", "content": f"a{control}b"}], GREEDY, use_tqdm=False)
    assert llm.get_tokenizer().special_tokens[control] not in output.prompt_token_ids
    assert output.prompt.startswith(f"[user]\na{control}b")


def test_threads_share_one_engine() -> None:
    with LLM("echo:?delay_ms=5&batch=4") as llm:
        found: dict[int, list[str]] = {}

        def ask(number: int) -> None:
            prompts = [f"{number}.{index}" for index in range(10)]
            found[number] = texts(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), False))

        threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert llm.get_metrics().num_running >= 0
            for thread in threads:
                thread.join(timeout=0.02)
        assert found == {number: [f"{number}.{index}" for index in range(10)] for number in range(4)}


def test_what_an_interrupted_call_left_finished_is_not_the_next_calls() -> None:
    with LLM("echo:") as llm:
        real = llm._engine.poll
        stale = llm.generate("old", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        llm._engine.poll = lambda timeout_s=None: [stale.pop()] if stale else real(timeout_s)
        assert texts(llm.generate("new", SamplingParams(temperature=0, max_tokens=3), False)) == ["new"]


def test_run_job_takes_a_file_a_mapping_and_a_spec(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text\none\ntwo\nthree\n")
    job = {
        "model": "echo:",
        "input": {"path": "rows.csv"},
        "prompt": {"column": "text"},
        "sampling": {"max_tokens": 4},
        "output": {"path": "out"},
    }
    summary = batchgen.run_job(job, quiet=True)
    assert (summary.rows_done, summary.exit_code) == (3, 0)

    from batchgen.jobs.spec import JobSpec

    limited = batchgen.run_job(JobSpec.from_mapping(job), limit=2, output="two", quiet=True)
    assert (limited.rows_done, limited.output.name) == (2, "two")

    import json

    (tmp_path / "job.yaml").write_text(json.dumps(job))
    overridden = batchgen.run_job("job.yaml", overrides=["sampling.max_tokens=1"], output="three", quiet=True)
    assert overridden.generated_tokens == 3


def test_public_names_are_shown_and_unknown_ones_refused() -> None:
    assert set(batchgen.__all__) <= set(dir(batchgen))
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        batchgen.LLMM  # noqa: B018


def test_priorities_that_nobody_would_look_at_are_refused(llm) -> None:
    with pytest.raises(ConfigError, match="priority has no effect under scheduling_policy: fcfs"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 0])
    with LLM("echo:", scheduling_policy="priority") as ranked:
        assert len(ranked.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 0])) == 2


def test_parameters_beyond_the_engine_are_refused_before_anything_runs(llm) -> None:
    before = llm.get_metrics().num_requests_finished
    for params, words in [
        (SamplingParams(logprobs=21), "'logprobs' is 21, but the engine gives at most 20"),
        (SamplingParams(allowed_token_ids=[258]), "'allowed_token_ids' has token id 258"),
    ]:
        with pytest.raises(ConfigError, match=words):
            llm.generate(["a", "b"], [GREEDY, params], use_tqdm=False)
    assert llm.get_metrics().num_requests_finished == before


def test_enqueued_prompts_are_waited_for_together(llm) -> None:
    first = llm.enqueue(["one", "two"], GREEDY)
    (between,) = llm.generate("between", SamplingParams(temperature=0, max_tokens=7), use_tqdm=False)
    second = llm.enqueue("three", GREEDY)
    conversations = [[{"role": "user", "content": text}] for text in ("four", "five")]
    third = llm.enqueue_chat(conversations, GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second + third
    assert [output.prompt for output in outputs[:3]] == ["one", "two", "three"]
    assert outputs[3:] == [
        replace(output, request_id=request_id)
        for output, request_id in zip(llm.chat(conversations, GREEDY, False), third, strict=True)
    ]
    assert between.outputs[0].text == "between"
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_sleep_and_wake_up() -> None:
    with LLM("echo:") as llm:
        llm.sleep(level=2)
        assert llm.is_sleeping()
        for call in (lambda: llm.generate("x", GREEDY, False), lambda: llm.enqueue("x", GREEDY)):
            with pytest.raises(EngineError, match="the engine sleeps; call wake_up"):
                call()
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping()
        assert texts(llm.generate("x", SamplingParams(temperature=0, max_tokens=1), False)) == ["x"]
        assert llm.reset_prefix_cache()
        with pytest.raises(ConfigError, match="sleep level must be 1 or 2; got 0"):
            llm.sleep(0)


def test_one_line_of_stats_per_interval(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    caplog.set_level(logging.INFO, "batchgen")
    for is_disabled in (False, True):
        caplog.clear()
        monkeypatch.setattr(StatsLog.__init__, "__defaults__", (0.05,))
        with LLM("echo:?delay_ms=1&batch=1", disable_log_stats=is_disabled) as llm:
            llm.generate(["hello"] * 20, GREEDY, use_tqdm=False)
        lines = [record.getMessage() for record in caplog.records if "tokens/s" in record.getMessage()]
        assert bool(lines) != is_disabled
        assert all(line.startswith("running 1, waiting ") for line in lines[:-1])


def test_the_line_of_stats_has_all_that_moves() -> None:
    before = EngineStats(prompt_tokens=100, generation_tokens=50, num_blocks=200)
    now = EngineStats(
        num_running=3, num_waiting=2, num_swapped=1, num_blocks=200, num_used_blocks=50, prompt_tokens=300,
        generation_tokens=150, prefix_cache_queries=200, prefix_cache_hits=50, num_preemptions=4,
        num_draft_tokens=80, num_accepted_tokens=60,
    )  # fmt: skip
    assert stats_line(before, now, 10) == (
        "running 3, waiting 2, swapped 1; prompt 20.0 tokens/s, generation 10.0 tokens/s; "
        "KV cache 25.0 % used; prefix cache 25.0 % hits; preemptions 4; "
        "speculation 75.0 % of 80 drafts accepted"
    )
    assert stats_line(before, before, 10) == (
        "running 0, waiting 0, swapped 0; prompt 0.0 tokens/s, generation 0.0 tokens/s; KV cache 0.0 % used"
    )


def test_tools_reach_the_template() -> None:
    class Tokenizer(ByteTokenizer):
        def render_chat(self, messages, *, chat_template=None, **options):
            return ChatTemplate(TOOLS_TEMPLATE, {}).render(messages, **options)

    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    with LLM("echo:") as llm:
        llm._caller.tokenizer = Tokenizer()
        (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, False, tools=tools)
        assert output.prompt == "tools: weather|hi|"
        (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, False)
        assert output.prompt == "hi|"


TOOLS_TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool.function.name }}{% endfor %}|{% endif %}"
    "{% for message in messages %}{{ message.content }}|{% endfor %}"
)


def test_scores_come_in_the_order_of_the_continuations(llm) -> None:
    outputs = llm.score(["ab", "cd", "ab"], ["x", "yz", [7, 8, 9]], use_tqdm=False)
    assert [output.token_ids for output in outputs] == [list(b"x"), list(b"yz"), [7, 8, 9]]
    assert [len(output.token_logprobs) for output in outputs] == [1, 2, 3]
    assert all(output.logprob == 0.0 and output.is_greedy for output in outputs), "an echo is certain"
    assert [len(output.prompt_token_ids) for output in outputs] == [3, 3, 3]
    both = llm.score("ab", ["x", "y"], use_tqdm=False)
    assert [output.token_ids for output in both] == [[120], [121]]


def test_pairs_that_cannot_be_scored_are_refused(llm) -> None:
    with pytest.raises(ConfigError, match="2 prompts for 3 continuations"):
        llm.score(["a", "b"], ["x", "y", "z"], use_tqdm=False)
    with pytest.raises(ConfigError, match="pair 1: the continuation has no tokens"):
        llm.score(["a", "b"], ["x", ""], use_tqdm=False)
    with pytest.raises(ConfigError, match="pair 0: the prompt has no tokens"):
        llm.score([[]], [[1]], use_tqdm=False)
    with pytest.raises(ConfigError, match="pair 0: the first token of 'ax' reaches from prompt to cont"):
        make_pairs([Read("a")], [Read("x")], lambda text, **_: [len(text)])


def test_a_score_that_the_engine_refuses_says_so() -> None:
    with LLM("echo:", max_model_len=8) as llm:
        good, bad = llm.score("ab", ["x", "y" * 20], use_tqdm=False)
    assert good.error is None
    assert (bad.error.code, bad.token_logprobs, math.isnan(bad.logprob)) == ("prompt_too_long", [], True)


def test_pairs_of_one_prompt_go_after_the_first_of_it() -> None:
    pairs = [Pair([1, 2, number], 2) for number in range(3)] + [Pair([5, 6, 7], 1)]
    assert list(waves(pairs)) == [[0, 3], [1, 2]]


def test_a_token_over_the_seam_belongs_to_the_continuation() -> None:
    def encode(text: str, **options: Any) -> list[int]:  # pairs of letters are one token
        return [ord(text[at]) * 1000 + ord(text[at + 1 : at + 2] or "\0") for at in range(0, len(text), 2)]

    (pair,) = make_pairs([Read("abc")], [Read("de")], encode)
    assert (pair.start, pair.ids) == (1, encode("abcde"))


def test_beams_in_vllms_form(llm) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    (output,) = llm.beam_search("abcdef", params)
    assert [sequence.text for sequence in output.sequences] == ["abcdefabcd"] * 2
    first = output.sequences[0]
    assert (len(first.tokens), first.num_prompt_tokens, first.finish_reason) == (11, 7, "length")
    assert len(first.logprobs) == 4
    with pytest.raises(ConfigError, match="params must be BeamSearchParams"):
        llm.beam_search("a", GREEDY)
    with pytest.raises(ConfigError, match=r"beam search: 'temperature' must be 0, .* got 0.5"):
        BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5)
    (bad,) = llm.beam_search([[]], params)
    assert (bad.sequences, bad.error.code) == ([], "empty_prompt")


def test_the_end_of_a_beam_is_left_out_unless_asked_for() -> None:
    sample = CompletionOutput(0, "hi", [104, 105, 257], cumulative_logprob=-1.5, finish_reason="stop")
    output = RequestOutput("a", "a", [97], [sample], finished=True)
    for keeps, tokens in ((False, [97, 104, 105]), (True, [97, 104, 105, 257])):
        params = BeamSearchParams(beam_width=1, max_tokens=4, include_stop_str_in_output=keeps)
        (sequence,) = beam_output(output, params, ByteTokenizer(), [257]).sequences
        assert (sequence.tokens, sequence.text, sequence.cum_logprob) == (tokens, "ahi", -1.5)


def test_pins_are_named(llm) -> None:
    pin = llm.pin_prefix("a long prefix")
    assert isinstance(pin, str)
    assert llm.unpin_prefix("unknown") is False
    with pytest.raises(ConfigError, match="cannot be pinned: the prompt has no tokens"):
        llm.pin_prefix([])
