"""AdapterFacts: what an adapter's files say without torch: its ranks, its modules, its content as a hash."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import ConfigError, ModelError, nearest
from batchgen.lora.peft_config import PeftConfig

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Longer than any header that safetensors itself would write or read.
_MAX_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 1 << 20
# Of what was trained and how, and by whom: nothing that is computed depends on it. All else counts.
_FREE_KEYS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "init_lora_weights",
        "lora_dropout",
        "loftq_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    }
)
# A's first axis is the rank, whatever the kind of layer.
_A_NAME = re.compile(r"\.lora_(embedding_)?A(\.weight)?$")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in its file: dtype as safetensors names it, shape, first and last byte + 1."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """A LoRA adapter on this disk.

    Args:
        path: its folder.
        config: adapter_config.json as it is.
        max_rank: the largest of its modules.
        num_modules: modules that it changes by a pair of matrices.
        content_hash: of its tensors and of the settings that they are used by, in hex; names of files, of the
            base model and what concerns training play no part.
    """

    path: Path
    config: Mapping[str, Any]
    max_rank: int
    num_modules: int
    content_hash: str


def check_adapter(adapter: str, beside: Path | None = None) -> AdapterFacts:
    """Find an adapter and look at its files; of its tensors only their shapes.

    Args:
        adapter: a folder as peft writes it, or a hub id.
        beside: where a folder that is not there was looked for, to name the nearest; by default the working
            directory.

    Raises:
        ConfigError: there is none; says what to do.
        ModelError: its files are no LoRA adapter of peft's, or one of a kind that is not built.
    """
    folder = find_adapter(adapter, beside)
    config = read_config(folder)
    places = tensor_places(folder)
    ranks = [place.shape[0] for name, place in places.items() if _A_NAME.search(name) and place.shape]
    read = PeftConfig.of(config, str(folder / CONFIG_FILE))
    return AdapterFacts(
        path=folder,
        config=config,
        # A rank that no tensor has is that of a pattern that names no module.
        max_rank=max(ranks, default=max(read.r, *read.rank_pattern.values(), 0)),
        num_modules=len(ranks),
        content_hash=_content_hash(folder / TENSOR_FILE, config, places),
    )


def find_adapter(adapter: str, beside: Path | None = None) -> Path:
    """The folder of an adapter, fetched from the hub if it is not here; arguments as in `check_adapter`.

    Raises:
        ConfigError: neither a folder with an adapter nor on the hub.
    """
    path = Path(adapter).expanduser()
    if path.is_file():
        raise ConfigError(f"{adapter!r} is a file; name the folder that holds {CONFIG_FILE}")
    if path.is_dir():
        return _checked(path.resolve(), adapter)
    folder = (beside or Path()) / path.parent
    match = nearest(path.name, [entry.name for entry in folder.iterdir()] if folder.is_dir() else [])
    missing = f"no such folder {adapter!r}"
    if match is not None:
        missing += f" (did you mean {str(path.parent / match)!r}?)"
    if _HUB_ID.fullmatch(adapter) is None:
        raise ConfigError(missing)
    return _checked(_from_hub(adapter, missing), adapter)


def _checked(folder: Path, adapter: str) -> Path:
    if not (folder / CONFIG_FILE).is_file():
        what = "a model" if (folder / "config.json").is_file() else "no adapter"
        raise ConfigError(f"{adapter!r} holds {what}: an adapter of peft's has an {CONFIG_FILE}")
    if not (folder / TENSOR_FILE).is_file():
        if (folder / _PICKLED_FILE).is_file():
            raise ConfigError(
                f"{adapter!r} holds {_PICKLED_FILE}, which may run code when it is read; save it as "
                f"safetensors (peft: save_pretrained(..., safe_serialization=True))"
            )
        raise ConfigError(f"{adapter!r} holds an {CONFIG_FILE} but no {TENSOR_FILE}")
    return folder


def _from_hub(adapter: str, missing: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(adapter, allow_patterns=[CONFIG_FILE, TENSOR_FILE, _PICKLED_FILE]))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{missing}, the hub cannot be reached, and its cache has no copy; download it first, or give "
            f"a folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{missing}, and not to be had from the hub: {reason}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, of a LoRA adapter.

    Raises:
        ModelError: it is no JSON object, or of another kind of adapter.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold a JSON object, not a {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters are read")
    return config


def tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """Name -> place of every tensor, by the header of the file.

    Raises:
        ModelError: the file is no safetensors file, or ends before its last tensor.
    """
    path = folder / TENSOR_FILE
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError("its header is cut short")
            header = json.loads(file.read(length))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = TensorPlace(entry["dtype"], tuple(entry["shape"]), start, stop)
        if any(place.stop > size for place in found.values()):
            raise ValueError("it ends before its last tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error})") from error
    return found


def _content_hash(path: Path, config: Mapping[str, Any], places: Mapping[str, TensorPlace]) -> str:
    # What is not set is written by some versions of peft and left out by others.
    counted = {
        key: sorted(value) if key == "target_modules" and isinstance(value, list) else value
        for key, value in config.items()
        if key not in _FREE_KEYS and value is not None and value is not False and value not in ([], {})
    }
    # Within a pattern the order counts: the first that matches is taken.
    digest = hashlib.sha256(json.dumps(dict(sorted(counted.items()))).encode())
    with path.open("rb") as file:
        for name in sorted(places):
            place = places[name]
            digest.update(json.dumps([name, place.dtype, place.shape]).encode())
            file.seek(place.start)
            left = place.stop - place.start
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                digest.update(piece)
                left -= len(piece)
    return digest.hexdigest()
