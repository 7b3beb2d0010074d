"""The setting `quantization`: what it decides and says, what it refuses; what a load makes of it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.loading import telling
from batchgen.errors import UnsupportedModelError
from batchgen.kernels.ops import choose
from batchgen.models.family import MODELS
from batchgen.quantization.seen_inputs import mean_of
from batchgen.quantization.unquantized import Unquantized
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf
from batchgen.worker import load_while_running, machine_speed, precision
from batchgen.worker.machine_speed import product_speeds

PROMPTS = [random_ids(count, seed=count, vocab_size=256) for count in (5, 17, 40)]


def decision(runner: Any, name: str) -> str:
    return next(text for text in runner.info.decisions if text.startswith(f"{name}="))


def test_int8_is_told_wherever_results_are_explained(folder: Path, load: Any) -> None:
    info = load(folder, quantization="int8").info
    assert (info.resolved["quantization"], info.resolved["kv_cache_dtype"]) == ("int8", "int8")
    assert info.environment["quantization"] == "int8"
    assert info.reproducible
    assert load(folder).info.environment["quantization"] == "none"


def test_the_cache_keeps_the_type_that_was_asked_for(folder: Path, load: Any) -> None:
    runner = load(folder, quantization="int8", kv_cache_dtype="float32")
    assert runner.info.resolved["kv_cache_dtype"] == "float32"
    assert "as int8 weights" not in str(runner.info.decisions)


def test_a_row_gives_the_same_tokens_alone_asleep_and_from_a_gguf(
    tmp_path: Path, load: Any, generate: Any, generates_the_same: Any
) -> None:
    original = tiny_model(tie_word_embeddings=True)
    runner = load(write_folder(original, tmp_path / "folder"), quantization="int8")
    together = generates_the_same(runner, PROMPTS, 10)
    from_gguf = load(write_gguf(original, tmp_path / "tiny.gguf"), quantization="int8")
    assert generate(from_gguf, PROMPTS, 10) == together


@pytest.mark.parametrize(("int8", "chosen"), [(300.0, "int8"), (140.0, None)])
def test_auto_goes_by_the_machine_and_says_so(
    int8: float, chosen: str | None, folder: Path, load: Any,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    speeds = {"float32": 100.0, "int8": int8, "bfloat16": 50.0}
    monkeypatch.setattr(precision, "product_speeds", lambda kernels: speeds)
    with caplog.at_level(logging.INFO, "batchgen.worker"):
        runner = load(folder, quantization="auto")
    assert runner.info.resolved["quantization"] == chosen
    words = decision(runner, "quantization")
    assert f"100 GFLOP/s in float32 and {int8:.0f} in int8" in words
    assert any(record.message == words for record in caplog.records)


def test_auto_leaves_other_types_alone(folder: Path, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(precision, "product_speeds")
    runner = load(folder, quantization="auto", dtype="bfloat16")
    assert runner.info.resolved["quantization"] is None
    assert "not for bfloat16" in decision(runner, "quantization")


def test_rounding_is_said_before_it_begins_and_while_it_goes_on(
    folder: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_while_running, "_TELL_EVERY_S", 0.0)
    told: list[str] = []
    with telling(told.append):
        load(folder, quantization="int8")
    num_linears = 4 * tiny_model().config.num_hidden_layers + 1
    assert told[0] == f"loading {folder}, rounding its weights to int8"
    assert told[1:] == [f"{number} of {num_linears} weights rounded" for number in range(1, num_linears)]


def test_int8_that_is_slow_is_said_once(folder: Path, load: Any, caplog: pytest.LogCaptureFixture) -> None:
    load(folder, quantization="int8", kernel_backend="reference")
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "int8 runs on the reference kernels (forced), about ten times slower" in record.getMessage()
    caplog.clear()
    load(folder, kernel_backend="reference")
    load(folder, quantization="int8")
    assert "slower" not in caplog.text


def test_a_quantized_checkpoint_is_refused(tmp_path: Path, load: Any) -> None:
    model = tiny_model()
    model.config.quantization_config = {"quant_method": "quip", "bits": 4}
    write_folder(model, tmp_path)
    for asked in (None, "int8", "auto"):
        with pytest.raises(UnsupportedModelError, match=r"quantized \('quip'\), which is not built"):
            load(tmp_path, quantization=asked)


def test_a_family_whose_norms_do_not_fold_is_not_rotated(
    folder: Path, load: Any, generate: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rotated = load(folder, quantization="int8")
    assert rotated._memory.model.rotation is not None
    family = MODELS.get("LlamaForCausalLM")
    object.__setattr__(family, "has_foldable_norms", False)
    try:
        with caplog.at_level(logging.WARNING, "batchgen.worker"):
            plain = load(folder, quantization="int8")
    finally:
        object.__setattr__(family, "has_foldable_norms", True)
    assert plain._memory.model.rotation is None
    assert "Llama norms what a layer gives" in decision(plain, "rotation")
    assert "loses more precision" in caplog.text
    assert generate(plain, PROMPTS, 3)


def test_speeds_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = choose("cpu", "float32", head_dim=16)
    first = product_speeds(kernels, tmp_path)
    assert set(first) == {"float32", "int8", "bfloat16"}
    assert all(speed > 0 for speed in first.values())
    with monkeypatch.context() as patch:
        patch.delattr(machine_speed, "_measure")
        assert product_speeds(kernels, tmp_path) == first
    (kept,) = tmp_path.iterdir()
    monkeypatch.setattr(
        machine_speed, "_measure", lambda kernels: {"float32": 1.0, "int8": 2.0, "bfloat16": 3.0}
    )
    for broken in (
        "{",
        '{"float32": 0, "int8": 0, "bfloat16": 0}',
        '{"float32": NaN, "int8": 1, "bfloat16": 1}',
    ):
        kept.write_text(broken)
        assert product_speeds(kernels, tmp_path)["int8"] == 2.0
    kept.write_text('{"float32": 1, "int8": 7, "bfloat16": 1}')
    assert product_speeds(kernels, tmp_path)["int8"] == 7.0
    # What was measured with all instructions does not hold for fewer.
    monkeypatch.setattr(machine_speed, "machine_flags", lambda: ("-march=x86-64",))
    assert product_speeds(kernels, tmp_path)["int8"] == 2.0
    # A folder that cannot be written only means to measure again.
    assert product_speeds(kernels, tmp_path / kept.name / "below")["int8"] == 2.0


def test_mean_inputs_are_those_of_the_model(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny_model("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    write_folder(original, tmp_path)
    plain = load(tmp_path)._memory.model
    found: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(Unquantized, "wants_inputs", True)
    monkeypatch.setattr(
        Unquantized, "see_inputs", lambda self, shape, x: found.update({shape.name: mean_of(x)})
    )
    model = load(tmp_path)._memory.model
    for ours, theirs in zip(model.tensors(), plain.tensors(), strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()
    seen: dict[str, torch.Tensor] = {}
    for name, layer in original.named_modules():
        if name.endswith(("q_proj", "o_proj", "up_proj", "down_proj", "lm_head")):
            layer.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.update({name: inputs[0][0, 16:].double().mean(dim=0)})
            )
    ids = torch.randint(0, 300, (128,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        original(ids[None])
    fused = {"q_proj": "qkv_proj", "up_proj": "gate_up_proj"}
    for name, mean in seen.items():
        place, _, last = name.rpartition(".")
        ours = found[f"{place}.{fused.get(last, last)}" if place else name]
        torch.testing.assert_close(ours, mean, atol=1e-4, rtol=1e-3)
    assert len(found) == len(seen) == 4 * 2 + 1
