"""The kernel benchmarks still run; their numbers are for people."""

import subprocess
import sys

# The installed batchgen comes first on the path, the benchmarks lie in the repository alone.
CODE = """
import sys
sys.path.append(sys.argv[1])
import torch
from batchgen.kernels.cases import AttentionCase
from benchmarks.kernels import bench_attention, bench_linear, bench_linear_coded, bench_lora, bench_swap
torch.set_num_threads(1)
bench_linear.BEYOND_CACHES_BYTES, bench_attention.LAYERS = 1 << 20, 2
linear = bench_linear.measure(64, 96, rows=3, repeats=2)
names = {"batchgen", "F.linear", "oneDNN reordered", "batchgen int8", "batchgen 16 bits", "_int_mm"}
assert set(linear) >= names, linear
bench_linear_coded.BEYOND_CACHES_BYTES = 1 << 20
coded = bench_linear_coded.measure(64, 96, rows=3, repeats=2)
assert set(coded) == {"float32", *bench_linear_coded.FORMATS}
bench_lora.LAYERS, few = 2, dict(rows=6, slots=2, rank=4, dtype="float16")
added = {base: bench_lora.measure(bench_lora.Case(base=base, **few), repeats=2) for base in ("none", "int8")}
assert [set(times) for times in added.values()] == [{"with"}, {"with", "without"}]
case = AttentionCase(name="small", query_lens=[2, 2], seq_lens=[40, 40], head_dim=32)
attention = bench_attention.measure(case, repeats=2)
assert set(attention) == {"float32", "float16", "bfloat16", "int8", "fp8", "SDPA, dense"}
assert bench_attention.bytes_read(case, "float32") == 2 * 4 * 2 * 40 * 2 * 32
assert bench_attention.operations(case) == 4 * 4 * 32 * 2 * (39 + 40)
bench_swap.POOL_BLOCKS = 4
swap = bench_swap.measure(2, 2, 64, 3, repeats=1, device="cpu")
assert len(swap) == 5 and min(swap.values()) > 0, swap
measured = [*linear.values(), *coded.values(), *attention.values()]
measured += [values for times in added.values() for values in times.values()]
assert all(len(values) == 2 and min(values) > 0 for values in measured)
"""


def test_kernel_benchmarks_run(repository):
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(repository)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
