"""Adapters kept for layers of integers: what is added, and the same bits in any step."""

import pytest
import torch

from batchgen.errors import KernelError
from batchgen.kernels.cases import relative_rms
from batchgen.kernels.cpu import lora as cpu_lora
from batchgen.kernels.lora import LoraPart, LoraSegments
from batchgen.kernels.ops import Kernels, choose
from batchgen.kernels.program import StepSizes
from batchgen.kernels.quantized import Quantized

SLOTS = [2, -1, 0, 0, 1, 2, 2, 0, -1, 2, 0, 1, 2, 2, 2, 2, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
# Sums are floats.
TOLERANCE = 2e-6
# What 8 bits for each number of A lose.
ROUNDING = 0.015

CASES: list[tuple[int, tuple[int, ...], list[tuple[int, ...]]]] = [
    (72, (96, 32, 32), [(16, 16, 16), (4, 0, 9), (1, 1, 1)]),
    (576, (1536, 1536), [(16, 16), (64, 0), (33, 17)]),
    (1536, (576,), [(16,), (8,), (512,)]),
    (33, (7, 50), [(3, 5), (0, 2), (20, 1)]),
    (2100, (100,), [(16,), (31,), (48,)]),
]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return choose("cpu", "float32", backend="cpu", head_dim=16)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(inputs: int, sizes: tuple[int, ...], ranks: tuple[int, ...], seed: int) -> list[LoraPart | None]:
    """Numbers that 8 bits with a scale for each row of A hold, and halves of B."""
    parts: list[LoraPart | None] = []
    for part, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
        integers = (draw(rank, inputs, seed=seed + part) * 40).round().clamp(-127, 127)
        integers[:, 0] = 127
        a = integers * (2.0 ** -torch.arange(5.0, 5.0 + rank).remainder(9))[:, None] / 8
        b = draw(size, rank, seed=seed + part + 50).half().float() / 8
        bias = draw(size, seed=seed + part + 90) if (seed + part) % 2 else None
        parts.append(LoraPart(a, b, bias) if rank else None)
    return parts


def given(kernels: Kernels, bits: int, rows: int, inputs: int) -> Quantized:
    x = draw(rows, inputs, seed=3) * torch.linspace(0.1, 30, rows)[:, None]
    return kernels.quantize(x, Quantized.empty(rows, inputs, bits))


def segments_of(slots: list[int]) -> LoraSegments:
    segments = LoraSegments.empty(len(slots), 3)
    segments.fill(slots)
    return segments


def bank_of(kernels: Kernels, inputs: int, sizes: tuple[int, ...], adapters: list[list[LoraPart | None]]):
    bank = kernels.lora_bank(inputs, sizes, 3)
    for slot, parts in enumerate(adapters):
        bank.put(slot, kernels.pack_lora(inputs, sizes, parts, "int8"))
    return bank


def added(kernels: Kernels, x: Quantized, bank, slots: list[int], width: int) -> torch.Tensor:
    out = draw(len(slots), width, seed=9)
    kernels.lora_add(x, bank, segments_of(slots), out)
    return out


def expected(x: Quantized, adapters: list[list[LoraPart | None]], sizes: tuple[int, ...]) -> torch.Tensor:
    true = torch.zeros(len(SLOTS), sum(sizes), dtype=torch.float64)
    for row, slot in enumerate(SLOTS):
        begin = 0
        for size, part in zip(sizes, adapters[slot], strict=True):
            if slot >= 0 and part is not None:
                change = x.dense()[row].double() @ part.a.double().T @ part.b.double().T
                true[row, begin : begin + size] = change + (0 if part.bias is None else part.bias.double())
            begin += size
    return true


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("inputs", "sizes", "ranks"), CASES)
def test_what_is_added_is_what_the_numbers_say(
    kernels: Kernels, bits: int, inputs: int, sizes: tuple[int, ...], ranks: list[tuple[int, ...]]
) -> None:
    adapters = [exact(inputs, sizes, each, 7 * number) for number, each in enumerate(ranks)]
    x, before = given(kernels, bits, len(SLOTS), inputs), draw(len(SLOTS), sum(sizes), seed=9)
    found = added(kernels, x, bank_of(kernels, inputs, sizes, adapters), SLOTS, sum(sizes))
    base = [row for row, slot in enumerate(SLOTS) if slot < 0]
    assert torch.equal(found[base], before[base])
    assert relative_rms(found - before, expected(x, adapters, sizes)) < TOLERANCE


@pytest.mark.parametrize("bits", [8, 16])
def test_any_numbers_are_rounded(kernels: Kernels, bits: int) -> None:
    inputs, sizes, ranks = CASES[1]
    adapters: list[list[LoraPart | None]] = [
        [
            LoraPart(draw(rank, inputs, seed=slot), draw(size, rank, seed=part)) if rank else None
            for part, (size, rank) in enumerate(zip(sizes, of_parts, strict=True))
        ]
        for slot, of_parts in enumerate(ranks)
    ]
    x, before = given(kernels, bits, len(SLOTS), inputs), draw(len(SLOTS), sum(sizes), seed=9)
    found = added(kernels, x, bank_of(kernels, inputs, sizes, adapters), SLOTS, sum(sizes))
    assert relative_rms(found - before, expected(x, adapters, sizes)) < ROUNDING


@pytest.mark.parametrize("bits", [8, 16])
def test_a_row_has_the_same_bits_in_any_step(kernels: Kernels, bits: int) -> None:
    inputs, sizes, ranks = CASES[1]
    bank = bank_of(
        kernels, inputs, sizes, [exact(inputs, sizes, each, slot) for slot, each in enumerate(ranks)]
    )
    x, threads_before = given(kernels, bits, len(SLOTS), inputs), torch.get_num_threads()
    together = added(kernels, x, bank, SLOTS, sum(sizes))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(added(kernels, x, bank, SLOTS, sum(sizes)), together)
            for row in (0, 4, 9, 27):
                out = draw(len(SLOTS), sum(sizes), seed=9)[row : row + 1].clone()
                kernels.lora_add(x[row : row + 1], bank, segments_of([SLOTS[row]]), out)
                assert torch.equal(out[0], together[row])
    finally:
        torch.set_num_threads(threads_before)


def test_it_runs_in_a_program_beside_other_kinds(kernels: Kernels) -> None:
    inputs, sizes, ranks = CASES[0]
    bank = kernels.lora_bank(inputs, sizes, 3)
    for slot, (each, kind) in enumerate(zip(ranks, ("float32", "int8", "float16"), strict=True)):
        bank.put(slot, kernels.pack_lora(inputs, sizes, exact(inputs, sizes, each, slot), kind))
    x, segments = given(kernels, 16, len(SLOTS), inputs), segments_of(SLOTS)
    alone = added(kernels, x, bank, SLOTS, sum(sizes))
    out = torch.empty(len(SLOTS), sum(sizes))
    program = kernels.record(lambda: kernels.lora_add(x, bank, segments, out), StepSizes(len(SLOTS), 1, 2, 3))
    assert program is not None
    out.copy_(draw(len(SLOTS), sum(sizes), seed=9))
    program.run(StepSizes(len(SLOTS), 1, 2, 3))
    assert torch.equal(out, alone)


def test_rows_of_floats_are_refused_where_they_would_be_misread(kernels: Kernels) -> None:
    inputs, sizes, ranks = CASES[0]
    bank = bank_of(kernels, inputs, sizes, [exact(inputs, sizes, ranks[0], 0)])
    if not bank.has_integers:
        pytest.skip("this processor keeps them as float16")
    with pytest.raises(KernelError, match="dtype int8 is for rows of integers"):
        kernels.lora_add(draw(2, inputs, seed=1), bank, segments_of([0, 0]), torch.zeros(2, sum(sizes)))


def test_without_the_instruction_they_are_kept_as_float16(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, sizes, ranks = CASES[0]
    parts = exact(inputs, sizes, ranks[0], 0)
    monkeypatch.setattr(kernels._lora.library, "lora_has_integers", False)
    packed = kernels.pack_lora(inputs, sizes, parts, "int8")
    plain = kernels.pack_lora(inputs, sizes, parts, "float16")
    assert isinstance(packed, cpu_lora.CpuLora) and not packed.has_integers
    assert all(torch.equal(*pair) for pair in zip(packed.tensors(), plain.tensors(), strict=True))
