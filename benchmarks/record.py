"""One measurement as one JSON line: what was measured, on which machine, with which versions and commit."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Instruction sets that a kernel's speed depends on, as the system names them.
INSTRUCTION_SETS = set(
    "avx2 avx512f avx512_vnni avx512_bf16 avx_vnni amx_tile amx_bf16 amx_int8 asimd sve i8mm".split()
)
# The lines of a sitting that were written before this one change nothing that is measured.
_OTHER_THAN_RESULTS = ":!benchmarks/results"
PACKAGES = ("batchgen", "torch", "transformers", "tokenizers", "pyarrow", "triton")


def arguments(page: str | None) -> argparse.ArgumentParser:
    """A benchmark's command line, its docstring as the help; `--no-save` is there already."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results alone")
    return parser


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, 20th and 80th percentile and number of some repeats."""
    if len(values) == 1:
        low = high = values[0]
    else:
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        low, high = deciles[1], deciles[7]
    return {
        "median": round(statistics.median(values), 4),
        "p20": round(low, 4),
        "p80": round(high, 4),
        "repeats": len(values),
    }


def append(benchmark: str, case: Mapping[str, Any], measured: Mapping[str, Any]) -> Path:
    """Add a line to results/BENCHMARK.jsonl. Compare only lines of one machine and one sitting."""
    line = {
        "benchmark": benchmark,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **commit(),
        "machine": machine(),
        "versions": versions(),
        "case": dict(case),
        **measured,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{benchmark}.jsonl"
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    return path


def commit() -> dict[str, Any]:
    """The commit of the working tree and whether it has changes; unknown without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "--short=12", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--", ".", _OTHER_THAN_RESULTS)),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": True}


def machine() -> dict[str, Any]:
    """Processor, its instruction sets, cores this process may use, memory, and how busy the machine was."""
    facts: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        facts["cores"] = len(os.sched_getaffinity(0))
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        told = dict(
            [part.strip() for part in line.split(":", 1)]
            for line in cpuinfo.read_text().splitlines()
            if ":" in line
        )
        facts["cpu"] = told.get("model name", facts["cpu"])
        flags = told.get("flags", told.get("Features", ""))
        facts["instruction_sets"] = sorted(INSTRUCTION_SETS.intersection(flags.split()))
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    facts["load_1min"] = round(os.getloadavg()[0], 2)
    return facts


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a number may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
