"""Fixtures of jobs: a state folder of the test's own, and an input."""

from pathlib import Path

import pytest

from batchgen.jobs.testing import write_source


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path)
