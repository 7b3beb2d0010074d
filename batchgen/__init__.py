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
    from batchgen.api.async_llm import AsyncLLM
    from batchgen.api.bench import bench
    from batchgen.api.bench_report import BenchReport
    from batchgen.api.eval_quant import QuantReport, SchemeReport, eval_quant
    from batchgen.api.jobs import run_job
    from batchgen.api.llm import LLM
    from batchgen.api.prompt_forms import TextPrompt, TokensPrompt
    from batchgen.api.quantize import quantize
    from batchgen.api.workload import MadeUp
    from batchgen.errors import BatchgenError
    from batchgen.lora_request import LoRARequest
    from batchgen.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        FlatLogprobs,
        Logprob,
        RequestOutput,
        ScoreOutput,
    )
    from batchgen.sampling_params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from batchgen.version import __version__

_HOMES = {
    "AsyncLLM": "batchgen.api.async_llm",
    "BatchgenError": "batchgen.errors",
    "BeamSearchOutput": "batchgen.outputs",
    "BeamSearchParams": "batchgen.sampling_params",
    "BeamSearchSequence": "batchgen.outputs",
    "BenchReport": "batchgen.api.bench_report",
    "CompletionOutput": "batchgen.outputs",
    "FlatLogprobs": "batchgen.outputs",
    "LLM": "batchgen.api.llm",
    "LoRARequest": "batchgen.lora_request",
    "Logprob": "batchgen.outputs",
    "MadeUp": "batchgen.api.workload",
    "QuantReport": "batchgen.api.eval_quant",
    "RepetitionDetectionParams": "batchgen.sampling_params",
    "RequestOutput": "batchgen.outputs",
    "RequestOutputKind": "batchgen.sampling_params",
    "SamplingParams": "batchgen.sampling_params",
    "SchemeReport": "batchgen.api.eval_quant",
    "ScoreOutput": "batchgen.outputs",
    "StructuredOutputsParams": "batchgen.sampling_params",
    "TextPrompt": "batchgen.api.prompt_forms",
    "TokensPrompt": "batchgen.api.prompt_forms",
    "__version__": "batchgen.version",
    "bench": "batchgen.api.bench",
    "eval_quant": "batchgen.api.eval_quant",
    "quantize": "batchgen.api.quantize",
    "run_job": "batchgen.api.jobs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BatchgenError",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BenchReport",
    "CompletionOutput",
    "FlatLogprobs",
    "LoRARequest",
    "Logprob",
    "MadeUp",
    "QuantReport",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchemeReport",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "bench",
    "eval_quant",
    "quantize",
    "run_job",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
