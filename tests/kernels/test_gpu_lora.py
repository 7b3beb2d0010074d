"""The Triton kernels for LoRA against the reference in float64; run as test_gpu_kernels.py says."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from batchgen.kernels.cases import TOLERANCE, relative_rms
from batchgen.kernels.kv import torch_dtype
from batchgen.kernels.lora import LoraPart, LoraSegments
from batchgen.kernels.ops import choose

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"
# The interpreter computes bfloat16 wrongly.
DTYPES = ["float32", "float16"] if IS_INTERPRETED else ["float32", "float16", "bfloat16"]

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED,
    reason="no CUDA device; run under the interpreter by the first test",
)


@needs_triton
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the interpreter's own process")
def test_contract_under_the_interpreter():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(Path(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def _signature(types: dict[str, str], constants: dict[str, object]) -> dict[str, str]:
    return types | dict.fromkeys(constants, "constexpr")


@needs_triton
@pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("is_table", [False, True])
def test_kernels_compile_for_a_gpu_that_is_not_there(is_table):
    """The interpreter accepts much that the compiler does not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from batchgen.kernels.gpu import lora

    segments = {"p_rows": "*i32", "p_starts": "*i32", "p_table": "*i64"}
    shared = {"PARTS": 3, "FIELDS": 5, "RANK": 64, "ROWS": 16, "RANKS": 16, "PRECISION": "tf32"}
    reduces = {"p_x": "*i64" if is_table else "*fp16", **segments, "p_reduced": "*fp32", "x_stride": "i32"}
    expands = {"p_reduced": "*fp32", **segments, "p_out": "*fp16", "out_stride": "i32", "outputs": "i32"}
    for kernel, types, constants in (
        (lora._reduce_kernel, {**reduces, "inputs": "i32"}, {**shared, "INPUTS": 64, "IS_TABLE": is_table}),
        (lora._expand_kernel, {**expands, "i_part": "i32"}, {**shared, "OUTPUTS": 64}),
    ):
        source = ASTSource(fn=kernel, signature=_signature(types, constants), constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert compiled.asm["ptx"]


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _part(inputs: int, outputs: int, rank: int, seed: int) -> LoraPart:
    bias = _draw(outputs, seed=seed + 2) if seed % 2 else None
    return LoraPart(_draw(rank, inputs, seed=seed) / 8, _draw(outputs, rank, seed=seed + 1) / 8, bias)


def _on(part: LoraPart | None, device: str, dtype: torch.dtype) -> LoraPart | None:
    if part is None:
        return None
    bias = None if part.bias is None else part.bias.to(device)
    return LoraPart(part.a.to(device, dtype), part.b.to(device, dtype), bias)


def _added(backend: str, dtype: str, x, base, slots, adapters, rounding: str, is_table: bool):
    """What the backend makes of it; activations and adapters rounded to the dtype that is under test."""
    device = "cpu" if backend == "reference" else DEVICE
    kernels = choose(device, dtype, backend=backend, head_dim=64)
    working, kept = torch_dtype(dtype), torch_dtype(rounding)
    sizes = [part.b.shape[0] for part in adapters[0]]
    inputs = adapters[0][0].a.shape[1]
    bank = kernels.lora_bank(inputs, sizes, len(adapters) + 1, is_table=is_table)
    for slot, parts in enumerate(adapters):
        moved = [_on(part, device, kept) for part in parts]
        if is_table:
            bank.put(slot, kernels.pack_lora_table(inputs, moved[0], rounding))
        else:
            bank.put(slot, kernels.pack_lora(inputs, sizes, moved, rounding))
    segments = LoraSegments.empty(len(slots), len(adapters) + 1, device)
    segments.fill(slots)
    out = base.clone().to(kept).to(device, working)
    if is_table:
        kernels.lora_gather_add(x.to(device), bank, segments, out)
    else:
        kernels.lora_add(x.to(kept).to(device, working), bank, segments, out)
    return out


@needs_triton
@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(70, 16), (100,)])
def test_each_row_gets_what_its_adapter_says(dtype, sizes):
    ranks = [(16, 3), (8, 0), (40, 1)]
    adapters = [
        [
            _part(150, size, rank, 10 * number + place) if rank else None
            for place, (size, rank) in enumerate(zip(sizes, of_slot, strict=False))
        ]
        for number, of_slot in enumerate(ranks)
    ]
    # The last slot is empty; some rows are in none.
    slots = [(row * row) % 5 - 1 for row in range(50)]
    x, base = _draw(50, 150, seed=1), _draw(50, sum(sizes), seed=2)
    given = _added("gpu", dtype, x, base, slots, adapters, dtype, False)
    expected = _added("reference", "float64", x, base, slots, adapters, dtype, False)
    assert relative_rms(given, expected) < TOLERANCE[dtype]
    others = torch.tensor([slot in (-1, 3) for slot in slots])
    assert torch.equal(given[others].cpu(), base.to(torch_dtype(dtype))[others])


@needs_triton
@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings(dtype):
    adapters = [[_part(60, 70, rank, rank)] for rank in (5, 16)]
    slots = [row % 4 - 1 for row in range(30)]
    ids = torch.randint(60, (30,), generator=torch.Generator().manual_seed(1))
    base = _draw(30, 70, seed=2)
    given = _added("gpu", dtype, ids, base, slots, adapters, dtype, True)
    expected = _added("reference", "float64", ids, base, slots, adapters, dtype, True)
    assert relative_rms(given, expected) < TOLERANCE[dtype]
