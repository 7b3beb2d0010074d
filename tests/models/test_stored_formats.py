"""Checkpoints of few bits, in every format: the logits of the float model that their codes mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from batchgen.errors import ModelError
from batchgen.tiny_checkpoints import SIZES, awq, float8, gptq, packed_integers, plain_integers, write_pair
from batchgen.tiny_models import random_ids
from batchgen.tiny_tool_checkpoints import (
    auto_round,
    float8_rows,
    one_to_a_byte,
    outlier_integers,
    table_bits,
)

PROMPTS = [random_ids(21, seed=1), random_ids(9, seed=2)]
PLAN = [[21, 4], [0, 4], [0, 1]]

FORMATS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    **{f"gptq {bits} bits": (gptq, (bits, 32), {}) for bits in (2, 3, 4, 8)},
    "gptq symmetric": (gptq, (4, 32), {"is_symmetric": True}),
    "gptq act-order": (gptq, (4, 32), {"act_order": True}),
    "gptq act-order 3 bits": (gptq, (3, 32), {"act_order": True}),
    "gptq one group": (gptq, (4, -1), {}),
    "gptq version 2": (gptq, (4, 32), {"version": 2}),
    "gptq with biases of zeros": (gptq, (4, 32), {"has_bias": True}),
    "awq": (awq, (32,), {}),
    "awq with layers in floats": (awq, (32,), {"skipped": ("layers.1.mlp", "o_proj")}),
    **{f"packed {bits} bits": (packed_integers, (bits, 32), {}) for bits in (2, 3, 4, 5, 8)},
    **{f"packed {bits} bits, older": (packed_integers, (bits, 32), {"is_old": True}) for bits in (3, 5)},
    "packed with zero points": (packed_integers, (4, 32), {"is_symmetric": False}),
    "packed 3 bits with zero points": (packed_integers, (3, 32), {"is_symmetric": False}),
    "packed 3 bits with zero points, older": (
        packed_integers,
        (3, 32),
        {"is_symmetric": False, "is_old": True},
    ),
    "packed act-order": (packed_integers, (4, 32), {"act_order": True}),
    "packed one group": (packed_integers, (4, -1), {}),
    "integers of 8 bits": (plain_integers, (), {"rounds_inputs": False}),
    "float8 one scale": (float8, ("tensor",), {}),
    "float8 blocks": (float8, ("block",), {}),
    "float8 compressed, outputs": (float8, ("channel",), {"style": "compressed"}),
    "float8 compressed, blocks": (float8, ("block",), {"style": "compressed"}),
    "float8 modelopt": (float8, ("tensor",), {"style": "modelopt"}),
    "bitsandbytes nf4": (table_bits, ("nf4",), {}),
    "bitsandbytes nf4, double": (table_bits, ("nf4",), {"is_nested": True}),
    "bitsandbytes fp4": (table_bits, ("fp4",), {}),
    "bitsandbytes fp4 in bfloat16": (table_bits, ("fp4",), {"storage": torch.bfloat16}),
    "bitsandbytes 8 bits": (outlier_integers, (), {}),
    "torchao 8 bits": (one_to_a_byte, (8, -1), {}),
    "torchao 4 bits": (one_to_a_byte, (4, 32), {}),
    "torchao 3 bits with zero points": (one_to_a_byte, (3, 32), {"is_symmetric": False}),
    "torchao float8": (float8_rows, (), {}),
    "auto-round, gptq": (auto_round, ("auto_round:auto_gptq", 4, 32), {}),
    "auto-round, gptq version 2": (auto_round, ("auto_round", 3, 32), {}),
    "auto-round, awq": (auto_round, ("auto_round:auto_awq", 4, 32), {}),
}


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes a checkpoint in a format of FORMATS, and the float model that it means."""

    def write(name: str, **model: Any) -> tuple[Path, Path]:
        make, arguments, options = FORMATS[name]
        return write_pair(tmp_path, *make(*arguments, **options), **model)

    return write


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["quantization_config"] |= changes
    file.write_text(json.dumps(settings))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_the_float_model(name: str, pair: Any, decoder: Any, run: Any, truth: Any) -> None:
    stored, floats = pair(name)
    found = run(decoder(stored, backend="cpu"), PROMPTS, PLAN)
    meant = run(decoder(floats, backend="cpu"), PROMPTS, PLAN)
    expected = truth(LlamaForCausalLM.from_pretrained(floats, dtype=torch.float32), PROMPTS)
    for mine, same, right in zip(found, meant, expected, strict=True):
        assert torch.equal(mine, same)
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq 4 bits", "packed with zero points", "float8 blocks"])
def test_the_reference_reads_the_same(name: str, pair: Any, decoder: Any, run: Any) -> None:
    stored, floats = pair(name)
    for mine, right in zip(
        run(decoder(stored), PROMPTS, PLAN), run(decoder(floats), PROMPTS, PLAN), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq 4 bits", "awq", "packed 4 bits", "float8 one scale"])
@pytest.mark.parametrize(
    "model",
    [
        {"tie_word_embeddings": True},
        {"architecture": "Qwen2ForCausalLM"},
        {"architecture": "Qwen3ForCausalLM"},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_every_family(name: str, model: dict[str, Any], pair: Any, decoder: Any, run: Any) -> None:
    stored, floats = pair(name, **model)
    found, meant = (run(decoder(folder, backend="cpu"), PROMPTS, PLAN) for folder in (stored, floats))
    for mine, right in zip(found, meant, strict=True):
        assert torch.equal(mine, right)


def test_products_of_integers(tmp_path: Path, decoder: Any, run: Any) -> None:
    stored, floats = write_pair(tmp_path, *plain_integers(rounds_inputs=True))
    found, meant = (run(decoder(folder, backend="cpu"), PROMPTS, PLAN) for folder in (stored, floats))
    for mine, right in zip(found, meant, strict=True):
        # Activations of 8 bits are what makes the difference.
        assert not torch.equal(mine, right)
        assert float((mine - right).norm() / right.norm()) < 0.05


def test_weights_stay_in_their_bits(pair: Any, decoder: Any) -> None:
    stored, floats = pair("gptq 4 bits")
    sizes = [
        sum(tensor.numel() * tensor.element_size() for layer in decoder(folder, backend="cpu").layers
            for tensor in layer.gate_up.tensors())
        for folder in (stored, floats)
    ]  # fmt: skip
    # Half a byte for a code, and for each 32 of them two bytes of scale and one of zero point.
    assert sizes[0] / sizes[1] == pytest.approx((0.5 + 3 / 32) / 4)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gptq 4 bits", {"bits": 5}, "bits 5 are not built"),
        ("gptq 4 bits", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not built"),
        ("gptq 4 bits", {"group_size": "all"}, "group_size 'all' is not a number"),
        ("gptq 4 bits", {"group_size": 36}, "do not divide into groups of 36"),
        (
            "gptq 4 bits",
            {"bits": 8},
            r"gate_proj: qweight has shape \[12, 160\], the model needs \[24, 160\]",
        ),
        ("awq", {"version": "gemv"}, "AWQ of version 'gemv'"),
        ("packed 4 bits", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("packed 4 bits", {"format": "marlin-24"}, "marlin-24"),
        ("packed 4 bits", {"config_groups": {}}, "config_groups"),
        ("float8 modelopt", {"quant_algo": "NVFP4"}, "quant_algo 'NVFP4' is not built"),
        ("awq", {"quant_method": "quip"}, "quip"),
        ("bitsandbytes nf4", {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type 'nf3' is not built"),
        ("torchao 8 bits", {"quant_type": "int4_weight_only"}, "quant_type 'int4_weight_only' is not built"),
        ("auto-round, gptq", {"packing_format": "auto_round:mxfp"}, "packing_format 'auto_round:mxfp'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    name: str, changes: dict[str, Any], says: str, pair: Any, decoder: Any
) -> None:
    stored, _ = pair(name)
    change_config(stored, **changes)
    with pytest.raises(ModelError, match=says):
        decoder(stored)


@pytest.mark.parametrize("name", ["packed 4 bits", "float8 one scale", "float8 modelopt"])
def test_scales_of_keys_and_values_may_be_there(name: str, pair: Any, decoder: Any, run: Any) -> None:
    stored, floats = pair(name)
    owners = ("", "k_proj.", "v_proj.")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for at in (0, 1):
            for owner in owners:
                tensors[f"model.layers.{at}.self_attn.{owner}k_scale"] = torch.tensor(0.5)
                tensors[f"model.layers.{at}.self_attn.{owner}v_scale"] = torch.tensor([0.5])

    change_tensors(stored, change)
    for mine, right in zip(
        run(decoder(stored), PROMPTS, PLAN), run(decoder(floats), PROMPTS, PLAN), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_a_missing_scale_is_named(pair: Any, decoder: Any) -> None:
    stored, _ = pair("gptq 4 bits")
    change_tensors(stored, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.scales"))
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\.mlp\.up_proj\.scales"):
        decoder(stored)


def test_a_group_that_is_not_there_is_named(pair: Any, decoder: Any) -> None:
    stored, _ = pair("gptq act-order")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.g_idx"][7] = 99

    change_tensors(stored, change)
    with pytest.raises(ModelError, match=r"down_proj.*g_idx names group 99 of 5"):
        decoder(stored)


def test_float8_that_is_no_number_is_refused(pair: Any, decoder: Any) -> None:
    stored, _ = pair("float8 blocks")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[3, 5] = 0x7F

    change_tensors(stored, change)
    with pytest.raises(ModelError, match="down_proj: 1 of 15360 values are NaN"):
        decoder(stored)


def test_parts_of_a_fused_layer_must_be_alike(pair: Any, decoder: Any) -> None:
    stored, _ = pair("awq")
    change_config(stored, modules_to_not_convert=["layers.0.self_attn.q_proj"])
    with pytest.raises(ModelError, match=r"qkv_proj are quantized differently .*q_proj: floats"):
        decoder(stored)


def test_sizes_are_those_that_divide() -> None:
    assert all(SIZES[name] % 32 == 0 for name in ("hidden_size", "intermediate_size"))
