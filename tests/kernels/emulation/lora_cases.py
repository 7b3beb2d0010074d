"""Cases for driver.c: adapters beside layers and embeddings. `run` is a Run of write_cases.py."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from batchgen.kernels.lora import LoraPart, LoraSegments
from batchgen.kernels.quantized import Quantized


def lora_cases() -> Iterator[tuple[str, str, Callable[[Any], None]]]:
    """As all_cases of write_cases.py."""
    few, many = ((40, 70), [512, 200]), ((40, 70), [16, 0, 5])
    for number, dtype in enumerate(("float32", "float16", "bfloat16")):
        for rows, (sizes, ranks) in ((3, few), (6, few), (300, many), (300, ((33,), [17]))):
            bits = (32, 8, 16)[(number + rows) % 3]
            case = partial(lora, rows=rows, sizes=sizes, ranks=ranks, dtype=dtype, bits=bits)
            name = f"lora {rows} {sizes} {ranks}, {dtype}, {bits} bits"
            yield name, "float32" if bits < 32 else "float64", case
        case = partial(lora_table, rank=(5, 16, 40)[number], dtype=dtype)
        yield f"lora of a table, {dtype}", "float64", case


def lora(run: Any, rows: int, sizes: tuple[int, ...], ranks: list[int], dtype: str, bits: int) -> None:
    """Adapters beside a layer of 500 inputs, a rank for each slot; rank 0: the slot is empty.

    What lies between the two operations of work that is split is compared too: so that one thread splits what
    three do, tiles are two at most, or nine at least.
    """
    inputs, slots = 500, [row % (len(ranks) + 1) - 1 for row in range(rows)]
    bank = run.kernels.lora_bank(inputs, sizes, len(ranks))
    filled = [slot for slot, rank in enumerate(ranks) if rank]
    for slot in filled:
        parts = [_part(run, inputs, size, ranks[slot]) for size in sizes]
        bank.put(slot, run.kernels.pack_lora(inputs, sizes, parts, dtype))
    x: Any = run.draw(rows, inputs + 3)[:, :inputs]
    if bits < 32:
        x = run.kernels.quantize(x, Quantized.empty(rows, inputs, bits))

    def added(first: int, end: int, base: Tensor) -> Tensor:
        segments = LoraSegments.empty(end - first, len(ranks))
        segments.fill(slots[first:end])
        out = base[first:end].clone()
        run.kernels.lora_add(x[first:end], bank, segments, out)
        return out

    base = run.draw(rows, sum(sizes))
    whole = added(0, rows, base)
    run.close("sums", whole)
    for first, end in ((0, 2), (rows // 2, rows)):
        run.same("rows alone", added(first, end, base), whole[first:end])
    for slot in filled:  # addresses differ from run to run of a case
        bank.put(slot, None)


def lora_table(run: Any, rank: int, dtype: str) -> None:
    bank, part = run.kernels.lora_bank(60, [70], 2, is_table=True), _part(run, 60, 70, rank)
    bank.put(1, run.kernels.pack_lora_table(60, part, dtype))
    segments, out = LoraSegments.empty(30, 2), run.draw(30, 70)
    segments.fill([row % 3 - 1 for row in range(30)])
    run.kernels.lora_gather_add(run.integers(0, 60, 30), bank, segments, out)
    run.close("sums", out)
    bank.put(1, None)


def _part(run: Any, inputs: int, outputs: int, rank: int) -> LoraPart:
    """Of numbers that halves hold as they are, so that every dtype means the same."""
    a, b = (run.draw(*shape).bfloat16().half().to(run.dtype) for shape in ((rank, inputs), (outputs, rank)))
    return LoraPart(a / 8, b / 8, run.draw(outputs))
