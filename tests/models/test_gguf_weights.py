"""GGUF files: every storage type that is read, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from batchgen.errors import ModelError, UnsupportedModelError, WeightsError
from batchgen.models.gguf_file import GGUFFile
from batchgen.models.gguf_weights import READ_TYPES, GGUFSource, hf_name
from batchgen.models.hf_config import config_from_hf
from batchgen.models.model_config import ModelConfig
from batchgen.quantization.gguf import KINDS, decode_blocks
from batchgen.tiny_models import random_ids, tiny_model, write_gguf

PROMPT = random_ids(19, seed=6)
# Where a block has scales of 16 bits, by the number of its type.
HALVES = {
    2: [0],
    3: [0, 2],
    6: [0],
    7: [0, 2],
    8: [0],
    10: [80, 82],
    11: [108],
    12: [0, 2],
    13: [0, 2],
    14: [208],
}
# Rows must be multiples of a block: 32 values.
SIZES_FOR_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_files_give_the_logits_of_their_dequantized_weights(
    quantization: str, tmp_path: Path, decoder: Any, run: Any, truth: Any
) -> None:
    original = tiny_model("Qwen3ForCausalLM", **SIZES_FOR_BLOCKS)
    kind = GGMLQuantizationType[quantization]
    path = write_gguf(original, tmp_path / "tiny.gguf", quantization)
    # transformers' own model, given the numbers that the file can hold.
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.dim() == 2:
                held = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(np.array(held)))
    ours, theirs = run(decoder(path), [PROMPT], [[19]])[0], truth(original, [PROMPT])[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_blocks_that_are_kept_give_the_bits_of_dequantized_ones(
    quantization: str, architecture: str, tmp_path: Path, decoder: Any, run: Any
) -> None:
    path = write_gguf(tiny_model(architecture, **SIZES_FOR_BLOCKS), tmp_path / "tiny.gguf", quantization)
    kept, floats = (decoder(path, backend="cpu", quantization=each) for each in ("gguf", None))
    assert torch.equal(run(kept, [PROMPT], [[19]])[0], run(floats, [PROMPT], [[19]])[0])
    sizes = [sum(tensor.nbytes for tensor in model.layers[0].down.tensors()) for model in (kept, floats)]
    assert sizes[0] < 0.35 * sizes[1]


@pytest.mark.parametrize("type_id", KINDS, ids=lambda type_id: GGMLQuantizationType(type_id).name)
def test_decoded_blocks_are_what_the_gguf_package_makes_of_them(type_id: int) -> None:
    kind = KINDS[type_id]
    raw = np.random.default_rng(type_id).integers(0, 256, (5, 3 * kind.block_bytes), dtype=np.uint8)
    # Scales of 16 bits whose exponent is not that of NaN.
    raw.reshape(5, 3, -1)[:, :, [at + 1 for at in HALVES[type_id]]] &= 0x3F
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType(type_id))
    assert np.array_equal(decode_blocks(torch.from_numpy(raw), type_id).dense().numpy(), expected)


def write_single_tensor(path: Path, raw: np.ndarray, kind: GGMLQuantizationType) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def tiny_config() -> ModelConfig:
    return config_from_hf({**tiny_model().config.to_dict(), "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    "kind", [kind for kind in READ_TYPES if kind.name.endswith("_K")], ids=lambda kind: kind.name
)
def test_k_quants_are_read_as_the_gguf_package_reads_them(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    block_bytes = GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 120, (3, 2 * block_bytes), dtype=np.uint8)
    file = write_single_tensor(tmp_path / "k.gguf", raw, kind)
    source = GGUFSource(file, tiny_config())
    assert source.shapes["model.embed_tokens.weight"] == (3, 512)
    expected = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight").numpy(), expected)


def test_a_storage_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    raw = np.zeros((2, GGML_QUANT_SIZES[GGMLQuantizationType.IQ4_NL][1]), dtype=np.uint8)
    file = write_single_tensor(tmp_path / "iq.gguf", raw, GGMLQuantizationType.IQ4_NL)
    with pytest.raises(UnsupportedModelError, match=r"token_embd.weight is stored as IQ4_NL"):
        GGUFSource(file, tiny_config())


def test_frequency_divisors_come_from_the_file(tmp_path: Path, decoder: Any, run: Any, truth: Any) -> None:
    # Llama 3.1 files hold the blend of wavelengths as divisors instead of its parameters.
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    original = tiny_model(rope_parameters=rope)
    plain = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    divisors = plain.model.rotary_emb.inv_freq / original.model.rotary_emb.inv_freq
    path = write_gguf(original, tmp_path / "tiny.gguf", extra={"rope_freqs.weight": divisors})
    ours, theirs = run(decoder(path), [PROMPT], [[19]])[0], truth(original, [PROMPT])[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    without = write_gguf(original, tmp_path / "without.gguf")
    assert not torch.allclose(run(decoder(without), [PROMPT], [[19]])[0], theirs, atol=1e-2)


@pytest.mark.parametrize("keep", [10, 100, 3000])
def test_a_cut_off_file_is_refused(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf.*(not a GGUF file|cut-off)"):
        GGUFFile(path)


def test_a_file_without_its_last_tensors_is_refused(tmp_path: Path, decoder: Any) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises((WeightsError, ModelError), match="reaches past the end of the file"):
        decoder(path)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GGUFFile(path)


def test_the_file_parser_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tiny_model(attention_bias=True), tmp_path / "tiny.gguf", "F16")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.get(key) == field.contents(), key
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.offset == tensor.data_offset
        assert list(found.shape) == [int(size) for size in reversed(tensor.shape)]
        assert bytes(ours.raw(found, tensor.n_bytes)) == tensor.data.tobytes()


def test_unknown_names_are_kept(tmp_path: Path) -> None:
    assert hf_name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.3.ssm_a.weight") == "blk.3.ssm_a.weight"
