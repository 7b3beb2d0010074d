"""The decoder gives transformers' logits for every family: prefill, chunks and decode in mixed batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from batchgen.models.decoder import Decoder
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf
from batchgen.worker.input_batch import BatchBuilder

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
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


def run_step(model: Decoder, ids: list[int], **arguments: Any) -> torch.Tensor:
    step = SchedulerOutput(0, (ScheduledSequence(0, ids, 0, (list(range(4)),)),))
    batch = BatchBuilder(block_size=16, num_groups=1, device=model.device).build(step, {})
    positions = arguments.pop("positions", batch.positions)
    token_ids = None if "inputs_embeds" in arguments else batch.token_ids
    return model.logits(model.forward(token_ids, positions, batch.metas, **arguments)).clone()


def test_each_group_of_layers_reads_its_own_block_tables(
    tmp_path: Path, decoder: Callable[..., Decoder]
) -> None:
    model = decoder(write_folder(tiny_model(), tmp_path), backend="cpu")
    ids = PROMPTS[0]
    plain = run_step(model, ids)
    model.layers[1].group = 1

    def logits(first: list[int], then: list[int]) -> torch.Tensor:
        for start, stop, table in ((0, 20, first), (20, len(ids), then)):
            scheduled = ScheduledSequence(0, ids[start:stop], start, ([4, 9, 2], table))
            step = SchedulerOutput(0, (scheduled,))
            batch = BatchBuilder(block_size=16, num_groups=2, device=model.device).build(step, {})
            last = model.logits(model.forward(batch.token_ids, batch.positions, batch.metas)).clone()
        return last

    # Written to one place and read from another: the second group's table is really its own.
    assert not torch.equal(logits([8, 3, 11], [7, 3, 11]), plain[20:])
    assert torch.equal(logits([7, 3, 11], [7, 3, 11]), plain[20:])


def test_only_the_rows_that_are_asked_for(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    model = decoder(write_folder(tiny_model(), tmp_path), backend="cpu")
    every = run_step(model, PROMPTS[0])
    some = run_step(model, PROMPTS[0], rows=torch.tensor([36, 4, 4]))
    assert torch.equal(some, every[[36, 4, 4]])


def test_embeddings_may_come_from_elsewhere(
    tmp_path: Path, decoder: Callable[..., Decoder], truth: Any
) -> None:
    original = tiny_model()
    model = decoder(write_folder(original, tmp_path))
    embeds = torch.randn(9, 72, generator=torch.Generator().manual_seed(5))
    kept = embeds.clone()
    ours = run_step(model, [0] * 9, inputs_embeds=embeds)
    with torch.no_grad():
        theirs = original(inputs_embeds=kept.unsqueeze(0)).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(embeds, kept), "the caller's embeddings were changed"


def test_positions_may_have_several_rows(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    model = decoder(write_folder(tiny_model(), tmp_path))
    rows = torch.arange(37).expand(3, 37)
    assert torch.equal(run_step(model, PROMPTS[0], positions=rows), run_step(model, PROMPTS[0]))


def test_positions_matter(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    model = decoder(write_folder(tiny_model(), tmp_path))
    stretched = torch.arange(37) * 2
    assert not torch.allclose(run_step(model, PROMPTS[0], positions=stretched), run_step(model, PROMPTS[0]))


# Sliding windows that a sequence outgrows: architecture, options, windows of the groups of layers.
WINDOWS: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "mistral": ("MistralForCausalLM", {"sliding_window": 20}, [20]),
    "qwen2 hybrid": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "num_hidden_layers": 4},
        [None, 20],
    ),
    "smollm3 hybrid": (
        "SmolLM3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 4,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        [33, 33, 33, None],
    ),
}
LONG_PROMPTS = [random_ids(110, seed=4), random_ids(95, seed=5)]
# Whole prompts, chunks longer and shorter than the windows, decodes.
LONG_PLAN = [[60, 0], [1, 48], [30, 1], *[[1, 1]] * 15, [4, 31]]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_give_blocks_back_and_the_logits_stay(
    case: str, backend: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any, truth: Any
) -> None:
    architecture, options, windows = WINDOWS[case]
    original = tiny_model(architecture, **options)
    model = decoder(write_folder(original, tmp_path), backend=backend)
    assert list(model.kv_layout.windows) == windows
    # Blocks that were given back are NaN until they are used again, by whatever group.
    caches = {id(layer.kv) for layer in model.layers}
    assert len(caches) == len(model.layers) // len(windows), "layers of different groups share their memory"
    for ours, theirs in zip(run(model, LONG_PROMPTS, LONG_PLAN), truth(original, LONG_PROMPTS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", WINDOWS)
def test_a_row_has_the_same_bits_however_its_blocks_are_given_back(
    case: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any
) -> None:
    architecture, options, _ = WINDOWS[case]
    model = decoder(write_folder(tiny_model(architecture, **options), tmp_path), backend="cpu")
    mixed = run(model, LONG_PROMPTS, LONG_PLAN)
    for prompt, ours in zip(LONG_PROMPTS, mixed, strict=True):
        assert torch.equal(ours, run(model, [prompt], [[len(prompt)]])[0])
        assert torch.equal(ours, run(model, [prompt], [[1]] * len(prompt))[0])


@pytest.mark.parametrize("case", ["llama tied", "qwen3", "mistral window"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    case: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any
) -> None:
    architecture, options = CASES[case]
    model = decoder(write_folder(tiny_model(architecture, **options), tmp_path), backend="cpu")
    mixed = run(model, PROMPTS, PLAN)
    for prompt, ours in zip(PROMPTS, mixed, strict=True):
        alone = run(model, [prompt], [[len(prompt)]])[0]
        one_by_one = run(model, [prompt], [[1]] * len(prompt))[0]
        assert torch.equal(ours, alone)
        assert torch.equal(ours, one_by_one)
