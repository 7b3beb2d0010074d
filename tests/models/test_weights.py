"""Loading checkpoints: what is refused and how it is named, shards, tied heads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.models.decoder import Decoder
from batchgen.tiny_models import random_ids, tiny_model, write_folder

PROMPT = random_ids(21, seed=4)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any], **config: Any) -> Path:
    """Edit the tensors of a folder, and keys of its config.json."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path, decoder: Any) -> None:
    folder = write_folder(tiny_model(), tmp_path)
    norm = "model.layers.1.input_layernorm.weight"

    change(folder, lambda t: t.update({"model.layers.0.self_attn.sink": t.pop(norm)}))
    with pytest.raises(WeightsError, match=f"missing {norm}; not in the model: .*self_attn.sink"):
        decoder(folder)

    change(folder, lambda t: t.update({norm: t.pop("model.layers.0.self_attn.sink")[:-1]}))
    with pytest.raises(WeightsError, match=rf"{norm}.*\[71\].*\[72\]"):
        decoder(folder)

    key = "model.layers.0.self_attn.k_proj.weight"
    change(folder, lambda t: t.update({norm: torch.ones(72), key: torch.ones(33, 72)}))
    with pytest.raises(WeightsError, match=rf"{key}.*\[33, 72\].*\[32, 72\]"):
        decoder(folder)


def test_numbers_that_are_none_are_refused(tmp_path: Path, decoder: Any) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    folder = write_folder(tiny_model(), tmp_path)
    change(folder, lambda t: t[key].view(-1)[5:7].fill_(float("nan")))
    with pytest.raises(WeightsError, match=f"{key}: 2 of 6912 values are NaN or infinite"):
        decoder(folder)
    # A sum that overflows is no fault.
    change(folder, lambda t: t[key].fill_(1e36))
    decoder(folder)


def test_integers_are_refused_where_no_scheme_is_named(tmp_path: Path, decoder: Any) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    folder = write_folder(tiny_model(), tmp_path)
    change(folder, lambda t: t.update({key: t[key].to(torch.int8)}))
    with pytest.raises(WeightsError, match=r"stored as torch.int8.*quantization_config"):
        decoder(folder)


@pytest.mark.parametrize("content", ["{", "[1]", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'])
def test_a_damaged_index_is_named(content: str, tmp_path: Path, decoder: Any) -> None:
    folder = write_folder(tiny_model(), tmp_path)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match="not a safetensors index"):
        decoder(folder)


def test_a_bias_that_the_config_does_not_announce_is_refused(tmp_path: Path, decoder: Any) -> None:
    folder = write_folder(tiny_model(attention_bias=True), tmp_path)
    change(folder, lambda t: None, attention_bias=False)
    with pytest.raises(WeightsError, match=r"not in the model: .*k_proj\.bias"):
        decoder(folder)


def test_shards_with_an_index_load_as_one(tmp_path: Path, decoder: Any, run: Any) -> None:
    original = tiny_model()
    whole = decoder(write_folder(original, tmp_path / "whole"))
    original.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    sharded = decoder(tmp_path / "shards")
    plan = [[len(PROMPT)]]
    assert torch.equal(run(sharded, [PROMPT], plan)[0], run(whole, [PROMPT], plan)[0])

    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(WeightsError, match="not there: model-00002"):
        decoder(tmp_path / "shards")


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path, decoder: Any) -> None:
    folder = write_folder(tiny_model(), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pickled.*save_pretrained"):
        decoder(folder)


def test_a_cut_off_file_is_named(tmp_path: Path, decoder: Any) -> None:
    folder = write_folder(tiny_model(), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged or cut-off"):
        decoder(folder)


def test_an_unknown_quantization_is_refused_by_name(tmp_path: Path, decoder: Any) -> None:
    folder = write_folder(tiny_model(), tmp_path)
    change(folder, lambda t: None, quantization_config={"quant_method": "quip", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"'quip'.*not built"):
        decoder(folder)


class TestTiedHeads:
    """BG-29: flag and tensors may contradict each other; then the files are refused with what to do."""

    def test_a_head_equal_to_the_tied_embedding_is_not_needed(self, tmp_path: Path, decoder: Any) -> None:
        folder = write_folder(tiny_model(tie_word_embeddings=True), tmp_path)
        change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        model: Decoder = decoder(folder)
        assert model.embedding.head is model.head

    def test_flag_true_and_another_head_is_refused(self, tmp_path: Path, decoder: Any) -> None:
        folder = write_folder(tiny_model(tie_word_embeddings=True), tmp_path)
        change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
        with pytest.raises(WeightsError, match="tie_word_embeddings: true, but lm_head"):
            decoder(folder)

    def test_flag_false_and_no_head_is_refused(self, tmp_path: Path, decoder: Any) -> None:
        folder = write_folder(tiny_model(), tmp_path)
        change(folder, lambda t: t.pop("lm_head.weight"))
        with pytest.raises(WeightsError, match=r"missing lm_head\.weight; .*tie_word_embeddings: true"):
            decoder(folder)

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_the_tied_embedding_is_the_head_itself(self, backend: str, tmp_path: Path, decoder: Any) -> None:
        original = tiny_model(tie_word_embeddings=True)
        model: Decoder = decoder(write_folder(original, tmp_path), backend=backend)
        rows = model.embedding(torch.tensor([0, 299, 7, 7]))
        assert torch.equal(rows, original.model.embed_tokens.weight[[0, 299, 7, 7]])
