"""`python -m benchmarks.gpu.check` still runs, so that time on a card is not spent on repairing it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def _check(repository, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.check", *arguments],
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_step_runs_in_the_interpreter(repository, tmp_path):
    out = tmp_path / "check.jsonl"
    result = _check(repository, "--interpret", "--out", str(out))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["card"] == "interpreter"
    assert {line["step"] for line in lines} == {"machine", "contract", "engine", "memory", "speed"}
    assert sum(line["step"] == "contract" for line in lines) > 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(repository, tmp_path):
    result = _check(repository, "--out", str(tmp_path / "check.jsonl"))
    assert result.returncode == 2
    assert "no CUDA device" in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_step_that_breaks_is_a_failed_result(repository, tmp_path):
    out = tmp_path / "check.jsonl"
    code = (
        "import sys; from benchmarks.gpu import check\n"
        "check.STEPS = {'good': lambda d: iter([{'name': 'a', 'ok': True}]), 'bad': lambda d: 1 / 0}\n"
        f"sys.argv = ['check', '--interpret', '--out', {str(out)!r}]\n"
        "sys.exit(check.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("ok") for line in lines] == [None, True, False]
    assert "ZeroDivisionError" in lines[2]["detail"]
