import json

import pytest

from batchgen.tiny_models import tiny_model, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tiny_model(), tmp_path_factory.mktemp("tiny"))


def test_numbers_as_json_and_as_a_table(invoke, folder) -> None:
    few = ("--prompts", 3, "--prompt-tokens", 8, "--new-tokens", 2, "--set", "max_model_len=64")
    done = invoke("bench", "-m", folder, *few, "--json", "--quiet")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["input_tokens"], found["output_tokens"]) == (24, 6)
    assert found["workload"] == "3 made-up prompts of 8 tokens, 2 tokens each"


def test_wrong_usage(invoke) -> None:
    sampled = invoke("bench", "-m", "echo:", "--set", "sampling.top_k=3")
    assert sampled.code == 2 and "sampling.top_k" in sampled.err
    assert invoke("bench").code == 2
    assert "name a model" in invoke("bench").err
    echo = invoke("bench", "-m", "echo:")
    assert echo.code == 2 and "computes nothing" in echo.err
