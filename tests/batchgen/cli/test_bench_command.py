import json

import pytest

from batchgen.tiny_models import tiny_model, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tiny_model(), tmp_path_factory.mktemp("tiny"))


def test_numbers_as_json_and_as_a_table(invoke, folder) -> None:
    few = ("--prompts", 3, "--prompt-tokens", 8, "--new-tokens", 2, "--set", "max_model_len=64")
    done = invoke("bench", "-m", folder, *few, "--json", "--quiet")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["input_tokens"], found["output_tokens"]) == (24, 6)
    assert found["workload"] == "3 made-up prompts of 8 tokens, 2 tokens each"


def test_any_key_of_a_job_is_set_and_phases_stand_on_standard_error(invoke, make_job, folder) -> None:
    job = make_job(model=str(folder))
    settings = ("sampling.max_tokens=2", "sampling.ignore_eos=true", "prompt.template=hi", "max_model_len=64")
    done = invoke(
        "bench", job, "--limit", 3, "--json", *[part for each in settings for part in ("--set", each)]
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["output_tokens"], found["workload"]) == (6, "the first 3 rows of job.yaml")
    assert not any(line.startswith("max_model_len=") for line in found["decisions"])  # it was given
    phases = done.err.splitlines()
    assert phases[0] == f"loading {folder}"
    assert phases[-2:] == ["running the first 3 rows of job.yaml", "measuring the machine again"]
    wrong = invoke("bench", job, "--set", "input.pth=x")
    assert wrong.code == 2
    assert "did you mean 'path'" in wrong.err


def test_wrong_usage(invoke) -> None:
    sampled = invoke("bench", "-m", "echo:", "--set", "sampling.top_k=3")
    assert sampled.code == 2 and "sampling.top_k" in sampled.err
    assert invoke("bench").code == 2
    assert "name a model" in invoke("bench").err
    echo = invoke("bench", "-m", "echo:")
    assert echo.code == 2 and "computes nothing" in echo.err
