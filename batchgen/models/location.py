"""resolve_model: what a user wrote as the model -> the folder or GGUF file it names. No torch."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from batchgen.content_hash import content_hash
from batchgen.errors import ConfigError, ModelError, nearest

PACKAGE_PREFIX = "package:"
# A folder that holds one of these is a model's, or at least a tokenizer's.
_FOLDER_MARKS = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")

# Files of a model folder that can change what it generates; weights by any name.
_IDENTITY_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class ModelLocation:
    """Where a model lies on this machine.

    Args:
        kind: "folder" (config.json, safetensors, tokenizer files) or "gguf" (one file that holds everything).
        path: the folder or the file.
        name: what the user wrote, for messages.
        commit: of a hub repository, the commit that was taken; else None.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    commit: str | None = None

    def identity(self) -> dict[str, str]:
        """File name -> content hash, of every file that fixes weights, configuration and defaults."""
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, str]:
        if self.kind == "gguf":
            return {self.path.name: content_hash(self.path)}
        found = sorted({file for pattern in _IDENTITY_FILES for file in self.path.glob(pattern)})
        return {file.name: content_hash(file) for file in found}

    def read_json(self, file_name: str) -> dict[str, Any] | None:
        """A JSON file of a model folder, or None where there is none.

        Raises:
            ModelError: the file is no JSON object.
        """
        path = self.path / file_name
        if self.kind != "folder" or not path.is_file():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(data, dict):
            raise ModelError(f"{path}: must hold a JSON object, not a {type(data).__name__}")
        return data


def resolve_model(model: str, revision: str | None = None, *, tokenizer_only: bool = False) -> ModelLocation:
    """Find a model: a folder, a .gguf file, `package:NAME/FILE`, a hub id, or a file on the hub.

    Args:
        model: as the user wrote it; a file on the hub is `ORG/NAME/FILE.gguf`.
        revision: of a hub repository; a branch, tag or commit.
        tokenizer_only: fetch only small files of a hub repository.

    Raises:
        ConfigError: there is nothing of that name here or on the hub; says what to do.
    """
    if model.startswith(PACKAGE_PREFIX):
        return _gguf(_file_in_package(model), model)
    path = Path(model).expanduser()
    if path.is_file():
        return _gguf(path, model)
    if path.is_dir():
        return _folder(path, model)
    if path.exists():
        raise ConfigError(f"model {model!r}: neither a file nor a folder; name one of the two")
    if not _may_be_hub_id(model):
        raise ConfigError(f"model {model!r}: no such file or folder{_similar_beside(path)}")
    return _from_hub(model, revision, tokenizer_only)


def _gguf(path: Path, name: str) -> ModelLocation:
    if path.suffix.lower() != ".gguf":
        raise ConfigError(f"model {name!r}: a file must be a .gguf; give the folder for safetensors")
    return ModelLocation("gguf", path.resolve(), name)


def _folder(path: Path, name: str, commit: str | None = None) -> ModelLocation:
    files = sorted(path.glob("*.gguf"))
    if any((path / known).is_file() for known in _FOLDER_MARKS):
        return ModelLocation("folder", path.resolve(), name, commit)
    if not files:
        raise ConfigError(f"model {name!r}: the folder holds no model (neither config.json nor a .gguf file)")
    if len(files) == 1:
        return ModelLocation("gguf", files[0].resolve(), name, commit)
    listed = ", ".join(file.name for file in files)
    raise ConfigError(f"model {name!r}: the folder has several GGUF files; name one of {listed}")


def _file_in_package(model: str) -> Path:
    package, _, file_name = model.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package or not file_name:
        raise ConfigError(
            f"model {model!r}: write package:NAME/FILE, the file inside an installed Python package"
        )
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        from importlib.metadata import packages_distributions

        match = nearest(package, packages_distributions())
        hint = (
            f"; did you mean package:{match}/{file_name}?" if match else "; install the one that carries it"
        )
        raise ConfigError(f"model {model!r}: no Python package {package!r} is installed here{hint}")
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    files = [file.name for folder in folders for file in sorted(folder.glob("*.gguf"))]
    raise ConfigError(
        f"model {model!r}: the package has no such file; it has: {', '.join(files) or 'no GGUF file'}"
    )


def _may_be_hub_id(model: str) -> bool:
    repository, _ = _split_hub_name(model)
    return _HUB_ID.fullmatch(repository) is not None and not repository.lower().endswith(".gguf")


def _split_hub_name(model: str) -> tuple[str, str | None]:
    parts = model.split("/")
    if len(parts) >= 3 and parts[-1].lower().endswith(".gguf"):
        return "/".join(parts[:2]), "/".join(parts[2:])
    return model, None


def _similar_beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f" ({path.parent} does not exist)"
    match = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    return f"; did you mean {str(path.parent / match)!r}?" if match else ""


def _from_hub(model: str, revision: str | None, tokenizer_only: bool) -> ModelLocation:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, file_name = _split_hub_name(model)
    try:
        if file_name is not None:
            path = Path(hf_hub_download(repository, file_name, revision=revision))
            return ModelLocation("gguf", path, model, _commit_of(path))
        patterns = TOKENIZER_FILES if tokenizer_only else MODEL_FILES
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {model!r}: no such folder here, the hub cannot be reached, and its cache has no copy; "
            f"download it first, or give a folder, a .gguf file or package:NAME/FILE"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {model!r}: no such folder here, and not to be had from the hub{at}: {reason}"
        ) from error
    return _folder(path, model, _commit_of(path))


def _commit_of(path: Path) -> str | None:
    """The commit in a cache path .../snapshots/COMMIT/..."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None
