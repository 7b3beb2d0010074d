"""WeightSource: a checkpoint's tensors by their Hugging Face names; and the safetensors files of a folder."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from batchgen.errors import WeightsError

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


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


class UntiedSource:
    """A checkpoint without a head of its own as one that has it: the embedding's table once more.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: WeightSource):
        self.where, self._source = source.where, source
        self.shapes = {**source.shapes, HEAD: source.shapes[TABLE]}

    def read(self, name: str) -> Tensor:
        """One tensor; that of the head is read like any other."""
        return self._source.read(TABLE if name == HEAD else name)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names of many, for messages."""
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
            raise WeightsError(f"{folder}: the index names files that are not there: {listed(absent)}")
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
