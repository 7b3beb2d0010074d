"""The adapters that tests write (tiny_adapters) are what peft reads: each tensor, and what they add up to."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from batchgen.tiny_adapters import ALL_LINEAR, ATTENTION, target_modules, write_adapter
from batchgen.tiny_models import random_ids, tiny_model, write_folder

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero": {"is_zero": True},
    "rslora": {"use_rslora": True, "rank": 16, "alpha": 16},
    "patterns": {
        "rank": 8,
        "rank_pattern": {"q_proj": 12, r"layers\.1\.mlp\.up_proj": 3},
        "alpha_pattern": {"v_proj": 32},
    },
    "one layer": {"layers": [1]},
    "bias of B": {"lora_bias": True, "targets": ATTENTION},
    "all biases": {"bias": "all", "targets": ("q_proj", "down_proj")},
    "ends": {"targets": (*ALL_LINEAR, "embed_tokens", "lm_head")},
    "ends stored": {"targets": ("embed_tokens", "lm_head"), "saves_embeddings": True},
    "whole modules": {"modules_to_save": ["lm_head", "norm"]},
    "dora": {"use_dora": True},
    "half": {"dtype": "float16"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tiny_model(attention_bias=True), tmp_path_factory.mktemp("base"))


def load(base: Path, adapter: Path | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is None:
        return model
    with warnings.catch_warnings():
        # Such as "Found missing adapter keys".
        warnings.simplefilter("error", UserWarning)
        return peft.PeftModel.from_pretrained(model, adapter).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.tensor([random_ids(20, seed=1)])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_every_tensor_and_they_change_what_the_model_says(
    base: Path, tmp_path: Path, kind: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, **KINDS[kind])
    written = load_file(adapter / "adapter_model.safetensors")
    wrapped = load(base, adapter)
    saves = bool(KINDS[kind].get("saves_embeddings"))
    known = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=saves)
    assert set(written) == set(known)
    for name, tensor in written.items():
        torch.testing.assert_close(known[name].float(), tensor.float(), rtol=0, atol=0)
    merged, alone = logits(wrapped.merge_and_unload()), logits(load(base))
    change = float((merged - alone).norm() / alone.norm())
    assert (change < 1e-6) if kind == "zero" else (0.05 < change < 5)


@pytest.mark.parametrize(
    ("module", "rank", "alpha"),
    [
        ("model.layers.0.self_attn.q_proj", 12, 8),
        ("model.layers.1.mlp.up_proj", 3, 8),
        ("model.layers.0.mlp.up_proj", 8, 8),
        ("model.layers.1.self_attn.v_proj", 8, 32),
    ],
)
def test_patterns_mean_what_peft_makes_of_them(
    base: Path, tmp_path: Path, module: str, rank: int, alpha: int
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, **KINDS["patterns"])
    written = load_file(adapter / "adapter_model.safetensors")
    a, b = (written[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    assert a.shape[0] == rank == b.shape[1]
    before = load(base).get_parameter(f"{module}.weight")
    after = load(base, adapter).merge_and_unload().get_parameter(f"{module}.weight")
    torch.testing.assert_close(after, before + alpha / rank * b @ a, rtol=1e-5, atol=1e-6)


def test_targets_are_ends_of_names() -> None:
    shapes = {
        f"model.layers.{layer}.{name}": (2, 2) for layer in (0, 1, 10) for name in ("q_proj", "xq_proj")
    }
    assert target_modules(shapes, ["q_proj"], [1]) == ["model.layers.1.q_proj"]
    assert len(target_modules(shapes, ["q_proj"])) == 3
