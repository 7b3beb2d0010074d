"""The decoder gives transformers' logits for every family, in prefill, chunks and decode, mixed in one batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.models.decoder import Decoder
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

# name -> architecture and what of its options is switched on.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama no groups": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "mistral window": ("MistralForCausalLM", {"sliding_window": 7}),
    "mistral no window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 windows": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "smollm3 windows": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
}
IN_GGUF = ("llama", "llama tied", "llama biases", "qwen2", "qwen3", "smollm3")

PROMPTS = [random_ids(37, seed=1), random_ids(18, seed=2), random_ids(23, seed=3)]
# Whole prefill beside a chunk; a decode beside chunks; nothing for one; decodes only.
PLAN = [[37, 5, 0], [0, 1, 16], [0, 11, 1], [0, 1, 5], [0, 0, 1]]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str, backend: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any, truth: Any
) -> None:
    architecture, options = CASES[case]
    original = tiny_model(architecture, **options)
    model = decoder(write_folder(original, tmp_path), backend=backend)
    for ours, theirs in zip(run(model, PROMPTS, PLAN), truth(original, PROMPTS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", IN_GGUF)
def test_a_gguf_file_gives_the_logits_of_its_original(
    case: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any, truth: Any
) -> None:
    architecture, options = CASES[case]
    original = tiny_model(architecture, **{"no_rope_layer_interval": 4, "num_hidden_layers": 4, **options})
    if case == "smollm3":  # a GGUF file cannot say which layers skip the rotation: every fourth does
        original = tiny_model(architecture, num_hidden_layers=4)
    model = decoder(write_gguf(original, tmp_path / "tiny.gguf"))
    for ours, theirs in zip(run(model, PROMPTS, PLAN), truth(original, PROMPTS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
