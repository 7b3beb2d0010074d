"""eval_quant: what schemes of quantization do to a model: its texts, its memory and its speed."""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen import errors
from batchgen.api.text_pieces import text_pieces
from batchgen.config import AT_LOAD, EngineConfig
from batchgen.errors import BatchgenError, ConfigError, EngineError
from batchgen.tokenizer import load_tokenizer

# The weights as they are. Beside it and `AT_LOAD` a scheme is another checkpoint of the model.
FLOATS = "none"
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 16, 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeReport:
    """What one scheme does.

    Args:
        scheme: its name, or a checkpoint.
        kv_cache_dtype: of the cache.
        perplexity: of the data, each piece by itself.
        change, change_error: of the perplexity beside the float model's, as a share, and its standard error
            over the pieces.
        kl: mean divergence of its next-token distributions from the float model's, in nats; over the 256
            likeliest tokens of the float model, the rest as one.
        same_top: share of positions whose likeliest token is the float model's.
        weights_mib: of weights in memory.
        loading_mib, serving_mib: most memory of the process above what it has without a model, without files
            that it maps; None where the system does not tell. The cache counts to both.
        tokens_per_s: generated, of 16 prompts at once.
        load_s: seconds to load.
    """

    scheme: str
    kv_cache_dtype: str
    perplexity: float
    change: float
    change_error: float
    kl: float
    same_top: float
    weights_mib: float
    loading_mib: float | None
    serving_mib: float | None
    tokens_per_s: float
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantReport:
    """All schemes; the first is the float model. `print(report)` shows a table.

    Args:
        model: its name.
        data: the texts.
        num_tokens: measured.
        schemes: in the order that was asked for.
    """

    model: str
    data: str
    num_tokens: int
    schemes: tuple[SchemeReport, ...]

    def to_mapping(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len("scheme"), *(len(each.scheme) for each in self.schemes))
        head = (
            f"{'scheme':{width}s}  {'KV cache':8s}  {'perplexity':>10s}  {'change':>18s}  {'KL':>8s}  "
            f"{'same top':>8s}  {'weights':>11s}  {'loading':>11s}  {'serving':>11s}  {'tokens/s':>8s}  load"
        )
        lines = [f"{self.model}, {self.num_tokens} tokens of {self.data}", "", head]
        for each in self.schemes:
            lines.append(
                f"{each.scheme:{width}s}  {each.kv_cache_dtype:8s}  {each.perplexity:10.3f}  "
                f"{each.change:+9.2%} ± {each.change_error:.2%}  {each.kl:8.5f}  {each.same_top:8.1%}  "
                f"{each.weights_mib:7.0f} MiB  {_mib(each.loading_mib)}  {_mib(each.serving_mib)}  "
                f"{each.tokens_per_s:8.1f}  {each.load_s:.1f} s"
            )
        return "\n".join(lines)


def eval_quant(
    model: str,
    schemes: Sequence[str],
    data: str,
    *,
    kv_cache_dtypes: Sequence[str] = (),
    tokens: int = 8192,
    length: int = 512,
    on_phase: Callable[[str], None] | None = None,
    **engine_args: Any,
) -> QuantReport:
    """Measure schemes beside the float model, each in a process of its own.

    Args:
        model: as `LLM` takes it; a float model, or a GGUF file, whose values then count as floats.
        schemes: "none" (always measured, first), "int8", "fp8", "int4", "gguf", or another checkpoint of the
            same model, as `quantize` writes them.
        data: "FILE" or "FILE:COLUMN", see `text_pieces`.
        kv_cache_dtypes: measure every scheme with each; by default as the scheme has it.
        tokens: of the data, at most.
        length: tokens of a piece; each begins anew.
        on_phase: called with what is about to be measured.
        **engine_args: the engine arguments of `batchgen.config`, the same for all.

    Raises:
        ConfigError, InputError: an argument or the data is wrong.
        ModelError, CapacityError: a scheme cannot be loaded.
        EngineError: a process died.
    """
    if length < 2 or tokens < length:
        raise ConfigError(f"length must be 2 or more and tokens no less; got {length} and {tokens}")
    for scheme in schemes:
        if scheme not in (FLOATS, *AT_LOAD) and not os.path.exists(scheme) and "/" not in scheme:
            known = ", ".join((FLOATS, *AT_LOAD))
            raise ConfigError(f"scheme {scheme!r} is neither one of {known} nor a folder that is here")
    pieces = text_pieces(
        data, load_tokenizer(model, revision=engine_args.get("revision")).encode,
        length=length, count=tokens // length,
    )  # fmt: skip
    cases = [(FLOATS, "auto")]
    for scheme in schemes:
        for kv in kv_cache_dtypes or ("auto",):
            if (scheme, kv) not in cases:
                cases.append((scheme, kv))
    tasks = [_task(model, scheme, kv, pieces, engine_args) for scheme, kv in cases]
    with tempfile.TemporaryDirectory(prefix="batchgen-eval-") as folder:
        truth = Path(folder) / "truth.npz"
        found = []
        for number, ((scheme, kv), task) in enumerate(zip(cases, tasks, strict=True)):
            if on_phase is not None:
                on_phase(f"measuring {scheme}{'' if kv == 'auto' else f' with a cache of {kv}'}")
            task |= {"truth": str(truth), "is_truth": number == 0}
            found.append(_answer(task, Path(folder), scheme))
    reports = [_report(scheme, each, found[0]) for (scheme, _), each in zip(cases, found, strict=True)]
    return QuantReport(model=model, data=data, num_tokens=sum(map(len, pieces)), schemes=tuple(reports))


def _task(
    model: str, scheme: str, kv: str, pieces: list[list[int]], engine_args: dict[str, Any]
) -> dict[str, Any]:
    length = len(pieces[0])
    # A cache of a fixed number of tokens, so that memory differs by the scheme alone.
    rooms = -(-length // 16) + _PROMPTS * -(-(_PROMPT_TOKENS + _NEW_TOKENS) // 16) + 64
    arguments = {
        "num_gpu_blocks_override": rooms, "max_num_seqs": _PROMPTS, "enable_prefix_caching": False,
        "kv_cache_dtype": kv, **engine_args,
    }  # fmt: skip
    if scheme in AT_LOAD:
        arguments["quantization"] = scheme
    name = model if scheme in (FLOATS, *AT_LOAD) else scheme
    EngineConfig.from_engine_args("eval_quant", model=name, **arguments)
    return {
        "model": name,
        "engine_args": arguments,
        "pieces": pieces,
        "prompts": [pieces[number % len(pieces)][:_PROMPT_TOKENS] for number in range(_PROMPTS)],
        "new_tokens": _NEW_TOKENS,
        "max_len": max(length, _PROMPT_TOKENS + _NEW_TOKENS),
    }


def _answer(task: dict[str, Any], folder: Path, scheme: str) -> dict[str, Any]:
    file, answer = folder / "task.json", folder / "answer.json"
    answer.unlink(missing_ok=True)
    file.write_text(json.dumps({**task, "answer": str(answer)}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "batchgen.api.eval_child", str(file)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if not answer.is_file():
        told = "\n".join(done.stderr.strip().splitlines()[-20:]) or f"exit code {done.returncode}"
        raise EngineError(f"the process that measured {scheme} died:\n{told}")
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        kind = getattr(errors, found["error"], BatchgenError)
        # Some errors take more than a message; their own kind of exit is that of their base.
        kind = kind if kind is not errors.UnknownNameError else ConfigError
        raise kind(f"scheme {scheme}: {found['message']}")
    return found


def _report(scheme: str, found: dict[str, Any], truth: dict[str, Any]) -> SchemeReport:
    more = [ours - theirs for ours, theirs in zip(found["losses"], truth["losses"], strict=True)]
    change = statistics.mean(more)
    return SchemeReport(
        scheme=scheme,
        kv_cache_dtype=found["resolved"]["kv_cache_dtype"],
        perplexity=math.exp(statistics.mean(found["losses"])),
        change=math.expm1(change),
        change_error=statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0,
        kl=found.get("kl", 0.0),
        same_top=found.get("same_top", 1.0),
        weights_mib=found["weights_mib"],
        loading_mib=found["loading_mib"],
        serving_mib=found["serving_mib"],
        tokens_per_s=found["tokens_per_s"],
        load_s=found["load_s"],
    )


def _mib(value: float | None) -> str:
    return f"{'?' if value is None else f'{value:.0f}':>7s} MiB"
