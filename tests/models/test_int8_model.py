"""Int8 models: the rounding against an emulation on transformers' own model; tables, heads, refusals."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.ops import Quantized, choose
from batchgen.layers.linear import LinearLayer, MergedLinear
from batchgen.layers.parallel import ParallelContext
from batchgen.models.decoder import Decoder
from batchgen.quantization.base import method_for
from batchgen.quantization.int8 import Int8
from batchgen.quantization.unquantized import Unquantized
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
}
PROMPTS = [random_ids(37, seed=1), random_ids(18, seed=2)]
PLAN = [[37, 5], [0, 12], [0, 1]]


def rounded(x: Tensor, levels: int) -> Tensor:
    """Each row to the nearest of its levels."""
    scale = x.abs().amax(dim=-1, keepdim=True) / levels
    return (x / scale).round() * scale


@contextmanager
def emulated(original: Any) -> Iterator[Any]:
    """The same model in float64, its linear layers rounding weights and inputs as int8 does."""
    original = original.double()
    hooks = []
    with torch.no_grad():
        for name, layer in original.named_modules():
            if not isinstance(layer, torch.nn.Linear):
                continue
            if name == "lm_head":  # a tied table stays as it is
                layer.weight = torch.nn.Parameter(layer.weight.clone())
            layer.weight.copy_(rounded(layer.weight, 127))
            levels = 32767 if name.endswith("down_proj") else 127
            hooks.append(
                layer.register_forward_pre_hook(lambda _, inputs, most=levels: rounded(inputs[0], most))
            )
    yield original
    for hook in hooks:
        hook.remove()


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_an_emulation(
    case: str, backend: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any, truth: Any
) -> None:
    architecture, options = CASES[case]
    original = tiny_model(architecture, **options)
    floats = torch.cat(truth(original, PROMPTS)).double()
    model = decoder(write_folder(original, tmp_path), backend=backend, quantization="int8")
    ours = torch.cat(run(model, PROMPTS, PLAN))
    with emulated(original) as emulation:
        expected = torch.cat(truth(emulation, PROMPTS))
    # A value at the edge between two levels may fall either way in float32; nothing else differs.
    assert error(ours, expected) < 0.2 * error(expected, floats)
    assert error(expected, floats) < 0.1


@pytest.mark.parametrize("case", CASES)
def test_a_rotated_model_is_no_further_from_floats(
    case: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any, truth: Any
) -> None:
    architecture, options = CASES[case]
    original = tiny_model(architecture, **options)
    with torch.no_grad():  # a dimension of the stream as large as those of trained models
        original.model.embed_tokens.weight[:, 7] *= 40.0
    floats = torch.cat(truth(original, PROMPTS)).double()
    path = write_folder(original, tmp_path)
    plain, turned = (
        error(torch.cat(run(decoder(path, quantization="int8", rotates=rotates), PROMPTS, PLAN)), floats)
        for rotates in (False, True)
    )
    assert turned < 0.7 * plain


def test_a_gguf_file_gives_the_bits_of_its_folder(
    tmp_path: Path, decoder: Callable[..., Decoder], run: Any
) -> None:
    original = tiny_model(tie_word_embeddings=True)
    paths = (write_folder(original, tmp_path / "folder"), write_gguf(original, tmp_path / "tiny.gguf"))
    first, second = (
        run(decoder(path, backend="cpu", quantization="int8", rotates=True), PROMPTS, PLAN) for path in paths
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_token_has_the_same_bits_in_any_batch(
    kv_dtype: str, tmp_path: Path, decoder: Callable[..., Decoder], run: Any
) -> None:
    path = write_folder(tiny_model(tie_word_embeddings=True), tmp_path)
    arguments: dict[str, Any] = {
        "backend": "cpu", "quantization": "int8", "rotates": True, "kv_dtype": kv_dtype,
    }  # fmt: skip
    together = run(decoder(path, **arguments), PROMPTS, PLAN)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        for plan in ([[len(prompt)]], [[3], [len(prompt) - 4], [1]]):
            alone = run(decoder(path, **arguments), [prompt], plan)[0]
            assert torch.equal(alone, expected)


def test_a_tied_table_stays_as_it_is_beside_a_rounded_head(
    tmp_path: Path, decoder: Callable[..., Decoder]
) -> None:
    original = tiny_model(tie_word_embeddings=True)
    table = original.model.embed_tokens.weight.detach().clone()
    path = write_folder(original, tmp_path)
    ids = torch.tensor([0, 299, 7, 7])
    assert torch.equal(decoder(path, quantization="int8").embedding(ids), table[ids])
    turned = decoder(path, quantization="int8", rotates=True)
    assert turned.rotation is not None
    torch.testing.assert_close(turned.embedding(ids), turned.rotation.inputs(table[ids]))


def test_integers_take_a_quarter_of_the_memory(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    path = write_folder(tiny_model(**sizes), tmp_path)

    def layer_bytes(model: Decoder) -> int:
        targets = {
            id(target): target for name, (target, _) in model.weight_targets().items() if "_proj" in name
        }
        return sum(t.numel() * t.element_size() for target in targets.values() for t in target.tensors())

    floats, integers = (
        layer_bytes(decoder(path, backend="cpu", quantization=wanted)) for wanted in (None, "int8")
    )
    assert 0.25 * floats < integers < 0.27 * floats


@pytest.mark.parametrize(
    ("config", "tied", "message"),
    [
        # A head beside a table that is said to be the same, and no head where there must be one.
        (
            {"tie_word_embeddings": True},
            False,
            "tie_word_embeddings: true, but lm_head.weight is there and differs",
        ),
        ({"tie_word_embeddings": False}, True, "missing lm_head.weight"),
    ],
)
def test_a_head_that_contradicts_its_config_is_refused(
    config: dict[str, Any], tied: bool, message: str, tmp_path: Path, decoder: Callable[..., Decoder]
) -> None:
    path = write_folder(tiny_model(tie_word_embeddings=tied), tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(WeightsError, match=message):
        decoder(path, quantization="int8", rotates=True)


def test_a_quantized_checkpoint_is_not_rounded_again() -> None:
    assert method_for(None, "m", "int8") is Int8
    assert method_for(None, "m") is Unquantized
    with pytest.raises(UnsupportedModelError, match=r"'int8'.*not built"):
        method_for({"quant_method": "int8"}, "m")
    with pytest.raises(UnsupportedModelError, match=r"rounds float weights.*quantized already.*'none'"):
        method_for({"quant_method": "none"}, "m", "int8")


def test_a_layer_takes_floats_as_well(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    model = decoder(write_folder(tiny_model(), tmp_path), quantization="int8")
    for layer, bits in ((model.layers[0].qkv, 8), (model.layers[0].down, 16), (model.head, 8)):
        assert isinstance(layer, LinearLayer)
        assert layer.input_bits == bits
        x = torch.randn(3, layer.shape.in_features, generator=torch.Generator().manual_seed(0))
        integers = model.kernels.quantize(x, Quantized.empty(*x.shape, bits))
        assert torch.equal(layer(x), layer(integers))


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_rounding_does_to_the_mean_input_is_taken_back(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    kernels = choose("cpu", "float32", head_dim=16)
    weights = [torch.randn(rows, 300, generator=generator) for rows in (40, 24)]
    biases = [torch.randn(rows, generator=generator) for rows in (40, 24)]
    mean = torch.randn(300, generator=generator) * 3
    x = mean + torch.randn(2000, 300, generator=generator) * 0.1
    expected = x.double() @ torch.cat(weights).double().T
    if has_bias:
        expected += torch.cat(biases)
    shifts = []
    for means in ({}, {"m": mean.double()}, {"other": mean.double()}):
        method = Int8(kernels, torch.float32, torch.device("cpu"))
        method.mean_inputs = means
        layer = MergedLinear("m", method, ParallelContext(), 300, (40, 24), has_bias)
        for part in (1, 0):
            layer.load(part, "weight", weights[part])
            if has_bias:
                layer.load(part, "bias", biases[part])
        shifts.append(float((layer(x) - expected).mean(dim=0).pow(2).mean().sqrt()))
    assert shifts[1] < 0.15 * shifts[0]
    assert shifts[2] == shifts[0]
