"""The Triton kernels against the reference in float64.

On a GPU they run as they are. Without one this file runs itself again, in a process of its own, in
Triton's interpreter: TRITON_INTERPRET is read when a kernel is decorated. It needs no conftest, so
that `benchmarks.gpu.check` can run it on a machine that has little more than pytest.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from batchgen.errors import KernelError
from batchgen.kernels.cases import (
    CASES,
    TOLERANCE,
    AttentionCase,
    make_inputs,
    poison_unseen,
    relative_rms,
    truth,
)
from batchgen.kernels.kv import KVCacheSpec, torch_dtype
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


ATTENTION_ARGUMENTS = (
    ("p_query", "p_data", "p_out"),
    ("p_starts", "p_lengths", "p_tables"),
    ("query_stride", "table_stride", "block_size", "window"),
    ("scale", "soft_cap"),
)


@needs_triton
@pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize(("dtype", "is_plain"), [("fp16", False), ("bf16", True)])
def test_attention_compiles_for_a_gpu_that_is_not_there(dtype, is_plain):
    """The interpreter accepts much that the compiler does not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from batchgen.kernels.gpu.attention import _attention_kernel

    types = (f"*{dtype}", "*i32", "i32", "fp32")
    signature = {name: kind for names, kind in zip(ATTENTION_ARGUMENTS, types, strict=True) for name in names}
    constants = {
        "KV_HEADS": 3,
        "GROUP": 3,
        "DIM": 64,
        "PADDED_DIM": 64,
        "QUERIES": 21,
        "ROWS": 64,
        "TOKENS": 64,
    }
    constants |= {"HAS_SOFT_CAP": not is_plain, "HAS_WINDOW": not is_plain, "PRECISION": "tf32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=_attention_kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 2, "enable_fp_fusion": True}
    )
    assert compiled.asm["cubin"]


def _kernels(dtype: str, case: AttentionCase):
    return choose(DEVICE, dtype, backend="gpu", head_dim=case.head_dim, block_size=case.block_size)


@needs_triton
@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_attention_is_the_reference(case, dtype):
    inputs = make_inputs(case, _kernels(dtype, case), dtype, DEVICE)
    assert relative_rms(inputs.attend(case), truth(case, dtype)) < TOLERANCE[dtype]


@needs_triton
@runs_kernels
@pytest.mark.parametrize("case", [case for case in CASES if case.window], ids=str)
def test_gpu_blocks_before_a_window_need_not_exist(case):
    inputs = make_inputs(case, _kernels("float16", case), "float16", DEVICE)
    expected = inputs.attend(case)
    assert poison_unseen(inputs, case)
    assert torch.equal(inputs.attend(case), expected)


@needs_triton
@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_store_is_what_is_read(dtype):
    case = CASES[0]
    kernels, working = _kernels(dtype, case), torch_dtype(dtype)
    kv = kernels.allocate_kv(KVCacheSpec(3, 40, 16, dtype), 4, DEVICE)
    kv.data.fill_(float("nan"))
    wide = torch.randn(6, 300).to(DEVICE, working)
    key, value = wide[:, 10:130].view(6, 3, 40), wide[:, 130:250].view(6, 3, 40)
    slots = torch.tensor([63, 0, -1, 17, 16, 5], dtype=torch.int32, device=DEVICE)
    kernels.store_kv(key, value, kv, slots)
    stored = slots >= 0
    read_key, read_value = kernels.read_kv(kv, slots[stored])
    assert torch.equal(read_key, key[stored])
    assert torch.equal(read_value, value[stored])
    assert kv.data.isnan().sum() == kv.data.numel() - 2 * 5 * 120


@needs_triton
@runs_kernels
def test_gpu_blocks_swap_to_host_memory_and_back_in_the_order_of_the_stream():
    case = CASES[0]
    kernels = _kernels("float16", case)
    caches = [kernels.allocate_kv(KVCacheSpec(4, 64, 16, "float16"), 300, DEVICE) for _ in range(2)]
    for number, kv in enumerate(caches):
        kv.data.copy_(torch.arange(300).view(300, 1, 1, 1, 1) + 400 * number)
    hosts = kernels.allocate_host_kv(caches, 200)
    assert all(host.data.device.type == "cpu" for host in hosts)
    assert DEVICE == "cpu" or all(host.data.is_pinned() for host in hosts)
    out = [(block, block - 100) for block in range(100, 250)]
    back = [(host, 299 - host) for host in range(150)]
    for kv, host in zip(caches, hosts, strict=True):
        # Nobody waits in between: what is written to a block after its copy must not be in the copy.
        kernels.swap_blocks(kv, host, out)
        kv.data.zero_()
        kernels.swap_blocks(host, kv, back)
    for number, kv in enumerate(caches):
        found = kv.data[:, 0, 0, 0, 0].cpu()
        assert found[:150].eq(0).all()
        assert found[150:].tolist() == [400 * number + 100 + 299 - block for block in range(150, 300)]


@needs_triton
@runs_kernels
def test_gpu_result_goes_to_out_and_same_input_gives_same_bits():
    case = CASES[2]
    inputs = make_inputs(case, _kernels("float32", case), "float32", DEVICE)
    out = torch.full(inputs.query.shape, float("nan"), device=DEVICE)
    given = inputs.kernels.attention(inputs.query, inputs.kv, inputs.meta, inputs.scale, out=out)
    assert given.data_ptr() == out.data_ptr()
    assert torch.equal(out, inputs.attend(case))


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_gpu_attention_in_a_graph_is_eager():
    case = CASES[1]
    inputs = make_inputs(case, _kernels("float16", case), "float16", DEVICE)
    expected = inputs.attend(case)
    out = torch.zeros_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.kernels.attention(inputs.query, inputs.kv, inputs.meta, inputs.scale, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@needs_triton
@runs_kernels
def test_gpu_refuses_what_it_cannot_do():
    with pytest.raises(KernelError, match="at most 256"):
        choose(DEVICE, "float16", backend="gpu", head_dim=512)
    if IS_INTERPRETED:
        with pytest.raises(KernelError, match="bfloat16"):
            choose(DEVICE, "bfloat16", backend="gpu", head_dim=64)
    kernels = choose(DEVICE, "float16", backend="gpu", head_dim=64)
    assert kernels.choices["linear"].backend == "reference"
    assert kernels.choices["linear"].reason == "gpu has no linear"
