"""Adapters through LLM and AsyncLLM: each row has its own, whatever else the engine does with them."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from batchgen import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from batchgen.errors import ConfigError, ModelError
from batchgen.lora import host_memory
from batchgen.outputs import FailureCode
from batchgen.tiny_adapters import write_adapter
from batchgen.tiny_models import random_ids

PROMPTS = [random_ids(count, seed=count, vocab_size=256) for count in (18, 40, 7, 33)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The base with W + scaling · B · A as its weights: of an adapter of linear layers with one rank."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    pairs, weights = load_file(adapter / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    for key in list(pairs):
        if ".lora_A." not in key:
            continue
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = pairs[key].astype(np.float64), pairs[key.replace("lora_A", "lora_B")].astype(np.float64)
        weight = weights[f"{module}.weight"].astype(np.float64) + config["lora_alpha"] / config["r"] * b @ a
        weights[f"{module}.weight"] = weight.astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def base(tiny: Callable[..., Path]) -> Path:
    return tiny()


@pytest.fixture(scope="module")
def loras(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{number}", number + 1, write_adapter(folder / str(number), base, rank=4, seed=number))
        for number in range(3)
    ]


@pytest.fixture(scope="module")
def truth(
    base: Path, loras: list[LoRARequest], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, list[RequestOutput]]:
    """What the model and each merged model say to the prompts, greedily; with log probabilities."""
    found: dict[str | None, list[RequestOutput]] = {}
    folder = tmp_path_factory.mktemp("merged")
    for lora in [None, *loras]:
        name = None if lora is None else lora.lora_name
        path = base if lora is None else merged(base, Path(lora.path), folder / lora.lora_name)
        with LLM(str(path), in_process=True) as llm:
            params = SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1
            )
            found[name] = llm.generate(PROMPTS, params, use_tqdm=False)
    return found


@pytest.fixture
def start(base: Path) -> Iterator[Callable[..., LLM]]:
    started: list[LLM] = []

    def start(**engine_args: Any) -> LLM:
        started.append(LLM(str(base), in_process=True, **{"enable_lora": True, **engine_args}))
        return started[-1]

    yield start
    for llm in started:
        llm.shutdown()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs), outputs
    return [output.outputs[0].token_ids for output in outputs]


def chosen(truth: Any, loras: list[LoRARequest | None]) -> list[list[int]]:
    names = [None if lora is None else lora.lora_name for lora in loras]
    return [truth[name][row].outputs[0].token_ids for row, name in enumerate(names)]


def test_each_prompt_has_its_own_adapter(start: Any, loras: Any, truth: Any) -> None:
    llm = start()
    for order in ([loras[0], None, loras[1], loras[2]], [loras[2], loras[2], loras[0], None]):
        outputs = llm.generate(PROMPTS, GREEDY, False, lora_request=order)
        assert tokens(outputs) == chosen(truth, order)
        assert [output.lora_request for output in outputs] == order
        assert [output.outputs[0].lora_request for output in outputs] == order
    assert tokens(llm.generate(PROMPTS, GREEDY, False, loras[1])) == chosen(truth, [loras[1]] * 4)
    assert tokens(llm.generate(PROMPTS, GREEDY, False)) == chosen(truth, [None] * 4)
    assert len({str(chosen(truth, [lora] * 4)) for lora in [None, *loras]}) == 4


@pytest.mark.parametrize(
    "engine_args",
    [
        {"max_loras": 1},
        {"max_loras": 2, "max_cpu_loras": 2},
        {"num_gpu_blocks_override": 5},
        {"num_gpu_blocks_override": 5, "swap_space": 0.01, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_prefix_caching": False},
        {"kernel_backend": "reference"},
    ],
)
def test_whatever_the_engine_does_a_row_is_the_same(
    start: Any, loras: Any, truth: Any, engine_args: dict[str, Any]
) -> None:
    llm = start(**engine_args)
    order = [loras[0], None, loras[1], loras[2]]
    for _ in range(2):
        outputs = llm.generate(PROMPTS * 2, GREEDY, False, lora_request=order * 2)
        assert tokens(outputs) == chosen(truth, order) * 2


def test_log_probabilities_are_those_of_the_merged_model(start: Any, loras: Any, truth: Any) -> None:
    llm = start()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    order = [loras[1], loras[0], None, loras[1]]
    for row, (mine, lora) in enumerate(
        zip(llm.generate(PROMPTS, params, False, lora_request=order), order, strict=True)
    ):
        theirs = truth[lora and lora.lora_name][row]
        for entry, known in zip(
            [*mine.prompt_logprobs[1:], *mine.outputs[0].logprobs],
            [*theirs.prompt_logprobs[1:], *theirs.outputs[0].logprobs],
            strict=True,
        ):
            assert entry.keys() == known.keys()
            for token in entry:
                assert entry[token].logprob == pytest.approx(known[token].logprob, abs=1e-4)


def test_samples_beams_and_scores_are_those_of_the_merged_model(
    start: Any, loras: Any, base: Path, tmp_path: Path
) -> None:
    folder = merged(base, Path(loras[1].path), tmp_path / "merged")
    drawn = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), in_process=True) as truth:
        samples = truth.generate(PROMPTS, drawn, False)
        found = truth.beam_search(PROMPTS[:2], beams)
        scores = truth.score(PROMPTS[0], [[1, 2], [3, 4, 5]], False)
    llm = start()
    mine = llm.generate(PROMPTS, drawn, False, lora_request=loras[1])
    for ours, theirs in zip(mine, samples, strict=True):
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
    ours = llm.beam_search(PROMPTS[:2], beams, lora_request=[loras[1], loras[1]])
    for one, other in zip(ours, found, strict=True):
        assert [each.tokens for each in one.sequences] == [each.tokens for each in other.sequences]
        assert one.sequences[0].lora_request == loras[1]
    for one, other in zip(llm.score(PROMPTS[0], [[1, 2], [3, 4, 5]], False, loras[1]), scores, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_the_prefix_cache_is_shared_by_content_alone(
    start: Any, loras: Any, base: Path, tmp_path: Path
) -> None:
    llm = start()
    shutil.copytree(loras[0].path, tmp_path / "same")
    twin = LoRARequest("twin", 9, tmp_path / "same")
    cached = []
    for lora in (loras[0], loras[1], None, loras[0], twin, loras[1], None):
        (output,) = llm.generate(PROMPTS[1], GREEDY, False, lora_request=lora)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32, 32]


def test_another_content_under_a_name_is_another_adapter(
    start: Any, loras: Any, truth: Any, base: Path, tmp_path: Path
) -> None:
    llm = start()
    folder = tmp_path / "it"
    shutil.copytree(loras[0].path, folder)
    lora = LoRARequest("it", 1, folder)
    assert tokens(llm.generate(PROMPTS, GREEDY, False, lora)) == chosen(truth, [loras[0]] * 4)
    shutil.rmtree(folder)
    shutil.copytree(loras[1].path, folder)
    # Known by name and path, it is not read again unless that is asked for.
    assert tokens(llm.generate(PROMPTS, GREEDY, False, lora)) == chosen(truth, [loras[0]] * 4)
    first = llm.list_loras()
    info = llm.add_lora(lora)
    assert [each.name for each in first] == ["it"] and info.content_hash != first[0].content_hash
    assert tokens(llm.generate(PROMPTS, GREEDY, False, lora)) == chosen(truth, [loras[1]] * 4)
    elsewhere = LoRARequest("it", 1, loras[2].path)
    assert tokens(llm.generate(PROMPTS, GREEDY, False, elsewhere)) == chosen(truth, [loras[2]] * 4)


def test_files_that_vanish_fail_the_rows_that_need_them_again(
    start: Any, loras: Any, truth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(max_loras=1, max_cpu_loras=1)
    folder = tmp_path / "gone"
    shutil.copytree(loras[0].path, folder)
    lora = LoRARequest("brief", 7, folder)
    assert tokens(llm.generate(PROMPTS, GREEDY, False, lora)) == chosen(truth, [loras[0]] * 4)
    shutil.rmtree(folder)
    assert tokens(llm.generate(PROMPTS, GREEDY, False, lora)) == chosen(truth, [loras[0]] * 4)
    # Another one takes its place in memory, and it cannot come back.
    assert tokens(llm.generate(PROMPTS, GREEDY, False, loras[1])) == chosen(truth, [loras[1]] * 4)
    order = [lora, loras[1], None, lora]
    outputs = llm.generate(PROMPTS, GREEDY, False, lora_request=order)
    for row in (0, 3):
        error = outputs[row].error
        assert error.code is FailureCode.ENGINE_ERROR and "'brief' cannot be read any more" in error.message
    assert outputs[1].outputs[0].token_ids == truth["a1"][1].outputs[0].token_ids
    assert outputs[2].outputs[0].token_ids == truth[None][2].outputs[0].token_ids
    shutil.copytree(loras[2].path, folder)
    monkeypatch.setattr(host_memory, "_FAILURE_S", 0.2)
    time.sleep(0.3)
    (changed,) = llm.generate(PROMPTS[0], GREEDY, False, lora_request=lora)
    assert "its files are not those that were loaded; load it again" in changed.error.message
    llm.add_lora(lora)
    assert tokens(llm.generate(PROMPTS, GREEDY, False, lora)) == chosen(truth, [loras[2]] * 4)


def test_adapters_are_added_listed_pinned_and_removed(start: Any, loras: Any, truth: Any) -> None:
    llm = start(max_loras=1, max_cpu_loras=2)
    infos = [llm.add_lora(lora) for lora in loras]
    assert infos == llm.list_loras()
    assert [(info.rank, info.num_modules) for info in infos] == [(4, 14)] * 3
    assert llm.pin_lora("a0") and llm.pin_lora(loras[0]) and not llm.pin_lora("nobody")
    with pytest.raises(ConfigError, match="'a1' cannot be pinned"):
        llm.pin_lora(2)
    by_name = LoRARequest("a2")
    assert tokens(llm.generate(PROMPTS, GREEDY, False, by_name)) == chosen(truth, [loras[2]] * 4)
    assert llm.remove_lora(3) and not llm.remove_lora("a2")
    with pytest.raises(ConfigError, match="'a2' is not loaded; give its lora_path"):
        llm.generate(PROMPTS, GREEDY, False, by_name)
    with pytest.raises(ConfigError, match="no loaded adapter has lora_int_id 3"):
        llm.remove_lora(3)
    assert [info.name for info in llm.list_loras()] == ["a0", "a1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a0", "lora_request must be a LoRARequest"),
        ([LoRARequest("a", 1, "p")], "1 given for 4 prompts; give one for all or one each"),
        ([LoRARequest("a", 1, "p"), LoRARequest("a", 1, "q"), None, None], "'a' names two adapters, p and q"),
        ([None, "a", None, None], "must be a LoRARequest or None for each; got 'a'"),
        (LoRARequest("a", 1, "/no/such/adapter"), "adapter 'a': no such folder '/no/such/adapter'"),
    ],
)
def test_wrong_requests_are_refused_before_any_runs(start: Any, given: Any, message: str) -> None:
    llm = start()
    with pytest.raises(ConfigError, match=message):
        llm.generate(PROMPTS, GREEDY, False, lora_request=given)
    assert llm.in_flight() == []


def test_an_adapter_needs_slots(base: Path, loras: Any) -> None:
    with LLM(str(base), in_process=True) as llm:
        with pytest.raises(ConfigError, match="set enable_lora=True"):
            llm.generate(PROMPTS, GREEDY, False, lora_request=loras[0])
        with pytest.raises(ConfigError, match="set enable_lora=True"):
            llm.add_lora(loras[0])


def test_an_adapter_that_changes_nothing_is_told(
    start: Any, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start()
    info = llm.add_lora(LoRARequest("zero", 1, write_adapter(tmp_path / "zero", base, is_zero=True)))
    assert any("changes nothing" in warning for warning in info.warnings)
    assert "adapter zero" in caplog.text and "changes nothing" in caplog.text


def test_numbers_that_are_no_numbers_are_refused(start: Any, base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "nan", base)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in tensors if "1.mlp.up_proj.lora_B" in key)
    tensors[key][0, 0] = np.nan
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"adapter 'nan': .*up_proj.lora_B.weight holds values that are NaN"):
        start().add_lora(LoRARequest("nan", 1, folder))


def test_a_sleeping_engine_wakes_with_its_adapters(start: Any, loras: Any, truth: Any) -> None:
    llm = start()
    order = [loras[0], None, loras[1], loras[2]]
    for level in (1, 2):
        assert tokens(llm.generate(PROMPTS, GREEDY, False, lora_request=order)) == chosen(truth, order)
        llm.sleep(level)
        llm.wake_up()
    assert tokens(llm.generate(PROMPTS, GREEDY, False, lora_request=order)) == chosen(truth, order)


def test_drawn_rows_do_not_depend_on_the_number_of_slots(start: Any, loras: Any) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    order = [loras[0], loras[1], loras[2], loras[0], None, loras[1], loras[2], loras[0]]
    found = []
    for num_slots in (1, 2, 8):
        outputs = start(max_loras=num_slots).generate(PROMPTS * 2, drawn, False, lora_request=order)
        assert [output.lora_request for output in outputs] == order
        assert [output.prompt_token_ids for output in outputs] == PROMPTS * 2
        found.append(tokens(outputs))
    assert found[0] == found[1] == found[2]


def test_rows_in_flight_outlast_a_sleep_with_their_adapters(start: Any, loras: Any, truth: Any) -> None:
    order = [loras[0], None, loras[1], loras[2]]
    for level in (1, 2):
        llm = start()
        llm.enqueue(PROMPTS, GREEDY, lora_request=order)
        llm._engine.poll(0.0)
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm.wait_for_completion(False)) == chosen(truth, order)


def test_a_pinned_prefix_is_that_of_its_adapter(start: Any, loras: Any) -> None:
    llm = start()
    pin = llm.pin_prefix(PROMPTS[1], loras[0])
    cached = [
        llm.generate(PROMPTS[1], GREEDY, False, lora_request=lora)[0].num_cached_tokens
        for lora in (loras[1], loras[0], None)
    ]
    assert cached == [0, 32, 0] and llm.unpin_prefix(pin)


def test_enqueued_prompts_have_adapters_too(start: Any, loras: Any, truth: Any) -> None:
    llm = start()
    order = [loras[0], None, loras[1], loras[2]]
    llm.enqueue(PROMPTS[:2], GREEDY, lora_request=order[:2])
    llm.enqueue(PROMPTS[2:], GREEDY, lora_request=order[2:])
    outputs = llm.wait_for_completion(False)
    assert tokens(outputs) == chosen(truth, order)
    assert [output.lora_request for output in outputs] == order


def test_many_tasks_have_adapters_of_their_own(base: Path, loras: Any, truth: Any) -> None:
    async def one(llm: AsyncLLM, row: int, lora: LoRARequest | None) -> list[int]:
        output = None
        async for output in llm.generate(PROMPTS[row], GREEDY, lora_request=lora):
            assert output.lora_request == lora
        assert output is not None and output.error is None
        return output.outputs[0].token_ids

    async def main() -> None:
        async with await AsyncLLM.start(str(base), in_process=True, enable_lora=True, max_loras=2) as llm:
            order = [loras[0], None, loras[1], loras[2]]
            found = await asyncio.gather(*(one(llm, row, lora) for row, lora in enumerate(order)))
            assert found == chosen(truth, order)
            assert [info.name for info in await llm.list_loras()] == ["a0", "a1", "a2"]
            assert await llm.pin_lora("a0") and await llm.remove_lora("a1")
            with pytest.raises(ConfigError, match=r"adapter 'model': .* holds a model"):
                await llm.add_lora(LoRARequest("model", 4, base))

    asyncio.run(main())


@pytest.mark.slow
def test_a_child_serves_adapters(base: Path, loras: Any, truth: Any) -> None:
    with LLM(str(base), enable_lora=True) as llm:
        order = [loras[0], None, loras[1], loras[2]]
        assert tokens(llm.generate(PROMPTS, GREEDY, False, lora_request=order)) == chosen(truth, order)
        assert [info.name for info in llm.list_loras()] == ["a0", "a1", "a2"]
        assert llm.pin_lora("a1") and llm.remove_lora("a0")
        with pytest.raises(ConfigError, match="no such folder"):
            llm.add_lora(LoRARequest("b", 5, "/no/such/folder"))
