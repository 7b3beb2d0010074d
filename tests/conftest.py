"""Fixtures and rules for all tests: no network, children find batchgen, no GPU test without a GPU."""

import os
from pathlib import Path

import pytest

import batchgen

# Tests use only what the repository holds or makes. huggingface_hub reads this once, when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _make_children_find_batchgen() -> None:
    """Processes that a test starts in another folder import the batchgen that the test itself imports."""
    root = Path(batchgen.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


_make_children_find_batchgen()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what `datasets` caches out of the user's home."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets-cache"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout that holds these tests."""
    return Path(__file__).resolve().parent.parent
