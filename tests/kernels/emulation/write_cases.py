"""Writes cases for driver.c: every kernel, with the results of the reference backend.

    python write_cases.py FILE

A case is a function that works with any kernels. It runs twice: on the reference, for what is expected, and
on kernels that write down what they are asked to do.
"""

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from lora_cases import lora_cases
from rounding_cases import rounding_cases
from torch import Tensor
from transcript import CALLED, MAGIC, NotingLibrary, Transcript

from batchgen.kernels.cases import CASES, KV_TOLERANCE, AttentionCase, make_inputs
from batchgen.kernels.coded import Coded, float8_values
from batchgen.kernels.cpu import dequantize as dequantizing
from batchgen.kernels.cpu import round_groups
from batchgen.kernels.cpu.dequantize import _BLOCKS as BLOCKS
from batchgen.kernels.cpu.dequantize import dequantize
from batchgen.kernels.cpu.screen import Screen
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec
from batchgen.kernels.ops import Quantized, choose
from batchgen.kernels.program import StepSizes
from batchgen.kernels.sampling import Draws, Penalties

KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "fp8")
NAN, INF = float("nan"), float("inf")
# Relative RMS error of float32 against float64, as in the kernels' own tests.
TOLERANCE = 1e-6


class Run:
    """One run of a case: its kernels, the numbers that it draws, and its results.

    Args:
        kernels: that it works with.
        seed: of what it draws; both runs draw the same.
    """

    def __init__(self, kernels: Any, seed: int):
        self.kernels, self.dtype = kernels, kernels.home.dtype
        self._generator = torch.Generator().manual_seed(seed)
        self.results: list[tuple[str, Tensor, float]] = []
        self.pairs: list[tuple[str, Tensor, Tensor]] = []

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)

    def close(self, name: str, result: Tensor, tolerance: float = TOLERANCE) -> None:
        """A result that may be off by so much."""
        self.results.append((name, result, tolerance))

    def equal(self, name: str, result: Tensor) -> None:
        """A result that must be what is expected, to the bit."""
        self.results.append((name, result, 0.0))

    def same(self, name: str, left: Tensor, right: Tensor) -> None:
        """Two results that must be the same bytes."""
        self.pairs.append((name, left, right))


Case = Callable[[Run], None]


def linear(run: Run, shape: tuple[int, int, int], has_bias: bool) -> None:
    rows, columns, depth = shape
    x = run.draw(rows, depth + 3)[:, :depth]
    packed = run.kernels.pack_linear(run.draw(columns, depth), run.draw(columns) if has_bias else None)
    whole = run.kernels.linear(x, packed)
    run.close("product", whole)
    for first, end in ((0, 1), (rows // 2, rows)):
        run.same("rows alone", run.kernels.linear(x[first:end], packed), whole[first:end])
    ids = run.integers(0, columns, 9)
    run.equal("rows of the weight", run.kernels.gather_rows(packed, ids))


def coded_linear(
    run: Run, shape: tuple[int, int, int], bits: int, beside: str, scale_dtype: torch.dtype, kind: str
) -> None:
    """`kind`: what codes stand for, or that the inputs of a group lie apart."""
    rows, columns, depth = shape
    group_size, levels = min(48, depth), 2**bits
    groups = -(-depth // group_size)
    table, order = (run.draw(levels), run.integers(0, groups, depth, dtype=torch.int32))
    if kind == "fp8":
        table = float8_values(torch.float8_e4m3fn).nan_to_num(480.0).to(run.dtype)
    scale = (run.draw(columns, groups).abs() + 0.1).to(scale_dtype)
    codes = run.integers(0, levels, columns, depth, dtype=torch.uint8)
    if kind == "fp8":
        codes[codes & 127 == 127] = 3  # no number
    coded = Coded(
        codes=codes, bits=bits, scale=scale,
        group_size=group_size,
        zero=run.integers(0, levels, columns, groups, dtype=torch.uint8) if beside == "zero" else None,
        least=-scale if beside == "least" else None,
        table=table.float() if kind in ("fp8", "table") else None,
        groups=order if kind == "shuffled" else None,
    )  # fmt: skip
    x, bias = run.draw(rows, depth + 3)[:, :depth], run.draw(columns)
    packed = run.kernels.pack_coded(coded, bias)
    whole = run.kernels.linear(x, packed)
    run.close("product", whole)
    run.same("decoded", run.kernels.linear(x, run.kernels.pack_linear(coded.dense(), bias)), whole)
    for first, end in ((0, 1), (rows // 3, rows)):
        run.same("rows alone", run.kernels.linear(x[first:end], packed), whole[first:end])
    run.equal("rows of the weight", run.kernels.gather_rows(packed, run.integers(0, columns, 9)))


def gather(run: Run) -> None:
    run.equal("rows", run.kernels.gather_rows(run.draw(50, 37), run.integers(0, 50, 70)))


def norms(run: Run, width: int) -> None:
    weight, x, residual = run.draw(width), run.draw(9, 2 * width)[:, :width], run.draw(9, width)
    run.close("norm", run.kernels.rms_norm(x, weight, 1e-5))
    heads = run.draw(9, 5 * width).view(9, 5, width)[:, 1:4]
    run.close("norm of heads", run.kernels.rms_norm(heads, weight, 1e-6))
    normed, summed = run.kernels.add_rms_norm(x, residual, weight, 1e-5)
    run.close("norm of a sum", normed)
    run.close("sum", summed)
    run.close("gate", run.kernels.silu_mul(run.draw(9, 2 * width) * 4))
    extreme = torch.tensor([[0.0, 90.0, -90.0, 1e4, -1e4, 1.0, -1.0, 3e38]]).to(run.dtype).repeat(2, 2)
    run.close("gate of extremes", run.kernels.silu_mul(extreme[:, :14].contiguous()))


def rotary(run: Run, dim: int, rot_dim: int, is_neox: bool) -> None:
    rows = run.draw(11, 7 * dim)
    query, key = rows[:, : 4 * dim].view(11, 4, dim), rows[:, 4 * dim : 6 * dim].view(11, 2, dim)
    angles = torch.arange(40)[:, None] * torch.logspace(0, -3, rot_dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1).to(run.dtype)
    run.kernels.rotary(query, key, run.integers(0, 40, 11), table, is_neox)
    run.close("rotated", rows)


def rounded(run: Run, x: Tensor, bits: int) -> Quantized:
    return run.kernels.quantize(x, Quantized.empty(x.shape[0], x.shape[1], bits))


def both(run: Run, name: str, result: Quantized) -> None:
    run.equal(f"{name}: values", result.values)
    run.equal(f"{name}: scales", result.scale)


def quantize(run: Run, width: int, bits: int) -> None:
    x = run.draw(30, width) * torch.logspace(-44, 37, 30)[:, None]
    x[3], x[4, 0], x[5, -1], x[6, width // 2] = 0.0, NAN, INF, -INF
    both(run, "rounded", rounded(run, x, bits))
    top = 127.0 if bits == 8 else 32767.0
    both(run, "ties", rounded(run, torch.tensor([[top, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 99.5]]), bits))


def rounding_loss(run: Run, width: int) -> None:
    weight, mean = run.draw(30, width), run.draw(width)
    run.close("lost", run.kernels.rounding_loss(weight, rounded(run, weight, 8), mean))


def kronecker(run: Run, sizes: tuple[int, ...], dim: int) -> None:
    factors = [run.draw(size, size) for size in sizes]
    size = math.prod(sizes)
    x, scale = run.draw(*((37, size) if dim == 1 else (size, 37))), run.draw(size)
    run.close("product", run.kernels.kronecker(x, scale, factors, dim))


def quantized_rows(run: Run, width: int, bits: int) -> None:
    """What norm and gate round is what they would have written."""
    weight, x, residual = run.draw(width), run.draw(7, 2 * width), run.draw(7, width)
    half, other = x[:, :width], residual.clone()

    def same(name: str, left: Quantized, right: Quantized) -> None:
        run.same(f"{name}: values", left.values, right.values)
        run.same(f"{name}: scales", left.scale, right.scale)

    def room() -> Quantized:
        return Quantized.empty(7, width, bits)

    normed = run.kernels.rms_norm(half, weight, 1e-5, room())
    same("norm", normed, rounded(run, run.kernels.rms_norm(half, weight, 1e-5), bits))
    summed, total = run.kernels.add_rms_norm(half, residual, weight, 1e-5, room())
    expected, expected_total = run.kernels.add_rms_norm(half, other, weight, 1e-5)
    same("norm of a sum", summed, rounded(run, expected, bits))
    run.same("sum", total, expected_total)
    same("gate", run.kernels.silu_mul(x, room()), rounded(run, run.kernels.silu_mul(x), bits))


def integer_linear(run: Run, shape: tuple[int, int, int], bits: int, is_full: bool) -> None:
    """`is_full`: only the largest and smallest integers, which overflow whatever adds them in 16 bits."""
    rows, columns, depth = shape
    top = 127 if bits == 8 else 32767
    x, weight = (run.draw(rows, depth), run.integers(-127, 128, columns, depth, dtype=torch.int8))
    if is_full:
        x, weight = x.sign() * top, weight.sign() * 127
        x[0], weight[0], weight[1] = top, 127, -127
    packed = run.kernels.pack_int8(weight, run.draw(columns).abs() * 0.01, run.draw(columns))
    values = rounded(run, x, bits)
    whole = run.kernels.linear(values, packed)
    run.equal("product", whole)
    run.same("last row alone", run.kernels.linear(values[rows - 1 :], packed), whole[rows - 1 :])


def drawn(run: Run, bits: int) -> None:
    """Draws from the products of a row, all or the first columns only; a row that holds a NaN has none."""
    x, weight, bias = run.draw(150, 48), run.draw(700, 48), run.draw(700)
    x[7, 5] = NAN
    if bits == 32:
        given, packed = x, run.kernels.pack_linear(weight, bias)
    else:
        whole = (weight * 30).clamp(-127, 127).to(torch.int8)
        given, packed = rounded(run, x, bits), run.kernels.pack_int8(whole, bias.abs() * 0.01, bias)
    nothing = torch.zeros(150, dtype=torch.float64)
    uniform = run.integers(0, 1000, 150) / torch.tensor(1000, dtype=torch.float64)
    for width in (700, 500, 3):
        for temperature in (nothing, nothing + 5):
            draws = Draws(
                temperature=temperature, top_k=torch.zeros(150, dtype=torch.int64), top_p=nothing + 1,
                min_p=nothing, uniform=uniform,
            )  # fmt: skip
            found = run.kernels.linear_draw(given, packed, width, temperature, uniform)
            if found is None:  # the reference has none
                found = run.kernels.sample(run.kernels.linear(given, packed)[:, :width].contiguous(), draws)
            run.equal(f"draws of {width}", found)
        run.equal(f"best of {width}", _best(run, given, packed, width))


def head(run: Run) -> None:
    """The largest result of a head's rows, all columns or the first only; a row that holds a NaN has none."""
    x, weight = run.draw(70, 48), run.draw(700, 48)
    x[7, 5], x[8] = NAN, 0.0
    weight[500] = weight[20]
    with patch.object(Screen, "pays", lambda library: True):
        packed = run.kernels.pack_linear(weight, is_head=True)
    for width in (700, 500, 3):
        run.equal(f"best of {width}", _best(run, x, packed, width))


def _best(run: Run, x: Any, packed: Any, width: int) -> Tensor:
    best = run.kernels.linear_argmax(x, packed, width)
    if best is None:  # the reference has none
        top = run.kernels.linear(x, packed)[:, :width].max(1)
        best = torch.where(top.values.isnan(), -1, top.indices)
    return best


def kept(run: Run, kv_dtype: str) -> None:
    """Attention over a lone token gives its value as it was stored."""
    values = torch.tensor(
        [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504.0, 65519.0, 65520.0, 1e6, -7e4, 2**-14,
         2**-15, 3 * 2**-25, 2**-25, 2**-24, 1e-9, 0.0, -0.0, INF, -INF, 3.3e38]
    ).to(run.dtype).repeat(1, 2, 1)  # fmt: skip
    kv = run.kernels.allocate_kv(KVCacheSpec(2, values.shape[2], 16, kv_dtype), 2, "cpu")
    run.kernels.store_kv(torch.zeros_like(values), values, kv, torch.tensor([16], dtype=torch.int32))
    meta = AttentionMeta(
        *(torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [1], [[1]], [16])), 1, 1
    )
    run.equal("values", run.kernels.attention(torch.zeros_like(values), kv, meta, 1.0))


def attention(run: Run, case: AttentionCase, kv_dtype: str) -> None:
    dtype = str(run.dtype).removeprefix("torch.")
    inputs = make_inputs(case, run.kernels, dtype, rounded_to="float32", kv_dtype=kv_dtype)
    run.close("attention", inputs.attend(case), KV_TOLERANCE[kv_dtype])


def chunked_attention(run: Run, kv_dtype: str) -> None:
    """A query's bits do not depend on how its prompt is cut."""
    dtype = str(run.dtype).removeprefix("torch.")
    last = []
    for count in (40, 7, 1):
        case = AttentionCase(name="", query_lens=[count], seq_lens=[150], num_heads=6, num_kv_heads=2)
        inputs = make_inputs(case, run.kernels, dtype, rounded_to="float32", kv_dtype=kv_dtype)
        last.append(inputs.attend(case)[-1:])
    run.close("attention", last[0], KV_TOLERANCE[kv_dtype])
    run.same("chunk of 7", last[1], last[0])
    run.same("chunk of 1", last[2], last[0])


def sampling(run: Run, width: int) -> None:
    rows = 24
    logits = run.draw(rows, width).float() * 3

    def pick(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype)[run.integers(0, len(values), rows)]

    ways = Draws(
        temperature=pick(0.0, 0.5, 1.0, 1.7),
        top_k=pick(0, 1, 5, 50, dtype=torch.int64),
        top_p=pick(1.0, 0.9, 0.5),
        min_p=pick(0.0, 0.05, 0.5),
        uniform=torch.rand(rows, generator=torch.Generator().manual_seed(width), dtype=torch.float64),
    )
    tokens = run.integers(-1, width, rows, 3)
    number = min(width, 12)
    scores = run.kernels.score_tokens(logits, tokens, torch.full((rows,), number))
    run.close("log of the total", scores.log_total)
    run.equal("ranks", scores.ranks)
    run.equal("likeliest", scores.top_ids)
    run.equal("their logits", scores.top_values)
    run.equal("draws", run.kernels.sample(logits, ways))


def penalties(run: Run) -> None:
    logits = run.draw(4, 300).float()
    given = Penalties(
        rows=torch.tensor([2, 0]),
        tokens=run.integers(-1, 310, 90, dtype=torch.int32),
        starts=torch.tensor([0, 60, 90]),
        num_prompt=torch.tensor([20, 0]),
        repetition=torch.tensor([1.3, 0.8], dtype=torch.float64),
        frequency=torch.tensor([0.2, -0.5], dtype=torch.float64),
        presence=torch.tensor([0.1, 1.0], dtype=torch.float64),
    )
    run.kernels.penalise(logits, given)
    run.close("penalised", logits)


def program(run: Run, kv_dtype: str) -> None:
    """A layer and a half as one recorded program, run for fewer rows than it was recorded for."""
    k, dtype = run.kernels, kv_dtype
    table, norm = run.draw(60, 64), run.draw(64)
    qkv, out_proj = k.pack_linear(run.draw(4 * 32, 64) / 8), k.pack_linear(run.draw(64, 64) / 8)
    up = k.pack_int8(run.integers(-127, 128, 96, 64, dtype=torch.int8), run.draw(96).float().abs() * 0.01)
    angles = torch.arange(64)[:, None] * torch.logspace(0, -3, 16)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(run.dtype)
    kv = k.allocate_kv(KVCacheSpec(1, 32, 16, dtype), 6, "cpu")
    most, used = StepSizes(16, 17, 18, 19), StepSizes(9, 3, 2, 2)
    sizes = used if run.dtype is torch.float64 else most

    def numbers(size: int, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values + [0] * (size - len(values)), dtype=dtype)

    ids = numbers(sizes.tokens, [5, 9, 2, 50, 31, 7, 59, 0, 1], torch.int64)
    positions = numbers(sizes.tokens, [*range(7), 0, 1], torch.int64)
    rows = numbers(sizes.rows, [0, 6, 8], torch.int64)
    slots = numbers(sizes.tokens, [*range(32, 39), 80, 81])
    tables = numbers(sizes.sequences * sizes.table_width, [2, -1, 5, -1])
    meta = AttentionMeta(
        numbers(sizes.sequences + 1, [0, 7, 9]), numbers(sizes.sequences, [7, 2]),
        tables.view(sizes.sequences, sizes.table_width), slots, 7, 7,
    )  # fmt: skip
    found = []

    def build() -> None:
        stream = k.gather_rows(table, ids)
        fused = k.linear(k.rms_norm(stream, norm, 1e-5), qkv).view(-1, 4, 32)
        query, key, value = fused[:, :2], fused[:, 2:3], fused[:, 3:]
        k.rotary(query, key, positions, cos_sin)
        k.store_kv(key, value, kv, slots)
        attended = k.attention(query, kv, meta, 32**-0.5)
        summed, _ = k.add_rms_norm(k.linear(attended.view(-1, 64), out_proj), stream, norm, 1e-5)
        found.append(k.gather_rows(summed, rows))
        found.append(k.linear(k.quantize(found[0], Quantized.empty(sizes.rows, 64, 16)), up))

    recorded = k.record(build, sizes)
    if recorded is None:
        build()
    else:
        recorded.run(used)
    run.close("picked rows", found[0][: used.rows], 3 * KV_TOLERANCE[kv_dtype])
    run.close("product of integers", found[1][: used.rows], 3e-4)


def blocks(run: Run, kind: GGMLQuantizationType) -> None:
    """Blocks of a GGUF file, against the package that defines them."""
    num_values, num_bytes = GGML_QUANT_SIZES[kind]
    raw = run.integers(0, 256, 20, num_bytes, dtype=torch.uint8)
    # Scales in the bytes may be anything but huge.
    raw[:, 1::2] &= 0x3F
    if run.dtype is torch.float64:
        expected = torch.from_numpy(gguf.dequantize(raw.numpy(), kind)).flatten()
    else:
        expected = dequantize(int(kind), raw.flatten(), 20 * num_values)
        run.kernels.know(raw)
    run.equal("values", expected)


def all_cases() -> Iterator[tuple[str, str, Case]]:
    """Name of each case, dtype of the reference that it is compared with, and the case."""
    for shape in ((1, 5, 7), (13, 70, 100), (30, 33, 1600), (200, 40, 64), (5, 200, 576)):
        yield f"linear {shape}", "float64", partial(linear, shape=shape, has_bias=False)
        yield f"linear {shape} with bias", "float64", partial(linear, shape=shape, has_bias=True)
    ways = [(bits, ("none", "zero", "least")[bits % 3], "codes") for bits in range(1, 9)]
    ways += [(bits, "none", "table") for bits in range(1, 9)]
    ways += [(4, "zero", "shuffled"), (4, "least", "table"), (8, "none", "fp8")]
    for number, (bits, beside, kind) in enumerate(ways):
        scale_dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 3]
        case = partial(coded_linear, bits=bits, beside=beside, scale_dtype=scale_dtype, kind=kind)
        for shape in ((3, 70, 100), (40, 33, 500), (4, 5, 7)):
            yield f"{kind} {shape}, {bits} bits, {beside}", "float32", partial(case, shape=shape)
    yield from lora_cases()
    yield from rounding_cases()
    yield "gather", "float32", gather
    for width in (8, 33, 64, 576):
        yield f"norms {width}", "float64", partial(norms, width=width)
    for dim, rot_dim in ((64, 64), (80, 32), (6, 2)):
        for is_neox in (True, False):
            name = f"rotary {dim} {rot_dim} {'halves' if is_neox else 'pairs'}"
            yield name, "float64", partial(rotary, dim=dim, rot_dim=rot_dim, is_neox=is_neox)
    for width in (33, 64, 576):
        yield f"loss of rounding {width}", "float32", partial(rounding_loss, width=width)
    for sizes in ((16, 36), (7, 9, 2)):
        for dim in (0, 1):
            yield f"kronecker {sizes} {dim}", "float32", partial(kronecker, sizes=sizes, dim=dim)
    for bits in (8, 16):
        for width in (1, 63, 64, 65, 576):
            yield f"quantize {width}, {bits} bits", "float32", partial(quantize, width=width, bits=bits)
        for width in (33, 64, 576):
            name = f"quantized rows {width}, {bits} bits"
            yield name, "float32", partial(quantized_rows, width=width, bits=bits)
        for shape in ((1, 5, 7), (13, 70, 100), (35, 100, 576), (300, 24, 64), (3, 17, 1536)):
            for is_full in (False, True):
                name = f"integers {shape}, {bits} bits{', full' if is_full else ''}"
                yield name, "float32", partial(integer_linear, shape=shape, bits=bits, is_full=is_full)
    for bits in (8, 16, 32):
        yield f"drawn from products, {bits} bits", "float32", partial(drawn, bits=bits)
    yield "head", "float32", head
    for kv_dtype in KV_DTYPES:
        if kv_dtype != "int8":  # which rounds queries too
            yield f"kept in {kv_dtype}", "float32", partial(kept, kv_dtype=kv_dtype)
        for case in CASES:
            name = f"attention {case}, {kv_dtype}"
            yield name, "float64", partial(attention, case=case, kv_dtype=kv_dtype)
        yield f"chunked attention, {kv_dtype}", "float64", partial(chunked_attention, kv_dtype=kv_dtype)
        yield f"program, {kv_dtype}", "float64", partial(program, kv_dtype=kv_dtype)
    for width in (1, 7, 128, 1000, 5000):
        yield f"sampling {width}", "float32", partial(sampling, width=width)
    yield "penalties", "float32", penalties
    for type_id in BLOCKS:
        kind = GGMLQuantizationType(type_id)
        yield f"blocks {kind.name}", "float64", partial(blocks, kind=kind)


def write(path: Path) -> None:
    """Write all cases."""
    unused = {*NotingLibrary(Transcript()).kinds, *CALLED}
    with path.open("wb") as file:
        file.write(MAGIC)
        for number, (name, dtype, case) in enumerate(all_cases()):
            right = Run(choose("cpu", dtype, backend="reference", head_dim=64), number)
            case(right)
            transcript = Transcript()
            noted = Run(transcript.kernels(), number)
            with (
                patch.object(dequantizing, "load", lambda kernels=noted.kernels: kernels.library),
                patch.object(round_groups, "load", lambda kernels=noted.kernels: kernels.library),
                patch.object(torch, "empty", transcript.shown(torch.empty)),
            ):
                case(noted)
            for (what, result, tolerance), (_, expected, _) in zip(noted.results, right.results, strict=True):
                transcript.expect(what, result, expected, tolerance)
            for pair in noted.pairs:
                transcript.same(*pair)
            transcript.write(name, file)
            unused -= transcript.used
    if unused:
        raise SystemExit(f"no case for {', '.join(sorted(unused))}: add one to write_cases.py")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What is not written yet holds NaN.
    torch.use_deterministic_algorithms(True)
    write(Path(sys.argv[1]))
