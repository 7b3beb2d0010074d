"""What a loaded model refuses to draw, by the parameter's name."""

from pathlib import Path
from typing import Any

import pytest

from batchgen.sampling_params import SamplingParams
from batchgen.worker.model_runner import ModelRunner


@pytest.fixture(scope="module")
def executor(folder: Path, load: Any) -> ModelRunner:
    made: ModelRunner = load(folder)  # 300 logits, 260 tokens
    return made


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"logprobs": -1},
        {"logprob_token_ids": [300]},
        {"prompt_logprobs": 1, "prompt_logprob_token_ids": [300]},
        {"allowed_token_ids": [5, 300]},
        {"allowed_token_ids": [299]},
        {"thinking_token_budget": 5},
    ],
    ids=str,
)
def test_refused(params: dict[str, Any], executor: ModelRunner) -> None:
    reason = executor.refusal(SamplingParams(**params))
    assert reason is not None
    assert list(params)[-1] in reason


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 20, "prompt_logprobs": 20},
        # BG-11: 299 has logits but no token; it is allowed to be named, and never drawn.
        {"logprob_token_ids": [299], "logit_bias": {299: 100.0}, "allowed_token_ids": [259, 299]},
        {"repetition_penalty": 1.2, "stop_token_ids": [100000]},
    ],
    ids=str,
)
def test_not_refused(params: dict[str, Any], executor: ModelRunner) -> None:
    assert executor.refusal(SamplingParams(**params)) is None


def test_limits_are_the_engines(folder: Path, load: Any) -> None:
    assert load(folder, max_logprobs=2).refusal(SamplingParams(logprobs=3)) is not None
    assert load(folder, max_logprobs=-1).refusal(SamplingParams(logprobs=-1)) is None


def test_a_grammar_that_cannot_be_enforced_is_refused(executor: ModelRunner) -> None:
    wrong = SamplingParams(structured_outputs={"regex": "(?=a)b"})
    assert executor.refusal(wrong) is not None
    assert executor.refusal(SamplingParams(structured_outputs={"regex": "ab"})) is None
