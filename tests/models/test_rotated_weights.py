"""A rotated residual stream: the same logits in float for every family; outliers spread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.errors import WeightsError
from batchgen.kernels.ops import choose
from batchgen.models.decoder import Decoder
from batchgen.quantization.rotation import Rotation
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
}
PROMPTS = [random_ids(37, seed=1), random_ids(18, seed=2)]
PLAN = [[37, 5], [0, 12], [0, 1]]


def rotation_of(size: int) -> Rotation:
    return Rotation(size, choose("cpu", "float32", head_dim=64))


@pytest.mark.parametrize("size", [1, 7, 64, 72, 576, 896, 1000])
def test_a_rotation_is_orthogonal_and_flat(size: int) -> None:
    rotation = rotation_of(size)
    matrix = rotation.inputs(torch.eye(size)).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=2e-6, rtol=0)
    assert matrix.abs().max() <= (2.001 / size) ** 0.5
    torch.testing.assert_close(rotation.outputs(torch.eye(size)).double(), matrix.T, atol=1e-6, rtol=0)


def test_an_outlier_is_spread_over_all_dimensions() -> None:
    x = torch.randn(5, 576, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 300.0
    turned = rotation_of(576).inputs(x)
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1))
    assert turned.abs().max() < 300.0 / 8


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("case", CASES)
def test_the_rotated_model_gives_the_same_logits(
    case: str, kind: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any
) -> None:
    architecture, options = CASES[case]
    if kind == "gguf" and case == "mistral":
        pytest.skip("GGUF files call it llama")
    layers = 4 if case == "smollm3" else 2
    original = tiny_model(architecture, **{"num_hidden_layers": layers, **options})
    path = (
        write_folder(original, tmp_path) if kind == "folder" else write_gguf(original, tmp_path / "tiny.gguf")
    )
    plain = run(decoder(path), PROMPTS, PLAN)
    turned = run(decoder(path, rotates=True), PROMPTS, PLAN)
    for ours, theirs in zip(turned, plain, strict=True):
        error = (ours - theirs).pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt()
        assert error < 3e-6


def test_embeddings_from_elsewhere_are_rotated_too(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    path = write_folder(tiny_model(tie_word_embeddings=True), tmp_path)
    plain, turned = decoder(path), decoder(path, rotates=True)
    assert turned.rotation is not None
    ids = torch.tensor([0, 299, 7, 7])
    torch.testing.assert_close(turned.embedding(ids), turned.rotation.inputs(plain.embedding(ids)))


def test_folded_norms_have_no_weights_left(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    model = decoder(write_folder(tiny_model("Qwen3ForCausalLM"), tmp_path), rotates=True)
    norms = [norm for layer in model.layers for norm in (layer.input_norm, layer.post_norm)] + [model.norm]
    assert all(norm.weight is not None and bool((norm.weight == 1).all()) for norm in norms)
    of_heads = model.layers[0].query_norm
    assert of_heads is not None and of_heads.weight is not None and not bool((of_heads.weight == 1).all())


def test_a_nan_is_named_where_it_stands(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    original = tiny_model()
    with torch.no_grad():
        original.model.layers[1].input_layernorm.weight[5] = float("nan")
    with pytest.raises(WeightsError, match=r"layers\.1\.input_layernorm\.weight: 1 of 72 values are NaN"):
        decoder(write_folder(original, tmp_path), rotates=True)
