"""`quantization: int4 | fp8`: the logits are those of transformers' model with the rounded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.errors import ConfigError, UnsupportedModelError
from batchgen.kernels.ops import choose
from batchgen.layers.linear import ColumnLinear
from batchgen.layers.parallel import ParallelContext
from batchgen.quantization.base import method_for
from batchgen.quantization.stored import module_names
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf

IDS = random_ids(90, seed=3)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "windows": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
}


def with_rounded_weights(original: Any, model: Any) -> int:
    """Put what the layers of our model hold into transformers' model; how many were rounded."""
    named = dict(original.named_modules())
    layers = [model.head] if original.config.tie_word_embeddings is False else []
    for layer in model.layers:
        layers += [layer.qkv, layer.output, layer.gate_up, layer.down]
    count = 0
    for layer in layers:
        for module, part in zip(module_names(layer.name), layer.weights.parts, strict=True):
            assert part.is_coded
            linear, inputs = named[module], part.in_features
            assert linear.weight.shape == (part.out_features, inputs)
            bias = model.kernels.linear(torch.zeros(1, inputs), part)[0].clone()
            columns = model.kernels.linear(torch.eye(inputs), part) - bias
            linear.weight, linear.bias = torch.nn.Parameter(columns.T.contiguous()), torch.nn.Parameter(bias)
            count += 1
    return count


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("scheme", ["int4", "fp8"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_the_rounded_weights(
    case: str, scheme: str, backend: str, tmp_path: Path, sizes: Any, build: Any, logits: Any
) -> None:
    architecture, options = CASES[case]
    original = tiny_model(architecture, **sizes, **options)
    path = write_folder(original, tmp_path)
    floats = original(torch.tensor([IDS])).logits[0]
    model = build(path, scheme, backend=backend)
    assert with_rounded_weights(original, model) == 14 + (not original.config.tie_word_embeddings)
    expected = original(torch.tensor([IDS])).logits[0]
    assert 1e-3 < float((expected - floats).norm() / floats.norm()) < 0.5
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_a_gguf_file_gives_the_bits_of_its_folder(
    scheme: str, tmp_path: Path, sizes: Any, build: Any, logits: Any
) -> None:
    original = tiny_model(**sizes)
    folder, file = write_folder(original, tmp_path / "folder"), write_gguf(original, tmp_path / "tiny.gguf")
    assert torch.equal(logits(build(folder, scheme), IDS), logits(build(file, scheme), IDS))


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_bits_do_not_depend_on_threads(scheme: str, folder: Path, build: Any, logits: Any) -> None:
    first = build(folder, scheme)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        second = build(folder, scheme)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))


@pytest.mark.parametrize(("scheme", "share"), [("int4", 0.19), ("fp8", 0.27)])
def test_memory_falls(scheme: str, share: float, tmp_path: Path, build: Any) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    path = write_folder(tiny_model(tie_word_embeddings=True, **sizes), tmp_path)
    layers = [
        sum(each.nbytes for each in build(path, wanted).layers[0].down.tensors()) for wanted in (None, scheme)
    ]
    assert layers[1] < share * layers[0]


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_what_is_seen_of_inputs_makes_layers_better(scheme: str) -> None:
    kernels = choose("cpu", "float32", head_dim=16)
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(160, generator=generator) * 2
    mixing = torch.randn(160, 160, generator=generator) / 160**0.5
    x = mean + torch.randn(3000, 160, generator=generator) @ mixing
    weight = torch.randn(48, 160, generator=generator)
    errors = []
    for sees in (False, True):
        method = method_for(None, "m", scheme)(kernels, torch.float32, torch.device("cpu"))
        layer = ColumnLinear("model.layers.0.mlp.down_proj", method, ParallelContext(), 160, (48,))
        if sees:
            layer.method.see_inputs(layer.shape, x[:512])
        layer.load(0, "weight", weight)
        errors.append(float((layer(x) - x @ weight.T).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_decisions_and_refusals(tmp_path: Path, folder: Path) -> None:
    from batchgen import LLM

    with LLM(str(folder), in_process=True, quantization="int4", max_model_len=64) as llm:
        assert "quantization=int4 (as set)" in llm.info.decisions
        assert llm.info.environment["quantization"] == "int4"
        assert llm.info.resolved["kv_cache_dtype"] == "float32"
        assert llm.info.reproducible
    with pytest.raises(UnsupportedModelError, match=r"fp8 rounds float weights.*already \('gptq'\)"):
        method_for({"quant_method": "gptq"}, "m", "fp8")
    with pytest.raises(UnsupportedModelError, match=r"'int4'.*not built"):
        method_for({"quant_method": "int4"}, "m")
    with pytest.raises(ConfigError, match="int4, gguf or null"):
        LLM(str(folder), quantization="int3")
