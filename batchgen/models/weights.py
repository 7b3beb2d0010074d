"""load_weights: tensors of a checkpoint, streamed one by one straight into a model's layers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.models.decoder import Decoder
from batchgen.quantization.base import Transform

# Buffers that old checkpoints carry and that are computed here.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_TIED = ("lm_head.weight", "model.embed_tokens.weight")


class WeightSource(Protocol):
    """A checkpoint: tensors by their Hugging Face names."""

    @property
    def where(self) -> str:
        """What the checkpoint is, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""

    def read(self, name: str) -> Tensor:
        """One tensor, in the file's dtype or dequantized. It may be a view of the file."""


class SafetensorsSource:
    """The safetensors files of a model folder, memory-mapped: one file, or several with an index.

    Args:
        folder: with model.safetensors, or model.safetensors.index.json and its shards.

    Raises:
        WeightsError: no such files, a shard that is not there, or a file that is damaged.
    """

    def __init__(self, folder: Path):
        self.where = str(folder)
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _safetensors_files(folder):
            for name, shape in _shapes_in(file).items():
                if name in self._file_of:
                    raise WeightsError(
                        f"{folder}: {name} is both in {self._file_of[name].name} and {file.name}"
                    )
                self._file_of[name], self.shapes[name] = file, shape

    def read(self, name: str) -> Tensor:
        """A view of the mapped file; the mapping ends with the tensor, so nothing piles up in memory."""
        from safetensors import safe_open

        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def load_weights(model: Decoder, source: WeightSource, transforms: Sequence[Transform] = ()) -> None:
    """Fill a model from a checkpoint.

    Names are compared before anything is read. The largest layers come first, while little else is in memory.

    Args:
        model: as built, without weights.
        source: the checkpoint.
        transforms: applied in order to every tensor.

    Raises:
        WeightsError: tensors are missing, left over, of the wrong shape or not finite; names them.
    """
    targets = model.weight_targets()
    names = _checked_names(model, source)
    groups: dict[int, list[str]] = {}
    for name in names:
        target, _ = targets[name.rpartition(".")[0]]
        groups.setdefault(id(target), []).append(name)

    def size(group: list[str]) -> int:
        return sum(torch.Size(source.shapes[name]).numel() for name in group)

    for group in sorted(groups.values(), key=size, reverse=True):
        for name in group:
            module, _, parameter = name.rpartition(".")
            target, part = targets[module]
            tensor = source.read(name)
            _check_finite(name, tensor, source)
            for transform in transforms:
                tensor = transform(name, tensor, source.read)
            try:
                target.load(part, parameter, tensor)
            except WeightsError as error:
                raise WeightsError(f"{source.where}: {name}: {error}") from error


def _check_finite(name: str, tensor: Tensor, source: WeightSource) -> None:
    """A single NaN would turn every text into the same token, with no other sign of it."""
    if tensor.dtype not in _FLOATS or bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return
    num_bad = int((~torch.isfinite(tensor)).sum())
    if num_bad:  # else only the sum was too large
        raise WeightsError(
            f"{source.where}: {name}: {num_bad} of {tensor.numel()} values are NaN or infinite; the "
            f"checkpoint is damaged"
        )


def _checked_names(model: Decoder, source: WeightSource) -> list[str]:
    """The names to load, in the file's order, once they are known to be just those that the model needs."""
    expected: set[str] = set()
    for module, (target, part) in model.weight_targets().items():
        expected |= {f"{module}.{parameter}" for index, parameter in target.missing() if index == part}
    found = [name for name in source.shapes if not name.endswith(_IGNORED_SUFFIXES)]
    if model.config.tie_embeddings and _TIED[0] in found:
        _check_tied(source)
        found.remove(_TIED[0])
    missing = sorted(expected.difference(found))
    extra = sorted(set(found) - expected)
    if missing or extra:
        problems = [f"missing {_listed(missing)}"] if missing else []
        problems += [f"not in the model: {_listed(extra)}"] if extra else []
        hint = ""
        if missing == [_TIED[0]]:
            hint = "; if the head is the embedding, config.json must say tie_word_embeddings: true"
        raise WeightsError(f"{source.where}: {'; '.join(problems)}{hint}")
    return found


def _check_tied(source: WeightSource) -> None:
    """A head stored beside a tied embedding must be the same numbers; then the embedding serves as both."""
    if _TIED[1] in source.shapes:
        head, embedding = source.read(_TIED[0]), source.read(_TIED[1])
        if head.shape == embedding.shape and torch.equal(head, embedding):
            return
    raise WeightsError(
        f"{source.where}: config.json says tie_word_embeddings: true, but {_TIED[0]} is there and differs "
        f"from {_TIED[1]}; if the model has a head of its own, set tie_word_embeddings: false, else remove "
        f"the tensor"
    )


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index}: not a safetensors index ({error})") from error
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise WeightsError(f"{folder}: the index names files that are not there: {_listed(absent)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return [folder / "model.safetensors"]
    if len(files) == 1:
        return files
    if files:
        raise WeightsError(
            f"{folder}: {len(files)} safetensors files without model.safetensors.index.json; "
            f"which of them make up the model?"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise WeightsError(
            f"{folder}: only pickled weights (.bin), which can run code when they are loaded, are there; "
            f"write safetensors with transformers: "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise WeightsError(f"{folder}: no safetensors file")


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            names: Iterable[str] = handle.keys()
            return {name: tuple(handle.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file}: damaged or cut-off safetensors file ({error})") from error
