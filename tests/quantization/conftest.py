"""Fixtures: tiny models whose sizes divide into groups, text, logits; and what a compressed folder means."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from batchgen.kernels.ops import choose
from batchgen.models.decoder import Decoder
from batchgen.tiny_models import tiny_model, write_folder
from batchgen.worker.model_files import ModelFiles
from batchgen.worker.whole_logits import whole_logits

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 32,
}


@pytest.fixture(scope="session")
def sizes() -> dict[str, Any]:
    return SIZES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tiny_model(**SIZES), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few thousand bytes of text, each a token, as JSON lines."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [
        {"text": f"Row {number} is {number * number % 97} of some rows, and it is here.", "n": number}
        for number in range(60)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


@pytest.fixture(scope="session")
def build() -> Callable[..., Decoder]:
    """A model of a folder or file, with a cache for one text."""

    def build(path: Path | str, quantization: str | None = None, backend: str | None = None) -> Decoder:
        files = ModelFiles(str(path))
        kernels = choose("cpu", "float32", backend=backend, head_dim=files.shape.head_dim)
        model = files.build(
            kernels, dtype="float32", quantization=quantization, kv_dtype="float32",
            device=torch.device("cpu"), max_len=128, block_size=16,
        )  # fmt: skip
        layout = model.kv_layout
        model.bind_kv([kernels.allocate_kv(layout.spec, 16, model.device) for _ in range(layout.num_places)])
        return model

    return build


@pytest.fixture(scope="session")
def logits() -> Callable[[Decoder, list[int]], Tensor]:
    return lambda model, ids: torch.cat([rows.clone() for rows in whole_logits(model, ids)])


@pytest.fixture(scope="session")
def as_floats() -> Callable[[Path], tuple[Any, int]]:
    return read_as_floats


def nibbles(words: Tensor, count: int) -> np.ndarray:
    """Eight codes of each word of a row, the lowest four bits first."""
    each = [words.numpy().view(np.uint32) >> (4 * place) & 15 for place in range(8)]
    return np.stack(each, axis=-1).reshape(len(words), -1)[:, :count].astype(np.float32)


def decoded(stored: dict[str, Tensor], module: str, bits: int) -> np.ndarray:
    """A module's weight by the formulas of the format."""
    scale = stored[f"{module}.weight_scale"].float().numpy()
    if f"{module}.weight" in stored:
        return stored[f"{module}.weight"].float().numpy() * scale
    outputs, inputs = stored[f"{module}.weight_shape"].tolist()
    words = stored[f"{module}.weight_packed"]
    if bits == 8:
        return (words.numpy().view(np.uint8).astype(np.float32) - 128) * scale
    zero = stored.get(f"{module}.weight_zero_point")
    points = np.full_like(scale, 8) if zero is None else nibbles(zero.T.contiguous(), outputs).T
    spread = inputs // scale.shape[1]
    return (nibbles(words, inputs) - points.repeat(spread, 1)) * scale.repeat(spread, 1)


def read_as_floats(out: Path) -> tuple[Any, int]:
    """transformers' model with the weights that a folder means; and how many were decoded."""
    stored = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    groups = config.pop("quantization_config")["config_groups"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    model.config._attn_implementation = "eager"
    count = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.weight_scale" not in stored:
                parameter.copy_(stored[name])
                continue
            bits = {group["weights"]["num_bits"] for group in groups.values()}.pop()
            parameter.copy_(torch.from_numpy(decoded(stored, module, bits)))
            count += 1
    return model, count
