"""The whole engine on narrower instruction sets: tests that hold it to transformers run under a cap."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels.cpu import build

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# A tiny model, float and integers; the real one in batches of seven with its prefix cache.
TESTS = (
    "tests/worker/test_load.py::test_greedy_tokens_equal_transformers",
    "tests/models/test_decoder.py",
    "tests/models/test_int8_model.py",
    "tests/end_to_end/test_greedy_tokens.py::test_greedy_tokens_are_those_of_transformers[7-True-None]",
)
CAPS = [cap for caps in build.ISA_CAPS.values() for cap in caps]


@pytest.mark.parametrize("cap", CAPS)
def test_greedy_tokens_are_those_of_transformers(cap: str, repository: Path) -> None:
    if cap not in build.ISA_CAPS.get(platform.machine(), {}):
        pytest.skip(f"{cap} belongs to another machine")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900", *TESTS],
        cwd=repository,
        env={**os.environ, build.ISA_VARIABLE: cap},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert "passed" in result.stdout
