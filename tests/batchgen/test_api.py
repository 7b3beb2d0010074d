import asyncio
import threading

import numpy as np
import pytest

import batchgen
from batchgen import LLM, SamplingParams
from batchgen.counting import CountingExecutor
from batchgen.engine.core import EngineCore
from batchgen.engine.in_process import InProcessClient
from batchgen.errors import ConfigError
from batchgen.sampling_params import RequestOutputKind

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
    with pytest.raises(ConfigError, match="sampling_params has 3 entries for 2 prompts"):
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
    for wrong in ({"temperature": 0}, 5, "x", [GREEDY, None]):
        with pytest.raises(ConfigError, match="sampling_params must be SamplingParams"):
            llm.generate(["a", "b"], wrong, use_tqdm=False)
    with pytest.raises(ConfigError, match="sampling_params has 0 entries for 1 prompts"):
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
    async def main() -> list[str]:
        return texts(llm.generate(["one"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False))

    assert asyncio.run(main()) == ["one"]
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.extend(
            texts(llm.generate(["two"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False))
        )
    )
    thread.start()
    thread.join(timeout=60)
    assert found == ["two"]


def test_outputs_come_whole_whatever_their_kind(monkeypatch) -> None:
    def counting(config, tokenizer, in_process, on_loading):
        return InProcessClient(EngineCore(config, CountingExecutor(config)), tokenizer)

    monkeypatch.setattr("batchgen.caller.start_engine", counting)
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
