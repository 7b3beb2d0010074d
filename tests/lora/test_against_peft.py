"""Every option of an adapter, on every family: the logits are those of peft's merged model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.tiny_adapters import ALL_LINEAR, ATTENTION, write_adapter
from batchgen.tiny_models import random_ids

pytestmark = pytest.mark.slow

PROMPT = random_ids(37, seed=1)
BIASED = {"attention_bias": True, "mlp_bias": True}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1": {"rank": 1},
    "rank 12": {"rank": 12},
    "rank 512": {"rank": 512, "alpha": 512},
    # BS-17: alpha 16 at rank 16 scales by 4, not by 1.
    "rslora": {"rank": 16, "alpha": 16, "use_rslora": True},
    "patterns": {
        "rank": 8,
        "rank_pattern": {"q_proj": 12, r"layers\.1\.mlp\.up_proj": 3, "proj": 5},
        "alpha_pattern": {"v_proj": 32, r"1\.self_attn\..*": 2},
    },
    "rslora with patterns": {
        "use_rslora": True,
        "rank_pattern": {"k_proj": 9},
        "alpha_pattern": {"k_proj": 3},
    },
    "one layer": {"layers": [1]},
    "one target": {"targets": ("v_proj",)},
    "few targets": {"targets": ("q_proj", "up_proj", "down_proj")},
    "attention": {"targets": ATTENTION},
    "embedding": {"targets": ("embed_tokens",)},
    "head": {"targets": ("lm_head",)},
    "ends": {"targets": (*ALL_LINEAR, "embed_tokens", "lm_head")},
    "ends stored": {"targets": ("q_proj", "embed_tokens", "lm_head"), "saves_embeddings": True},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole table": {"modules_to_save": ["embed_tokens"]},
    "whole ends and a layer": {
        "targets": ("q_proj",),
        "modules_to_save": ["embed_tokens", "lm_head", "down_proj"],
    },
    "half": {"dtype": "float16"},
}
OPTIONS_WITH_BIAS: dict[str, dict[str, Any]] = {
    "bias of B": {"lora_bias": True},
    "all biases": {"bias": "all", "targets": ("q_proj", "down_proj")},
    "both": {"bias": "all", "lora_bias": True},
    "whole modules": {"targets": ("v_proj",), "modules_to_save": ["gate_proj", "q_proj", "o_proj"]},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 20}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
}


def check(
    folder: Path,
    adapter: Path,
    adapted: Callable[..., Any],
    expected: Callable[..., Tensor],
    *,
    merged: bool = True,
    **how: Any,
) -> None:
    made = adapted(folder, **how)
    content = made.load(adapter)
    (mine,) = made.logits([PROMPT], [content])
    theirs = expected(folder, adapter, PROMPT, merged=merged)
    (base,) = made.logits([PROMPT], [None])
    assert float((theirs - base).norm() / base.norm()) > 0.02, "the adapter does something"
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_logits_are_those_of_the_merged_model(
    option: str, tiny: Any, tmp_path: Path, adapted: Any, expected: Any
) -> None:
    folder = tiny()
    check(folder, write_adapter(tmp_path / "a", folder, **OPTIONS[option]), adapted, expected)


@pytest.mark.parametrize("option", OPTIONS_WITH_BIAS)
def test_biases_are_those_of_the_merged_model(
    option: str, tiny: Any, tmp_path: Path, adapted: Any, expected: Any
) -> None:
    folder = tiny(**BIASED)
    check(folder, write_adapter(tmp_path / "a", folder, **OPTIONS_WITH_BIAS[option]), adapted, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_adapters(
    family: str, tiny: Any, tmp_path: Path, adapted: Any, expected: Any
) -> None:
    architecture, config = FAMILIES[family]
    folder = tiny(architecture, **config)
    check(folder, write_adapter(tmp_path / "a", folder, rank=7), adapted, expected)


def test_biases_of_a_model_without_any_are_added(
    tiny: Any, tmp_path: Path, adapted: Any, expected: Any
) -> None:
    folder = tiny()
    # Such an adapter cannot be merged into the weights.
    adapter = write_adapter(tmp_path / "a", folder, lora_bias=True)
    check(folder, adapter, adapted, expected, merged=False)


@pytest.mark.parametrize("targets", [("embed_tokens",), ("lm_head",), ("q_proj", "embed_tokens", "lm_head")])
def test_a_tied_embedding_and_its_head_are_adapted_apart(
    targets: tuple[str, ...], tiny: Any, tmp_path: Path, adapted: Any, expected: Any
) -> None:
    folder = tiny(tie_word_embeddings=True)
    # Merging would write into the one table that both are; training saw them apart.
    adapter = write_adapter(tmp_path / "a", folder, targets=targets)
    check(folder, adapter, adapted, expected, merged=False)


@pytest.mark.parametrize("option", ["plain", "ends", "whole ends and a layer"])
def test_the_reference_kernels_say_the_same(
    option: str, tiny: Any, tmp_path: Path, adapted: Any, expected: Any
) -> None:
    folder = tiny()
    adapter = write_adapter(tmp_path / "a", folder, **OPTIONS[option])
    check(folder, adapter, adapted, expected, backend="reference")
