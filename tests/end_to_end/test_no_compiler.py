"""On a machine without a C compiler the engine runs, in any precision, and says once what it lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.tiny_models import tiny_model, write_folder

CODE = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from batchgen import LLM, SamplingParams
if __name__ == "__main__":
    given = dict(pair.split("=") for pair in sys.argv[2:])
    with LLM(sys.argv[1], max_model_len=64, **given) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)[0]
        print(len(output.outputs[0].token_ids), output.error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [[], ["quantization=int8", "kv_cache_dtype=int8"], ["kv_cache_dtype=float16"]], ids=str
)
def test_it_runs_and_warns_once(given: list[str], tmp_path: Path) -> None:
    folder = write_folder(tiny_model(), tmp_path / "model")
    script, nothing = tmp_path / "run.py", tmp_path / "bin"
    script.write_text(CODE)
    nothing.mkdir()
    result = subprocess.run(
        [sys.executable, str(script), str(folder), *given],
        env={**os.environ, "PATH": str(nothing), "CC": "", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stdout.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == (2 if "quantization=int8" in given else 1), warnings
    assert "no C compiler" in warnings[0]
    assert all("ten times slower" in warning for warning in warnings[1:])
    assert "install gcc" in warnings[0]
    assert result.stdout.splitlines()[-1] == "5 None"
