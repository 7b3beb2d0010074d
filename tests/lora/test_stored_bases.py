"""Adapters over checkpoints of few bits: what they add is the same as over the floats that those mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.tiny_adapters import ALL_LINEAR, write_adapter
from batchgen.tiny_checkpoints import awq, float8, gptq, packed_integers, plain_integers, write_pair
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf
from batchgen.tiny_tool_checkpoints import one_to_a_byte, outlier_integers, table_bits

pytestmark = pytest.mark.slow

PROMPT = random_ids(29, seed=4)
FORMATS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "gptq": (gptq, (4, 32), {}),
    "gptq act-order": (gptq, (4, 32), {"act_order": True}),
    "awq": (awq, (32,), {}),
    "packed": (packed_integers, (4, 32), {}),
    "weights of 8 bits": (plain_integers, (), {"rounds_inputs": False}),
    "weights and inputs of 8 bits": (plain_integers, (), {"rounds_inputs": True}),
    "float8": (float8, ("block",), {}),
    "nf4": (table_bits, ("nf4",), {}),
    "bitsandbytes 8 bits": (outlier_integers, (), {}),
    "torchao": (one_to_a_byte, (4, 32), {}),
}
# Where inputs are rounded too, the base itself is off by this much.
ROUNDED_INPUTS = 0.05


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "kind",
    [
        {"rank": 6, "targets": (*ALL_LINEAR, "embed_tokens", "lm_head")},
        {"targets": ("q_proj",), "modules_to_save": ["o_proj", "up_proj", "lm_head"]},
    ],
)
def test_an_adapter_adds_the_same_over_few_bits(
    name: str, kind: dict[str, Any], tmp_path: Path, adapted: Any
) -> None:
    make, arguments, options = FORMATS[name]
    stored, floats = write_pair(tmp_path, *make(*arguments, **options))
    adapter = write_adapter(tmp_path / "a", floats, **kind)
    found = []
    for folder in (stored, floats):
        model = adapted(folder)
        content = model.load(adapter)
        found.append([model.logits([PROMPT], [each])[0] for each in (None, content)])
    (base, mine), (float_base, theirs) = found
    tolerance = ROUNDED_INPUTS if name in ("weights and inputs of 8 bits", "bitsandbytes 8 bits") else 1e-4
    assert error(base, float_base) < tolerance and error(mine, theirs) < tolerance
    assert error(theirs, float_base) > 0.1, "the adapter does something"


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("quantization", [None, "gguf", "int8"])
def test_files_of_gguf_take_adapters_of_the_model_that_they_were_made_of(
    architecture: str, quantization: str | None, tmp_path: Path, adapted: Any
) -> None:
    # Query and key rows of some families stand in another order there.
    made = tiny_model(
        architecture, hidden_size=96, intermediate_size=160, attention_bias=architecture[0] == "L"
    )
    folder = write_folder(made, tmp_path / "folder")
    file = write_gguf(made, tmp_path / "it.gguf", "Q8_0")
    kind = {"bias": "all"} if architecture[0] == "L" else {}
    adapter = write_adapter(tmp_path / "a", folder, targets=(*ALL_LINEAR, "embed_tokens", "lm_head"), **kind)
    found = []
    for model in (adapted(folder), adapted(file, quantization=quantization)):
        content = model.load(adapter)
        found.append([model.logits([PROMPT], [each])[0] for each in (None, content)])
    (base, theirs), (file_base, mine) = found
    rounding = error(file_base, base)
    assert rounding < 0.08
    assert error(mine, theirs) < 2 * rounding + 1e-4
    assert error(theirs, base) > 0.3
