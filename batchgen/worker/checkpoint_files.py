"""A model folder as Hugging Face has it, of a GGUF file too: config.json, tokenizer files, weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchgen.errors import SinkError, UnsupportedModelError
from batchgen.models.gguf_file import GGUFFile
from batchgen.models.hf_config import config_from_hf
from batchgen.models.location import TOKENIZER_FILES, ModelLocation
from batchgen.models.model_config import ModelConfig
from batchgen.tokenizer.gguf import build_from_gguf

# Of a shard. Tensors are in memory until theirs is written.
_SHARD_BYTES = 2 << 30
_NOT_COPIED = ("config.json", "model.safetensors.index.json")
_NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "pad_token_id"}


def config_json(location: ModelLocation, shape: ModelConfig) -> dict[str, Any]:
    """The model's config.json; one that says the same of a GGUF file.

    Raises:
        UnsupportedModelError: config.json has no words for what the file says.
    """
    found = location.read_json("config.json")
    if found is not None:
        return found
    import transformers

    file = GGUFFile(location.path)
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedModelError(
            f"{location.name}: the file holds rotary frequencies of its own, which config.json cannot say; "
            f"take the model's original folder"
        )
    config_class = getattr(transformers, shape.architecture).config_class
    config: dict[str, Any] = {
        "architectures": [shape.architecture],
        "model_type": config_class.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": {"rope_type": shape.rope.kind, "rope_theta": shape.rope.theta},
    }
    if shape.rope.kind == "linear":
        config["rope_parameters"]["factor"] = shape.rope.factor
    if shape.windows[0] is not None:
        config |= {"sliding_window": shape.windows[0], "use_sliding_window": True, "max_window_layers": 0}
    if not all(shape.uses_rope):
        config["no_rope_layers"] = [int(each) for each in shape.uses_rope]
    for kind in _NAMES.values():
        if (index := file.get(f"tokenizer.ggml.{kind.replace('pad', 'padding')}")) is not None:
            config[kind] = index
    said = config_from_hf(config, location.name)
    for name in ModelConfig.__dataclass_fields__:
        if getattr(said, name) != getattr(shape, name):
            raise UnsupportedModelError(
                f"{location.name}: config.json cannot say the file's {name}, {getattr(shape, name)!r:.80}; "
                f"take the model's original folder"
            )
    return config


def write_tokenizer(location: ModelLocation, folder: Path) -> None:
    """Copy the tokenizer's files and the generation's defaults; make them of what a GGUF file holds."""
    if location.kind == "folder":
        for file in sorted({file for pattern in TOKENIZER_FILES for file in location.path.glob(pattern)}):
            if file.name not in _NOT_COPIED:
                shutil.copy(file, folder / file.name)
        return
    from transformers import PreTrainedTokenizerFast

    gguf = GGUFFile(location.path)
    backend, facts = build_from_gguf(gguf)
    names = {name: text for name, text in facts["special_names"].items() if isinstance(text, str)}
    made: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]
    made.chat_template = gguf.get("tokenizer.chat_template")
    made.save_pretrained(folder)
    ends = [*facts["eos_token_ids"]]
    defaults = {"eos_token_id": ends if len(ends) != 1 else ends[0], "bos_token_id": facts["bos_token_id"]}
    write_json(folder / "generation_config.json", {k: v for k, v in defaults.items() if v not in (None, [])})


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ShardWriter:
    """Tensors into safetensors files, each written as soon as it is full.

    Args:
        folder: of the files.
        shard_bytes: when one is full.
    """

    def __init__(self, folder: Path, shard_bytes: int = _SHARD_BYTES):
        self._folder, self._shard_bytes = folder, shard_bytes
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._held_bytes = self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; it may be a view of memory that goes away when this returns."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self._shard_bytes:
            self._write()
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self.num_bytes += size

    def finish(self) -> None:
        """Write what is left, and the index if there are several files."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._shard(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._shard(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self._folder / "model.safetensors.index.json", index)

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(self._held, self._shard(len(self._shards)), metadata={"format": "pt"})
        except SafetensorError as error:
            raise SinkError(f"{self._folder}: weights cannot be written: {error}") from error
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _shard(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def stored_dtype(name: str | None) -> torch.dtype:
    """The dtype that a checkpoint's floats are written in: as they were; float16 where nobody says."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(name or "", torch.float16)
