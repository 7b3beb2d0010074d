"""What is imported before the first token: a large package that is not needed costs up to seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.tiny_models import SPECIAL_TOKENS, tiny_model, write_gguf

# The caller computes nothing, and a prompt without a chat needs no template.
NOT_IN_CALLER = {"torch", "transformers", "datasets", "pandas", "pyarrow", "triton", "jinja2", "gguf"}
NOT_IN_ENGINE = {
    "transformers", "datasets", "pandas", "pyarrow", "triton", "jinja2", "llguidance", "scipy", "sympy",
    "torch._dynamo", "torch._inductor",
}  # fmt: skip
CALLER = """
import sys
from batchgen import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(sys.argv[1]) as llm:
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
        print(*sys.modules)
"""
# What `python -m batchgen.engine.child` does, without pipes.
ENGINE = """
import sys
import batchgen.engine.child
from batchgen.config import EngineConfig
from batchgen.engine.loading import load_core
from batchgen.engine.messages import EngineRequest, pack_ids
from batchgen.sampling_params import SamplingParams
core = load_core(EngineConfig.from_engine_args(model=sys.argv[1], quantization=sys.argv[2] or None))
params = SamplingParams(max_tokens=1)
core.add(EngineRequest(request_id="a", prompt_token_ids=pack_ids([1, 2, 3]), params=params, seed=0))
while not core.step():
    pass
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(vocab_size=256 + len(SPECIAL_TOKENS))
    return write_gguf(model, tmp_path_factory.mktemp("first-token") / "tiny.gguf")


def imported(script: str, *arguments: str) -> set[str]:
    command = [sys.executable, "-c", script, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_the_caller_imports_nothing_heavy(gguf: Path) -> None:
    assert not NOT_IN_CALLER & imported(CALLER, str(gguf))


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_the_engine_imports_torch_and_little_else(gguf: Path, quantization: str) -> None:
    assert not NOT_IN_ENGINE & imported(ENGINE, str(gguf), quantization)


def test_an_engines_imports_are_done_without_the_collector_and_kept_from_it() -> None:
    script = (
        "import gc\n"
        "from batchgen.engine import child\n"
        "def look(name):\n"
        "    assert not gc.isenabled()\n"
        "    raise ImportError(name)\n"  # what cannot be imported is left to whoever needs it
        "child.import_module = look\n"
        "child._import_for_good(['some.module'])\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    assert imported(script) == {"True"}
