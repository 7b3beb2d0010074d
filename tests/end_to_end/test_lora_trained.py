"""Adapters that peft trained and saved (make_adapters.py): our greedy tokens are its merged model's."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from batchgen import LLM, LoRARequest, SamplingParams
from batchgen.tiny_models import tiny_model, write_folder

pytest.importorskip("peft")
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

RECIPES = ("linear", "rslora", "patterns", "ends")
# Two logits closer than this may change places with another order of summation.
TIE = 1e-3
TOP = 5


def train(folder: Path, *options: str) -> None:
    """Train adapters for the model in a folder."""
    script = Path(__file__).with_name("make_adapters.py")
    command = [sys.executable, script, folder / "model", folder, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and the adapters that were trained for it."""
    folder = tmp_path_factory.mktemp("trained")
    write_folder(tiny_model(), folder / "model")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def llm(trained: Path) -> Iterator[LLM]:
    with LLM(str(trained / "model"), in_process=True, enable_lora=True, max_loras=2, max_logprobs=TOP) as llm:
        yield llm


def request(trained: Path, recipe: str) -> LoRARequest:
    return LoRARequest(recipe, RECIPES.index(recipe) + 1, str(trained / recipe))


def expected(trained: Path, recipe: str) -> list[tuple[list[int], int, Tensor]]:
    """Of each prompt: ids of prompt and text, how many are the prompt's, logits."""
    right = load_file(trained / f"{recipe}.safetensors")
    count = sum(name.startswith("ids.") for name in right)
    return [
        (right[f"ids.{number}"].tolist(), int(right[f"length.{number}"]), right[f"logits.{number}"])
        for number in range(count)
    ]


def check_log_probabilities(llm: LLM, folder: Path, recipe: str) -> None:
    right = expected(folder, recipe)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids, _, _ in right],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP),
        lora_request=request(folder, recipe),
        use_tqdm=False,
    )
    worst = 0.0
    for output, (ids, _, logits) in zip(outputs, right, strict=True):
        found = output.prompt_logprobs
        assert found is not None
        for place in range(1, len(ids)):
            for token, told in (found[place] or {}).items():
                worst = max(worst, abs(told.logprob - float(logits[place - 1].log_softmax(-1)[token])))
    print(f"{recipe}: log probabilities differ by {worst:.1e} at most")
    assert worst < 1e-4


@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probabilities_are_those_of_the_merged_model(llm: LLM, trained: Path, recipe: str) -> None:
    check_log_probabilities(llm, trained, recipe)


def test_a_head_that_is_the_embedding_is_adapted_alone(tmp_path: Path) -> None:
    write_folder(tiny_model(tie_word_embeddings=True), tmp_path / "model")
    train(tmp_path, "--only", "ends")
    with LLM(str(tmp_path / "model"), in_process=True, enable_lora=True, max_logprobs=TOP) as tied:
        check_log_probabilities(tied, tmp_path, "ends")


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy_tokens_are_those_of_the_merged_model(llm: LLM, trained: Path, recipe: str) -> None:
    right = expected(trained, recipe)
    outputs = llm.generate(
        [{"prompt_token_ids": ids[:length]} for ids, length, _ in right],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        lora_request=request(trained, recipe),
        use_tqdm=False,
    )
    for output, (ids, length, logits) in zip(outputs, right, strict=True):
        assert output.error is None
        for place, (mine, true) in enumerate(zip(output.outputs[0].token_ids, ids[length:], strict=True)):
            if mine != true:
                best, next_best = logits[length + place - 1].topk(2).values.tolist()
                assert best - next_best < TIE, f"{recipe}: token {place} is {mine}, not {true}"
                break


def test_each_prompt_of_one_call_has_its_own(llm: LLM, trained: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = {"prompt_token_ids": expected(trained, "linear")[0][0][:5]}
    requests = [None, *(request(trained, recipe) for recipe in RECIPES)]
    together = llm.generate([prompt] * 5, params, lora_request=requests, use_tqdm=False)
    texts = [output.outputs[0].token_ids for output in together]
    for each, text in zip(requests, texts, strict=True):
        alone = llm.generate([prompt], params, lora_request=each, use_tqdm=False)
        assert alone[0].outputs[0].token_ids == text
    assert len(set(map(tuple, texts))) == 5
