"""Seconds from the start of a process to its first token, with compiled kernels at hand and without.

    python -m benchmarks.engine.bench_start --repeat 5

`generate` is the command, from its start to a text of one token on its standard output. `run` is a job of one
row and one token to the command's end. The phases are those of a program that does what `generate` does:
Python and imports, the caller's and the engine's; the load of the weights; the step. Cold runs have an empty
cache of kernels, so that they compile them; `run` is left out there.

Cases take turns. `--model`, `--prompt` and `--precisions` choose others.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import record
from benchmarks.engine.bench_offline import MODEL

BATCHGEN = [sys.executable, "-m", "batchgen.cli"]
# Names the folder under which compiled kernels are kept.
CACHE_VARIABLE = "XDG_CACHE_HOME"
PROBE = """
import json, sys, time
begun = float(sys.argv[1])
from batchgen import LLM, SamplingParams
with LLM(sys.argv[2], **json.loads(sys.argv[4])) as llm:
    ready = time.monotonic()
    llm.generate(sys.argv[3], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    done = time.monotonic()
    loading = ready - llm.info.load_s
    print(json.dumps({"imports": loading - begun, "load": ready - loading, "step": done - ready}))
"""
JOB = """
model: {model}
input: {{path: rows.jsonl}}
prompt: {{template: "{{{{ text }}}}"}}
sampling: {{temperature: 0, max_tokens: 1}}
output: {{path: out}}
"""


def generate(model: str, prompt: str, precision: str) -> float:
    """Seconds of the command until its text begins."""
    options = ["--set", "engine.quantization=int8"] if precision == "int8" else []
    options += ["--quiet", "--no-chat", "--temperature", "0", "--max-tokens", "1"]
    command = [*BATCHGEN, "generate", "-m", model, "-p", prompt, *options]
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = process.stdout.read(1)
        seconds = time.monotonic() - begun
    if process.returncode or not found:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds


def run(model: str, prompt: str, precision: str) -> float:
    """Seconds of a job of one row."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text(json.dumps({"text": prompt}), encoding="utf-8")
        job = Path(folder) / "job.yaml"
        engine = "engine: {quantization: int8}\n" if precision == "int8" else ""
        job.write_text(JOB.format(model=json.dumps(model)) + engine, encoding="utf-8")
        begun = time.monotonic()
        subprocess.run([*BATCHGEN, "run", str(job), "--quiet"], check=True)
        return time.monotonic() - begun


def phases(model: str, prompt: str, precision: str) -> dict[str, float]:
    """Seconds of the parts of a start."""
    given = {"quantization": "int8"} if precision == "int8" else {}
    command = [sys.executable, "-c", PROBE, str(time.monotonic()), model, prompt, json.dumps(given)]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


@contextmanager
def empty_cache(is_wanted: bool) -> Iterator[None]:
    """Within it, commands find no compiled kernels, if that is wanted."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        if is_wanted:
            os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(CACHE_VARIABLE, None)
            if before is not None:
                os.environ[CACHE_VARIABLE] = before


def main() -> None:
    """Measure, print, and add a line for each case to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--precisions", default="float32,int8")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--repeat-cold", type=int, default=1, help="0 leaves them out")
    args = parser.parse_args()

    ways = [
        (cache, precision)
        for number in range(max(args.repeat, args.repeat_cold))
        for cache, repeat in (("warm", args.repeat), ("cold", args.repeat_cold))
        if number < repeat
        for precision in args.precisions.split(",")
    ]
    # Files that nobody has read yet, and kernels that are not compiled, are no warm start.
    generate(args.model, args.prompt, "float32")
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for cache, precision in ways:
        asked = args.model, args.prompt, precision
        values = found.setdefault((cache, precision), {})
        with empty_cache(cache == "cold"):
            values.setdefault("generate", []).append(generate(*asked))
        if cache == "warm":
            values.setdefault("run", []).append(run(*asked))
            for name, seconds in phases(*asked).items():
                values.setdefault(name, []).append(seconds)
    for (cache, precision), values in found.items():
        told = ", ".join(f"{name} {statistics.median(each):.2f} s" for name, each in values.items())
        print(f"{precision}, {cache}: {told}", flush=True)
        if not args.no_save:
            case = {"model": args.model, "precision": precision, "kernels": cache}
            record.append("start", case, {name: record.spread(each) for name, each in values.items()})


if __name__ == "__main__":
    main()
