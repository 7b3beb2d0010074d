"""What is wrong with an adapter is said before anything runs: by key, with what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from batchgen.errors import BatchgenError, ConfigError, ModelError
from batchgen.lora.adapter_facts import check_adapter
from batchgen.lora.adapter_plan import AdapterPlan, plan_adapter
from batchgen.lora.base_modules import base_modules
from batchgen.models.hf_config import config_from_hf
from batchgen.tiny_adapters import write_adapter

SIZES = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "attention_bias": True,
}  # fmt: skip
BASE = base_modules(config_from_hf(SIZES))
SHAPES = {name: module.weight_shape for name, module in BASE.items()}

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def plan(folder: Path, max_rank: int | None = None) -> AdapterPlan:
    return plan_adapter(check_adapter(str(folder)), BASE, max_rank)


def changed(folder: Path, change: Change, **written: Any) -> Path:
    """An adapter whose configuration and tensors were changed by hand."""
    write_adapter(folder, SHAPES, **written)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def with_config(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def with_tensor(key: str, *shape: int, dtype: str = "float32") -> Change:
    return lambda config, tensors: tensors.update({key: np.ones(shape, dtype=dtype)})


def without(key: str) -> Change:
    def remove(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        del tensors[key]

    return remove


def renamed(old: str, new: str) -> Change:
    def rename(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for key in list(tensors):
            tensors[key.replace(old, new)] = tensors.pop(key)

    return rename


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_config(use_dora=True), "use_dora: DoRA is not built; merge the adapter"),
        (with_config(layer_replication=[[0, 2]]), "layer_replication: .* is not built"),
        (with_config(target_parameters=["mlp.w"]), "target_parameters: .* is not built"),
        (with_config(trainable_token_indices=[1]), "trainable_token_indices: .* is not built"),
        (with_config(alora_invocation_tokens=[1]), "alora_invocation_tokens: .* is not built"),
        (with_config(use_qalora=True), "use_qalora: QA-LoRA is not built"),
        (with_config(use_bdlora={"nblocks": 2}), "use_bdlora: block-diagonal LoRA is not built"),
        (with_config(arrow_config={"top_k": 3}), "arrow_config: .* is not built"),
        (with_config(kasa_config={"beta": 1}), "kasa_config: KaSA is not built"),
        (with_config(ensure_weight_tying=True), "ensure_weight_tying: .* is not built"),
        (with_config(lora_ga_config={"x": 1}), "lora_ga_config: LoRA-GA.* is not built"),
        (
            with_config(init_lora_weights="pissa_niter_4"),
            "init_lora_weights='pissa_niter_4' changed the weights",
        ),
        (with_config(init_lora_weights="olora"), "init_lora_weights='olora' changed the weights"),
        (with_config(use_newlora=0.5), "use_newlora=0.5 is not known here and may change"),
        (with_config(peft_type="LOHA"), "peft_type is 'LOHA'; only LORA adapters are read"),
        (with_config(bias="some"), "bias must be none, all or lora_only; got 'some'"),
        (with_config(r=0), "r must be a rank, 1 or more; got 0"),
        (with_config(lora_alpha="16"), "lora_alpha must be a number; got '16'"),
        (
            with_config(rank_pattern={"q_proj": 0}),
            "rank_pattern must be names of modules with numbers above 0",
        ),
        (with_config(alpha_pattern={"(": 1}), r"alpha_pattern: '\(' is no regular expression"),
        (with_config(r=8), r"lora_A.weight has rank 4, but r and rank_pattern say 8"),
        (without(Q_B), r"q_proj.lora_A.weight has no lora_B beside it; the adapter was not saved whole"),
        (without(Q_A), r"q_proj.lora_B.weight has no lora_A beside it"),
        (with_tensor(Q_B, 33, 4), r"q_proj.lora_B.weight has shape \[33, 4\], this model needs \[32, 4\]"),
        (with_tensor(Q_A, 4, 24, dtype="int32"), "q_proj.lora_A.weight is I32; adapters are read in"),
        (
            with_tensor(Q_A.replace("lora_A.weight", "lora_magnitude_vector"), 32),
            "magnitude_vector: DoRA is not",
        ),
        (
            with_tensor("base_model.model.model.norm.weight", 24),
            "model.norm .*adapters of norms are not built",
        ),
        (
            with_tensor(Q_A.replace("lora_A.weight", "weight"), 32, 24),
            "q_proj has both a pair .* and a weight",
        ),
        (
            with_tensor(Q_A.replace("lora_A.weight", "lora_C.weird"), 2),
            "lora_C.weird is no tensor that is known",
        ),
        (
            with_tensor("base_model.model.lm_head.weight", 41, 24),
            r"lm_head.weight has shape \[41, 24\], this model needs \[40, 24\]",
        ),
        (
            renamed("model.layers", "transformer.h"),
            "no module of this adapter is in the model; it has transf",
        ),
    ],
)
def test_an_adapter_that_cannot_be_right_is_refused_by_key(
    change: Change, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BatchgenError, match=message) as refused:
        plan(changed(tmp_path / "a", change))
    assert str(tmp_path / "a") in str(refused.value)


def test_an_adapter_of_another_base_is_refused_with_counts(tmp_path: Path) -> None:
    other = {name: tuple(32 if size == 24 else size for size in shape) for name, shape in SHAPES.items()}
    write_adapter(tmp_path / "a", other, base_model_name_or_path="some/other-model")
    with pytest.raises(ModelError, match=r"this model needs .* more differ\); .* 'some/other-model'"):
        plan(tmp_path / "a")


@pytest.mark.parametrize(
    ("rank", "pattern", "limit", "refused"),
    [
        (32, {}, 16, 32),
        (12, {}, 16, None),
        (16, {}, 16, None),
        (8, {"q_proj": 64}, 16, 64),
        (513, {}, None, 513),
    ],
)
def test_a_rank_over_the_limit_is_refused_with_the_setting(
    rank: int, pattern: dict[str, int], limit: int | None, refused: int | None, tmp_path: Path
) -> None:
    # BG-27
    write_adapter(tmp_path / "a", SHAPES, rank=rank, rank_pattern=pattern)
    if refused is None:
        assert plan(tmp_path / "a", limit).rank == rank
        return
    with pytest.raises(ConfigError) as found:
        plan(tmp_path / "a", limit)
    said = str(found.value)
    assert f"rank {refused}" in said
    assert f"set max_lora_rank: {refused}" in said if limit else "ranks up to 512 are built" in said


def test_modules_that_the_model_lacks_are_left_out_with_a_warning(tmp_path: Path) -> None:
    tower = {f"model.visual.blocks.{index}.q_proj": (24, 24) for index in range(5)}
    write_adapter(tmp_path / "a", {**SHAPES, **tower}, targets=("q_proj", "v_proj"))
    found = plan(tmp_path / "a")
    assert len(found.modules) == 6
    (warning,) = found.warnings
    assert warning.startswith("5 of its 11 modules are not in the model and are left out: model.visual.")


def test_targets_without_tensors_are_told(tmp_path: Path) -> None:
    def remove(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for key in [key for key in tensors if ".2.self_attn.v_proj" in key]:
            del tensors[key]

    found = plan(changed(tmp_path / "a", remove, targets=("q_proj", "v_proj")))
    (warning,) = found.warnings
    assert "nothing for 1 of the 6 modules" in warning and "layers.2.self_attn.v_proj" in warning


@pytest.mark.parametrize(
    ("targets", "written"),
    [
        ("all-linear", {}),
        (r".*\.(q_proj|v_proj)", {"targets": ("q_proj", "v_proj")}),
        (["q_proj", "embed_tokens"], {"targets": ("q_proj", "embed_tokens")}),
        (["q_proj", "v_proj"], {"targets": ("q_proj", "v_proj"), "layers": [0, 2]}),
    ],
)
def test_a_whole_adapter_has_no_warning(targets: Any, written: dict[str, Any], tmp_path: Path) -> None:
    found = plan(changed(tmp_path / "a", with_config(target_modules=targets), **written))
    assert found.warnings == ()


def test_scalings_are_those_of_the_first_pattern_that_matches(tmp_path: Path) -> None:
    write_adapter(
        tmp_path / "a", SHAPES, rank=8, alpha=16, rank_pattern={"(q|up)_proj": 4, "q_proj": 2},
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 3, "q_proj": 6},
    )  # fmt: skip
    modules = plan(tmp_path / "a").modules
    assert modules["model.layers.1.self_attn.q_proj"].scaling == 3 / 4
    assert modules["model.layers.0.self_attn.q_proj"].scaling == 6 / 4
    assert modules["model.layers.0.mlp.up_proj"].scaling == 16 / 4
    assert modules["model.layers.0.mlp.gate_proj"].scaling == 16 / 8


def test_a_file_of_pickles_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", SHAPES)
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin, which may run code"):
        plan(tmp_path / "a")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", SHAPES) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        plan(tmp_path / "a")


def test_modules_are_those_of_the_decoder(tmp_path: Path) -> None:
    from batchgen.kernels.ops import choose
    from batchgen.layers.linear import LinearLayer
    from batchgen.tiny_models import tiny_model, write_folder
    from batchgen.worker.model_files import ModelFiles

    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"):
        files = ModelFiles(str(write_folder(tiny_model(architecture), tmp_path / architecture)))
        kernels = choose("cpu", "float32", backend="reference", head_dim=files.shape.head_dim)
        import torch

        model = files.build(
            kernels, dtype="float32", quantization=None, kv_dtype="float32", device=torch.device("cpu"),
            max_len=64, block_size=16,
        )  # fmt: skip
        modules, targets = base_modules(files.shape), model.weight_targets()
        assert modules.keys() == targets.keys() | {"lm_head"}
        for name, (target, part) in targets.items():
            if isinstance(target, LinearLayer):
                found = modules[name]
                assert (found.layer, found.part) == (target.name, part)
                assert (found.inputs, found.outputs) == (target.in_features, target.part_sizes[part])
                assert found.has_bias == target.shape.has_bias
