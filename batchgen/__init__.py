"""batchgen: run a language model over every row of a dataset.

Public names are loaded on first use, so that ``import batchgen`` costs milliseconds and no torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a source checkout kernels/, jobs/ and widgets/ sit beside this folder, not inside it
# (pyproject.toml, [tool.setuptools.package-dir]). A wheel holds them inside, and this adds nothing.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "kernels").is_dir() and (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))

if TYPE_CHECKING:
    from batchgen.api import LLM, run_job
    from batchgen.errors import BatchgenError
    from batchgen.outputs import CompletionOutput, RequestOutput
    from batchgen.sampling_params import SamplingParams
    from batchgen.version import __version__

_HOMES = {
    "BatchgenError": "batchgen.errors",
    "CompletionOutput": "batchgen.outputs",
    "LLM": "batchgen.api",
    "RequestOutput": "batchgen.outputs",
    "SamplingParams": "batchgen.sampling_params",
    "__version__": "batchgen.version",
    "run_job": "batchgen.api",
}

__all__ = [
    "LLM",
    "BatchgenError",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "run_job",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
