"""Hub datasets: pinned to a commit, resolved to their files and read as files where the rows are the same."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from batchgen.errors import SourceError
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources.base import Source
from batchgen.jobs.sources.dataset_rows import IterableSource, MapStyleSource
from batchgen.jobs.sources.file_source import FileSource
from batchgen.jobs.sources.saved_folder import pick_split

# Builders of the datasets library whose files we read ourselves -> our format.
PACKAGED = {"parquet": "parquet", "json": "jsonl", "csv": "csv", "arrow": "arrow", "text": "text"}
# Of a builder's settings, those that say which files and not how they are read.
_NOT_READING = frozenset({"name", "version", "data_dir", "data_files", "description", "features"})


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A dataset at one commit.

    Args:
        commit: the full hash.
        folder: its files in the local cache, when the hub cannot be asked; else None.
    """

    commit: str
    folder: Path | None


def open_dataset(name: str, options: InputSpec, stored: Mapping[str, Any] | None = None) -> Source:
    """Open a dataset of the Hugging Face hub; offline, what the cache has of it.

    Args:
        name: the hub id.
        options: the input section.
        stored: the identity of the first run, whose commit a resume keeps.

    Raises:
        SourceError: no such dataset, configuration or split, or the hub cannot be reached.
    """
    from datasets import load_dataset, load_dataset_builder

    pinned = _pin(name, options.revision, stored)
    where: dict[str, Any] = {"path": str(pinned.folder or name), "name": options.name}
    if pinned.folder is None:
        where["revision"] = pinned.commit
    if options.data_files is not None:
        where["data_files"] = {split: list(files) for split, files in options.data_files.items()}
    try:
        builder = load_dataset_builder(**where)
    except (OSError, ValueError) as error:
        raise SourceError(f"dataset {name!r}: {error}") from None
    files = builder.config.data_files or {}
    is_slice = options.split is not None and any(mark in options.split for mark in "[+")
    split = str(options.split) if is_slice else pick_split(options.split, tuple(map(str, files)), name)
    facts = {
        "dataset": name,
        "name": options.name,
        "split": split,
        "asked_revision": options.revision,
        "revision": pinned.commit,
    }
    remarks = (f"dataset {name} is pinned to commit {pinned.commit}",)
    label = f"{name}/{split}"
    if options.streaming:
        stream = load_dataset(**where, split=split, streaming=True)
        return IterableSource(stream, label, options, pinned=facts, remarks=remarks)
    if is_slice or builder.name not in PACKAGED or not _reads_plainly(builder.config):
        return MapStyleSource(
            load_dataset(**where, split=split), label, options, pinned=facts, remarks=remarks
        )
    local = [_local_file(str(url), name, pinned) for url in files[split]]
    root = _repository_root(local[0], str(files[split][0]), pinned)
    return FileSource(local, PACKAGED[builder.name], options, root=root, pinned=facts, remarks=remarks)


def _pin(name: str, revision: str | None, stored: Mapping[str, Any] | None) -> _Pinned:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if stored is not None and stored.get("dataset") == name and stored.get("asked_revision") == revision:
        revision = stored["revision"]
    # The hub's errors share a base with those of the transport under it: httpx or requests, by release.
    transport_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    reason = "the hub is switched off (HF_HUB_OFFLINE)"
    if not constants.HF_HUB_OFFLINE:
        try:
            return _Pinned(str(HfApi().dataset_info(name, revision=revision).sha), None)
        except (HfHubHTTPError, HFValidationError) as error:
            raise SourceError(f"input.path: {name!r} is no local path, and the hub says: {error}") from None
        except (OSError, transport_error) as error:
            reason = f"the hub cannot be reached ({error})"
    try:
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except (OSError, ValueError):
        raise SourceError(
            f"input.path: {name!r} is no local path; {reason}, and the cache does not have it"
        ) from None
    return _Pinned(folder.name, folder)


def _reads_plainly(config: Any) -> bool:
    """Whether the builder's reading options are its defaults, so that our reader gives the same rows."""
    plain = type(config)()
    return all(
        getattr(config, spec.name) == getattr(plain, spec.name)
        for spec in fields(config)
        if spec.name not in _NOT_READING and spec.init
    )


def _local_file(url: str, name: str, pinned: _Pinned) -> Path:
    if not url.startswith("hf://"):
        return Path(url).absolute()
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, _path_in_repository(url), repo_type="dataset", revision=pinned.commit))


def _path_in_repository(url: str) -> str:
    """The part of "hf://datasets/org/name@commit/some/file" after the commit."""
    return url.split("@", 1)[1].split("/", 1)[1]


def _repository_root(local: Path, url: str, pinned: _Pinned) -> Path | None:
    if pinned.folder is not None:
        return pinned.folder.absolute()
    if not url.startswith("hf://"):
        return None
    return local.parents[_path_in_repository(url).count("/")]
