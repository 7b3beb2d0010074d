"""`quantize`: what its folders mean, decoded by the format's formulas in numpy, is what they run with."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from batchgen.api.quantize import quantize
from batchgen.errors import BatchgenError, ConfigError, InputError, SinkError, UnsupportedModelError
from batchgen.models.weight_source import SafetensorsSource
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf
from batchgen.worker.checkpoint_files import ShardWriter

IDS = random_ids(90, seed=3)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "int4": ("LlamaForCausalLM", {}, {"scheme": "int4"}),
    "int4 zero points": ("LlamaForCausalLM", {}, {"scheme": "int4", "zero_points": True, "group_size": 32}),
    "int4 by text": ("LlamaForCausalLM", {}, {"scheme": "int4", "samples": 6, "length": 100}),
    "int4 tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {"scheme": "int4"}),
    "int4 biases": ("Qwen2ForCausalLM", {}, {"scheme": "int4"}),
    "int4 windows": ("MistralForCausalLM", {"sliding_window": 7}, {"scheme": "int4", "group_size": 16}),
    "int8": ("Qwen3ForCausalLM", {}, {"scheme": "int8"}),
    "fp8": ("LlamaForCausalLM", {"attention_bias": True}, {"scheme": "fp8"}),
    "fp8 by text": ("LlamaForCausalLM", {}, {"scheme": "fp8", "samples": 3, "length": 64}),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_ours_and_transformers_read_the_same_logits(
    case: str, tmp_path: Path, texts: Path, sizes: Any, build: Any, logits: Any, as_floats: Any
) -> None:
    architecture, model, options = CASES[case]
    if "samples" in options:
        options = {**options, "data": str(texts)}
    original = tiny_model(architecture, **sizes, **model)
    made = quantize(
        str(write_folder(original, tmp_path / "floats")), tmp_path / "out", use_tqdm=False, **options
    )
    assert made.num_layers == 14
    floats = original(torch.tensor([IDS])).logits[0]
    decoder, count = as_floats(tmp_path / "out")
    assert count == 14
    expected = decoder(torch.tensor([IDS])).logits[0]
    assert 1e-3 < float((expected - floats).norm() / floats.norm()) < 0.5
    found = logits(build(tmp_path / "out"), IDS)
    if options["scheme"] == "int8":  # activations are rounded, too
        assert float((found - expected).norm() / expected.norm()) < 0.05
    else:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def test_the_config_says_what_other_readers_ask_for(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scheme": "int4", "group_size": 32, "zero_points": True}
    made = quantize(str(folder), tmp_path / "out", use_tqdm=False, **options)
    assert (made.group_size, made.folder) == (32, tmp_path / "out")
    # 4 bits, and for 32 of them a scale of 32 bits (the model's own dtype) and a zero point of 4.
    assert made.bits_per_weight == pytest.approx(4 + 36 / 32, rel=0.02)
    config = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["ignore"] == ["lm_head"]
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    assert {key: group["weights"][key] for key in weights} == weights
    names = {file.name for file in made.folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder, made.folder)]
    assert tokenizers[0]("some text")["input_ids"] == tokenizers[1]("some text")["input_ids"]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_int8_leaves_the_inputs_of_down_proj_in_floats(folder: Path, tmp_path: Path) -> None:
    out = quantize(str(folder), tmp_path / "out", scheme="int8", use_tqdm=False).folder
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    first, second = config["config_groups"].values()
    assert re.match(first["targets"][0].removeprefix("re:"), "model.layers.0.mlp.down_proj")
    assert first["input_activations"] is None and first["format"] == "pack-quantized"
    assert second["input_activations"]["dynamic"] and second["format"] == "int-quantized"
    assert config["format"] == "mixed-precision"


@torch.no_grad()
def test_a_gguf_file_becomes_a_folder(
    tmp_path: Path, sizes: Any, build: Any, logits: Any, as_floats: Any
) -> None:
    original = tiny_model(tie_word_embeddings=True, **sizes)
    file = write_gguf(original, tmp_path / "tiny.gguf")
    out = quantize(str(file), tmp_path / "out", scheme="fp8", use_tqdm=False).folder
    expected = as_floats(out)[0](torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(build(out), IDS), expected, rtol=1e-3, atol=2e-3)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("ab")["input_ids"] == [97, 98]
    assert tokenizer.eos_token_id == 257
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 257


def test_text_makes_layers_better_for_such_text(
    folder: Path, texts: Path, tmp_path: Path, build: Any, logits: Any
) -> None:
    ids = list(json.loads(texts.read_text().splitlines()[40])["text"].encode())
    floats = logits(build(folder), ids)
    errors = {}
    for name, options in {"blind": {}, "seeing": {"data": str(texts), "samples": 40, "length": 64}}.items():
        out = quantize(str(folder), tmp_path / name, scheme="int4", use_tqdm=False, **options).folder
        errors[name] = float((logits(build(out), ids) - floats).norm())
    assert errors["seeing"] < 0.9 * errors["blind"]


def test_large_checkpoints_are_several_files(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=4000)
    tensors = {f"t{number}": torch.full((10, 50), float(number)) for number in range(5)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    assert writer.num_bytes == 10000
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    source = SafetensorsSource(tmp_path)
    assert set(source.shapes) == set(tensors)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "int3"}, ConfigError, r"scheme 'int3' is not built \(built: int4, int8, fp8\)"),
        (
            {"group_size": 48},
            ConfigError,
            r"groups of 48 \(the hidden size, 64\); it does in .* 64, 32",
        ),
        ({"group_size": 4}, ConfigError, "groups of 4 "),
        ({"scheme": "fp8", "group_size": 32}, ConfigError, "fp8 has a scale for each output; leave it out"),
        ({"samples": 0}, ConfigError, "samples must be 1 or more; got 0"),
        ({"data": "nowhere.jsonl"}, InputError, "nowhere.jsonl"),
    ],
)
def test_wrong_wishes_are_refused(
    options: dict[str, Any], error: type[BatchgenError], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        quantize(str(folder), tmp_path / "out", use_tqdm=False, **options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over_and_nothing_left_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(ConfigError, match="is there already and not an empty folder"):
        quantize(str(folder), out, use_tqdm=False)
    assert (out / "mine").read_text() == "kept"
    (out / "mine").unlink()

    def full(self: ShardWriter) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", full)
        with pytest.raises(SinkError, match="No space left"):
            quantize(str(folder), out, use_tqdm=False)
    assert list(tmp_path.iterdir()) == [out]
    quantize(str(folder), out, scheme="fp8", use_tqdm=False)
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        quantize(str(out), tmp_path / "again", use_tqdm=False)
