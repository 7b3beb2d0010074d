"""Adapters beside linear layers and embeddings: what is added, to whom, and the same bits in any step."""

import threading

import pytest
import torch

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.cases import TOLERANCE, relative_rms
from batchgen.kernels.cpu import lora as cpu_lora
from batchgen.kernels.lora import MOST_RANK, LoraPart, LoraSegments
from batchgen.kernels.ops import Kernels, choose
from batchgen.kernels.program import StepSizes
from batchgen.kernels.quantized import Quantized

DTYPES = ("float32", "float16", "bfloat16")


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _part(inputs: int, outputs: int, rank: int, *, has_bias: bool = False, seed: int = 1) -> LoraPart:
    a, b = _draw(rank, inputs, seed=seed) / 8, _draw(outputs, rank, seed=seed + 1) / 8
    return LoraPart(a, b, _draw(outputs, seed=seed + 2) if has_bias else None)


def _segments(slots: list[int], num_slots: int) -> LoraSegments:
    segments = LoraSegments.empty(len(slots), num_slots)
    segments.fill(slots)
    return segments


def _expected(x: torch.Tensor, part: LoraPart) -> torch.Tensor:
    added = x.double() @ part.a.double().T @ part.b.double().T
    return added if part.bias is None else added + part.bias.double()


def _adapters(
    inputs: int, sizes: tuple[int, ...], ranks: list[tuple[int, ...]]
) -> list[list[LoraPart | None]]:
    """An adapter for each tuple of ranks; rank 0: it has no such part. Every second one has biases."""
    return [
        [
            _part(inputs, size, rank, has_bias=bool(number % 2), seed=10 * (number * len(sizes) + place))
            if rank
            else None
            for place, (size, rank) in enumerate(zip(sizes, of_parts, strict=True))
        ]
        for number, of_parts in enumerate(ranks)
    ]


def _bank(kernels: Kernels, inputs: int, sizes: tuple[int, ...], adapters, dtype: str = "float32"):
    bank = kernels.lora_bank(inputs, sizes, len(adapters))
    for slot, parts in enumerate(adapters):
        bank.put(slot, None if parts is None else kernels.pack_lora(inputs, sizes, parts, dtype))
    return bank


@pytest.mark.parametrize(
    ("inputs", "sizes", "ranks"),
    [
        (576, (576, 192, 192), [(16, 16, 16), (8, 0, 8), (1, 64, 3)]),
        (576, (1536, 1536), [(16, 16), (0, 5)]),
        (1536, (576,), [(16,), (17,), (512,)]),
        (100, (33, 5), [(2, 3), (16, 16)]),
        (1, (1,), [(1,)]),
        (1000, (40,), [(33,)]),
    ],
)
def test_each_row_gets_what_its_adapter_says(make_kernels, num_threads, inputs, sizes, ranks):
    kernels, adapters = make_kernels(), _adapters(inputs, sizes, ranks)
    bank = _bank(kernels, inputs, sizes, adapters)
    slots = [(3 * row + row // 7) % (len(ranks) + 1) - 1 for row in range(40)]
    x, out = _draw(40, inputs), _draw(40, sum(sizes), seed=5)
    before = out.clone()
    kernels.lora_add(x, bank, _segments(slots, len(ranks)), out)
    for slot, parts in enumerate(adapters):
        rows = torch.tensor([row for row, at in enumerate(slots) if at == slot])
        begin = 0
        for size, part in zip(sizes, parts, strict=True):
            now, earlier = (each[rows, begin : begin + size] for each in (out, before))
            if part is None:
                assert torch.equal(now, earlier)
            else:
                expected = earlier.double() + _expected(x[rows], part)
                assert relative_rms(now, expected) < TOLERANCE["float32"]
            begin += size
    others = torch.tensor([slot < 0 for slot in slots])
    assert torch.equal(out[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_and_b_may_be_kept_in_halves(make_kernels, backend, dtype):
    kernels, kept = make_kernels(), getattr(torch, dtype)
    part = _part(200, 70, 20)
    rounded = LoraPart(part.a.to(kept).float(), part.b.to(kept).float())
    x, results = _draw(9, 200), []
    for given, name in ((part, dtype), (rounded, "float32")):
        out = torch.zeros(9, 70)
        bank = _bank(kernels, 200, (70,), [[given]], name)
        kernels.lora_add(x, bank, _segments([0] * 9, 1), out)
        results.append(out)
    assert torch.equal(*results)
    packed = kernels.pack_lora(200, [70], [part], dtype)
    padded = 32 if backend != "reference" else 20
    columns = 80 if backend != "reference" else 70
    assert sum(each.nbytes for each in packed.tensors()) == (padded * 200 + columns * 20) * kept.itemsize


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("inputs", [576, 100, 1, 1024, 1000])
def test_quantized_rows_stand_for_their_floats(make_kernels, bits, inputs):
    kernels = make_kernels()
    x = kernels.quantize(_draw(21, inputs), Quantized.empty(21, inputs, bits))
    bank = _bank(kernels, inputs, (48,), _adapters(inputs, (48,), [(16,), (5,)]))
    segments = _segments([row % 3 - 1 for row in range(21)], 2)
    given, expected = _draw(21, 48, seed=2), _draw(21, 48, seed=2)
    kernels.lora_add(x, bank, segments, given)
    kernels.lora_add(x.dense(), bank, segments, expected)
    assert torch.equal(given, expected)


def test_rows_may_stand_apart(make_kernels):
    kernels, wide_x, wide = make_kernels(), _draw(9, 300), _draw(9, 200, seed=3)
    bank = _bank(kernels, 100, (40,), _adapters(100, (40,), [(16,)]))
    segments, expected = _segments([0, -1] * 4 + [0], 1), wide[:, 50:90].clone()
    kernels.lora_add(wide_x[:, 20:120].contiguous(), bank, segments, expected)
    before = wide.clone()
    kernels.lora_add(wide_x[:, 20:120], bank, segments, wide[:, 50:90])
    assert torch.equal(wide[:, 50:90], expected)
    assert torch.equal(wide[:, :50], before[:, :50])
    assert torch.equal(wide[:, 90:], before[:, 90:])


def test_no_segment_and_empty_slots_change_nothing(make_kernels):
    kernels = make_kernels()
    bank = _bank(kernels, 64, (32,), [None, *_adapters(64, (32,), [(8,)])])
    x, out = _draw(5, 64), _draw(5, 32, seed=1)
    before = out.clone()
    kernels.lora_add(x, bank, _segments([-1] * 5, 2), out)
    kernels.lora_add(x, bank, _segments([0] * 5, 2), out)
    kernels.lora_add(x[:0], bank, _segments([], 2), out[:0])
    nothing = kernels.lora_bank(64, [32], 1)
    nothing.put(0, kernels.pack_lora(64, [32], [None]))
    kernels.lora_add(x, nothing, _segments([0] * 5, 1), out)
    assert torch.equal(out, before)
    bank.put(1, None)
    kernels.lora_add(x, bank, _segments([1] * 5, 2), out)
    assert torch.equal(out, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [[(16, 16), (8, 0), (3, 20)], [(512, 300), (512, 1), (16, 512)]])
def test_same_bits_in_any_step(make_invariant_kernels, num_threads, ranks, dtype):
    kernels, sizes, inputs = make_invariant_kernels(), (200, 72), 1000
    bank = _bank(kernels, inputs, sizes, _adapters(inputs, sizes, ranks), dtype)
    x, base = _draw(150, inputs), _draw(150, 272, seed=9)
    slots = [row * row % 4 - 1 for row in range(150)]

    def added(rows: list[int]) -> torch.Tensor:
        out = base[rows]
        kernels.lora_add(x[rows], bank, _segments([slots[row] for row in rows], 3), out)
        return out

    whole = added(list(range(150)))
    for row in (0, 1, 2, 3, 77, 149):
        assert torch.equal(added([row])[0], whole[row]), f"row {row} alone"
    for size in (2, 3, 5, 17, 64):
        assert torch.equal(
            torch.cat([added(list(range(at, min(at + size, 150)))) for at in range(0, 150, size)]), whole
        )
    order = torch.randperm(150, generator=torch.Generator().manual_seed(3)).tolist()
    assert torch.equal(added(order), whole[order])


def test_same_bits_on_any_number_of_threads(make_invariant_kernels):
    kernels, before = make_invariant_kernels(), torch.get_num_threads()
    bank = _bank(kernels, 700, (500,), _adapters(700, (500,), [(512,), (16,)]))
    results = []
    for rows in (1, 9, 70):
        x, segments = _draw(rows, 700), _segments([row % 2 for row in range(rows)], 2)
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            out = torch.zeros(rows, 500)
            kernels.lora_add(x, bank, segments, out)
            results.append(out)
        torch.set_num_threads(before)
        assert all(torch.equal(result, results[0]) for result in results)
        results.clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 8, 16, 40])
def test_embeddings(make_kernels, num_threads, rank, dtype):
    kernels, part = make_kernels(), _part(90, 70, rank)
    bank = kernels.lora_bank(90, [70], 2, is_table=True)
    bank.put(1, kernels.pack_lora_table(90, part, dtype))
    ids = torch.randint(90, (30,), generator=torch.Generator().manual_seed(1))
    out, slots = _draw(30, 70, seed=4), [row % 3 - 1 for row in range(30)]
    expected = out.double()
    kept = getattr(torch, dtype)
    for row, slot in enumerate(slots):
        if slot == 1:
            expected[row] += part.b.to(kept).double() @ part.a.to(kept).double()[:, ids[row]]
    kernels.lora_gather_add(ids, bank, _segments(slots, 2), out)
    assert relative_rms(out, expected) < TOLERANCE["float32"]


MOST = StepSizes(tokens=70, rows=41, sequences=22, table_width=5)


def test_programs_follow_segments_and_slots(make_kernels, num_threads):
    kernels = make_kernels()
    if kernels.record(lambda: None, MOST) is None:
        pytest.skip("records nothing")
    adapters = _adapters(100, (60, 30), [(16, 8), (0, 3), (512, 512)])
    packed = [kernels.pack_lora(100, [60, 30], parts) for parts in adapters]
    table = kernels.pack_lora_table(100, _part(100, 100, 4))
    bank, embedding = kernels.lora_bank(100, [60, 30], 2), kernels.lora_bank(100, [100], 2, is_table=True)
    segments, ids = LoraSegments.empty(MOST.tokens, 2), torch.zeros(MOST.tokens, dtype=torch.int64)
    x, out = torch.zeros(MOST.tokens, 100), torch.zeros(MOST.tokens, 90)

    def step(count: int) -> None:
        kernels.lora_gather_add(ids[:count], embedding, segments, x[:count])
        kernels.lora_add(x[:count], bank, segments, out[:count])

    program = kernels.record(lambda: step(MOST.tokens), MOST)
    changes = [(0, 0, table), (1, 2, None), (0, 1, None), (1, None, table), (1, 0, table), (0, 2, table)]
    for number, (slot, adapter, of_table) in enumerate(changes):
        bank.put(slot, None if adapter is None else packed[adapter])
        embedding.put(slot, of_table)
        for count in (1, 70, 0, 13):
            segments.fill([(row + number) % 3 - 1 for row in range(count)])
            results = []
            for is_recorded in (True, False):
                ids[:count] = torch.arange(count) % 100
                x.copy_(_draw(*x.shape, seed=number))
                out.copy_(_draw(*out.shape, seed=number + 1))
                if is_recorded:
                    program.run(StepSizes(count, 1, 1, 1))
                else:
                    step(count)
                results.append((x.clone(), out.clone()))
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_threads_may_pack_while_steps_run(make_kernels):
    kernels, parts = make_kernels(), _adapters(300, (200,), [(16,)])[0]
    bank, x, out = _bank(kernels, 300, (200,), [parts]), _draw(8, 300), torch.zeros(8, 200)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(kernels.pack_lora(300, [200], parts))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    kernels.lora_add(x, bank, _segments([0] * 8, 1), out)
    for thread in threads:
        thread.join()
    for packed in found:
        bank.put(0, packed)
        again = torch.zeros(8, 200)
        kernels.lora_add(x, bank, _segments([0] * 8, 1), again)
        assert torch.equal(again, out)


def test_the_work_of_few_rows_is_split(make_invariant_kernels, monkeypatch):
    """With no room between the two operations one thread does all of it, and the bits are the same."""
    kernels = make_invariant_kernels()
    bank, x, results = _bank(kernels, 2000, (900,), _adapters(2000, (900,), [(512,)])), _draw(3, 2000), []
    scratch = []
    monkeypatch.setattr(cpu_lora, "_scratch", lambda calls: scratch[-1])
    for room in (cpu_lora.ROOM, 0):
        scratch.append(torch.full((cpu_lora.ROOM,), float("nan")))
        monkeypatch.setattr(cpu_lora, "ROOM", room)
        out = torch.zeros(3, 900)
        kernels.lora_add(x, bank, _segments([0] * 3, 1), out)
        results.append(out)
    assert torch.equal(*results)
    assert [int(each.isfinite().sum()) for each in scratch] == [3 * 512, 0]


@pytest.mark.parametrize(
    ("rows", "starts"),
    [
        ([0, 4], [0, 1, 2]),
        ([-1, 0], [0, 1, 2]),
        ([0, 1], [0, 2, 1]),
        ([0, 1], [0, 1, 9]),
        ([0, 1], [1, 1, 2]),
    ],
)
def test_segments_that_point_outside_are_refused(make_kernels, rows, starts):
    kernels = make_kernels()
    bank = _bank(kernels, 64, (32,), _adapters(64, (32,), [(8,), (8,)]))
    segments = LoraSegments(
        torch.tensor([*rows, 0, 0], dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)
    )
    with pytest.raises(KernelError, match="lora_add: segments name rows outside"):
        kernels.lora_add(_draw(4, 64), bank, segments, torch.zeros(4, 32))


@pytest.mark.parametrize("bad", [-1, 90])
def test_ids_outside_of_the_table_are_refused(make_kernels, bad):
    kernels = make_kernels()
    bank = kernels.lora_bank(90, [70], 1, is_table=True)
    bank.put(0, kernels.pack_lora_table(90, _part(90, 70, 4)))
    ids = torch.tensor([0, bad, 3])
    kernels.lora_gather_add(ids, bank, _segments([0, -1, 0], 1), torch.zeros(3, 70))
    with pytest.raises(KernelError, match="lora_gather_add: an id is outside"):
        kernels.lora_gather_add(ids, bank, _segments([0, 0, 0], 1), torch.zeros(3, 70))


def test_adapters_that_do_not_fit_are_refused(make_kernels):
    kernels, good = make_kernels(), _part(64, 32, 8)
    for part in (
        LoraPart(good.a[:, 1:], good.b), LoraPart(good.a, good.b[:, 1:]), LoraPart(good.a, good.b[1:]),
        LoraPart(good.a, good.b, torch.zeros(31)), LoraPart(good.a.int(), good.b),
        LoraPart(good.a[0], good.b),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=r"pack_lora: part 1: wants a \[r, 64\]"):
            kernels.pack_lora(64, [5, 32], [None, part])
    with pytest.raises(ShapeError, match="2 parts of an adapter"):
        kernels.pack_lora(64, [32], [good, good])
    for rank in (0, MOST_RANK + 1):
        with pytest.raises(KernelError, match=f"rank of 1 to {MOST_RANK} is possible; got {rank}"):
            kernels.pack_lora(64, [32], [_part(64, 32, rank)])
    with pytest.raises(KernelError, match="float8"):
        kernels.pack_lora(64, [32], [good], "float8")
    huge = LoraPart(good.a * 1e6, good.b)
    with pytest.raises(KernelError, match="a holds a number beyond 65504"):
        kernels.pack_lora(64, [32], [huge], "float16")
    kernels.pack_lora(64, [32], [huge], "bfloat16")


def test_banks_take_what_is_theirs(make_kernels, backend):
    kernels, packed = make_kernels(), make_kernels().pack_lora(64, [32], [_part(64, 32, 8)])
    bank = kernels.lora_bank(64, [32], 2)
    for slot in (-1, 2):
        with pytest.raises(KernelError, match=f"slot {slot} is outside of the 2"):
            bank.put(slot, packed)
    for other in (kernels.lora_bank(64, [16, 16], 1), kernels.lora_bank(64, [32], 1, is_table=True)):
        with pytest.raises(KernelError, match="of 64 inputs"):
            other.put(0, packed)
    other = choose("cpu", "float32", backend="reference" if backend != "reference" else "cpu", head_dim=64)
    with pytest.raises(KernelError, match="another backend"):
        bank.put(0, other.pack_lora(64, [32], [_part(64, 32, 8)]))
    with pytest.raises(KernelError, match="1 slot or more"):
        kernels.lora_bank(64, [32], 0)
    for sizes in ([], [0], [3, -1]):
        with pytest.raises(ShapeError, match="lora_bank"):
            kernels.lora_bank(64, sizes, 1)


def test_calls_that_do_not_fit_are_refused(make_kernels):
    kernels, x, out = make_kernels(), _draw(4, 64), torch.zeros(4, 32)
    bank, segments = kernels.lora_bank(64, [32], 2), _segments([0] * 4, 2)
    for arguments in (
        (x[:, :63], bank, segments, out), (x.double(), bank, segments, out), (x.T, bank, segments, out),
        (x, bank, segments, out[:3]), (x, bank, segments, out.double()), (x, bank, segments, out[:, :31]),
        (x, bank, _segments([0] * 3, 2), out), (x, bank, _segments([0] * 4, 3), out),
        (Quantized.empty(4, 63, 8), bank, segments, out), (Quantized.empty(3, 64, 8), bank, segments, out),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match="lora_add"):
            kernels.lora_add(*arguments)
    with pytest.raises(KernelError, match="lora_gather_add: the bank is one of a layer"):
        kernels.lora_gather_add(torch.zeros(4, dtype=torch.int64), bank, segments, out)
    table = kernels.lora_bank(64, [32], 2, is_table=True)
    with pytest.raises(KernelError, match="lora_add: the bank is one of an embedding"):
        kernels.lora_add(x, table, segments, out)
    for ids in (torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ShapeError, match="lora_gather_add"):
            kernels.lora_gather_add(ids, table, segments, out)


def test_segments_are_filled_in_place():
    segments = LoraSegments.empty(6, 3)
    rows, starts = segments.rows.data_ptr(), segments.starts.data_ptr()
    segments.fill([2, 0, -1, 2, 0])
    assert segments.starts.tolist() == [0, 2, 2, 4]
    assert segments.rows[:4].tolist() == [1, 4, 0, 3]
    segments.fill([])
    assert segments.starts.tolist() == [0, 0, 0, 0]
    assert (rows, starts) == (segments.rows.data_ptr(), segments.starts.data_ptr())
    with pytest.raises(ShapeError, match="7 rows in room for 6"):
        segments.fill([0] * 7)
    with pytest.raises(KernelError, match="slot 3 is outside of the 3"):
        segments.fill([3])
    with pytest.raises(ShapeError, match="starts is"):
        LoraSegments(segments.rows, segments.starts.long())
