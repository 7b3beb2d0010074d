"""`batchgen quantize` and `batchgen eval-quant`: what they print, write and refuse."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def batchgen(*arguments: object) -> Any:
    words = [sys.executable, "-m", "batchgen.cli.main", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_from_floats_to_a_folder_and_its_numbers(folder: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = batchgen("quantize", folder, "--scheme", "int4", "--data", f"{texts}:text", "--samples", 4,
                    "--length", 64, "-o", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, measure, run = done.stdout.splitlines()
    assert first.startswith(f"{out}: 0 MiB; 14 layers in int4 in groups of 64, 4.5")
    assert f"batchgen eval-quant {folder} --scheme none,{out}" in measure
    picture = tmp_path / "picture.svg"
    words = ("eval-quant", folder, "--scheme", out, "--data", texts, "--tokens", 128, "--length", 64)
    numbers = batchgen(*words, "--json", "-o", picture)
    assert numbers.returncode == 0, numbers.stderr
    assert [each["scheme"] for each in json.loads(numbers.stdout)["schemes"]] == ["none", str(out)]
    assert numbers.stderr.splitlines() == ["measuring none", f"measuring {out}", f"drawn: {picture}"]
    assert picture.read_text().startswith("<svg")
    told = run.partition("batchgen ")[2].split("'")
    assert batchgen(*told[0].split(), told[1], "--max-tokens", 2, "--no-chat").returncode == 0
    again = batchgen("quantize", folder, "-o", out)
    assert again.returncode == 2
    assert (
        again.stderr
        == f"error: {out} is there already and not an empty folder; name another, or remove it first\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "quantization=int8"), "--set quantization: say it by --scheme"),
        (("--set", "kv_cache_dtype=int8"), "--set kv_cache_dtype: say it by --kv-cache-dtype"),
        (("--set", "sampling.top_k=3"), "nothing is sampled here"),
        (("--output", "picture.png"), "the picture is an SVG; name it FILE.svg"),
        (("--set", "max_num_sqs=3"), "max_num_seqs"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], message: str, folder: Path, texts: Path) -> None:
    done = batchgen("eval-quant", folder, "--data", texts, "--length", 64, "--tokens", 64, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
