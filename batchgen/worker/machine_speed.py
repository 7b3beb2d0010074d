"""How fast this machine multiplies matrices, by type of their numbers; measured once and remembered."""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from batchgen.kernels.cpu.build import cpu_features, default_cache_dir, machine_flags
from batchgen.kernels.ops import Kernels, Quantized
from batchgen.version import __version__

# A product as a decode step of a small model has it.
_ROWS, _INPUTS, _OUTPUTS = 64, 1024, 3072
_REPEATS = 7


def product_speeds(kernels: Kernels, cache_dir: Path | None = None) -> dict[str, float]:
    """GFLOP/s of a matrix product in "float32" and "int8" by these kernels, and in torch's "bfloat16".

    Args:
        kernels: of a model in float32.
        cache_dir: where the numbers are kept; by default beside the compiled kernels.
    """
    backends = f"{kernels.choices['linear'].backend} {kernels.choices['linear_int8'].backend}"
    threads = str(torch.get_num_threads())
    parts = (cpu_features(), *machine_flags(), __version__, torch.__version__, backends, threads)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    file = (default_cache_dir() if cache_dir is None else cache_dir) / f"speeds-{key}.json"
    speeds = _read(file)
    if speeds is None:
        speeds = _measure(kernels)
        # Whoever cannot keep them measures again.
        with suppress(OSError):
            _write(file, speeds)
    return speeds


def _measure(kernels: Kernels) -> dict[str, float]:
    x = torch.linspace(-1, 1, _ROWS * _INPUTS).view(_ROWS, _INPUTS)
    weight = torch.linspace(-1, 1, _OUTPUTS * _INPUTS).view(_OUTPUTS, _INPUTS)
    out = torch.empty(_ROWS, _OUTPUTS)
    integers = kernels.quantize(x, Quantized.empty(_ROWS, _INPUTS, 8))
    rounded = kernels.quantize(weight, Quantized.empty(_OUTPUTS, _INPUTS, 8))
    int8 = kernels.pack_int8(rounded.values[:, 0, :_INPUTS].contiguous(), rounded.scale)
    half_x, half_weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    float32 = kernels.pack_linear(weight)
    return {
        "float32": _rate(lambda: kernels.linear(x, float32, out)),
        "int8": _rate(lambda: kernels.linear(integers, int8, out)),
        "bfloat16": _rate(lambda: torch.nn.functional.linear(half_x, half_weight)),
    }


def _rate(multiply: Callable[[], object]) -> float:
    multiply()
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - begin)
    # The best of several: whatever disturbs only ever makes it slower.
    return round(2 * _ROWS * _INPUTS * _OUTPUTS / min(seconds) / 1e9, 1)


def _read(file: Path) -> dict[str, float] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        speeds = {name: float(found[name]) for name in ("float32", "int8", "bfloat16")}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return speeds if all(0 < speed < math.inf for speed in speeds.values()) else None


def _write(file: Path, speeds: dict[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as opened:
        json.dump(speeds, opened)
    os.replace(temporary, file)
