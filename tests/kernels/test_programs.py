"""Programs: recorded operations give the bits of operations run at once, for any sizes and threads."""

import pytest
import torch

from batchgen.errors import KernelError
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec
from batchgen.kernels.ops import Kernels, choose
from batchgen.kernels.program import Program, StepSizes
from batchgen.kernels.quantized import Quantized

MOST = StepSizes(tokens=70, rows=41, sequences=22, table_width=5)
WIDTH, HEADS, HEAD_DIM = 96, 6, 16


@pytest.fixture
def kernels(make_kernels, backend) -> Kernels:
    if backend == "reference":
        pytest.skip("the reference records nothing")
    return make_kernels(HEAD_DIM)


@pytest.fixture(params=[1, 2, 3, 4, 9])
def threads(request):
    """Also more threads than processors: some then come late, or are put aside in the middle of a chunk."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Chain:
    """Operations of every kind, each of which reads what the one before has written."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels
        self.table, self.cos_sin = _draw(50, WIDTH), _draw(60, HEAD_DIM, seed=1)
        self.weight = _draw(WIDTH, seed=2) + 1
        self.gate_up = kernels.pack_linear(_draw(2 * WIDTH, WIDTH, seed=3), _draw(2 * WIDTH, seed=4))
        self.down = kernels.pack_linear(_draw(WIDTH, WIDTH, seed=5))
        self.residual = torch.empty(MOST.tokens, WIDTH)
        self.ids = torch.empty(MOST.tokens, dtype=torch.int64)
        self.positions = torch.empty(MOST.tokens, dtype=torch.int64)
        self.rows = torch.empty(MOST.rows, dtype=torch.int64)

    def run(self, tokens: int, rows: int) -> torch.Tensor:
        kernels, residual, rows_ids = self.kernels, self.residual[:tokens], self.rows[:rows]
        kernels.gather_rows(self.table, self.ids[:tokens], residual)
        x = kernels.rms_norm(residual, self.weight, 1e-5)
        for _ in range(8):
            query = x.view(tokens, HEADS, HEAD_DIM)
            kernels.rotary(query, query, self.positions[:tokens], self.cos_sin)
            hidden = kernels.linear(kernels.silu_mul(kernels.linear(x, self.gate_up)), self.down)
            x, _ = kernels.add_rms_norm(hidden, residual, self.weight, 1e-5)
        return kernels.linear(kernels.gather_rows(x, rows_ids), self.down)

    def fill(self, tokens: int, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids[:tokens] = torch.randint(50, (tokens,), generator=generator)
        self.positions[:tokens] = torch.randint(60, (tokens,), generator=generator)
        self.rows[:rows] = torch.randint(max(tokens, 1), (rows,), generator=generator)

    def record(self) -> tuple[Program, torch.Tensor]:
        found: list[torch.Tensor] = []
        program = self.kernels.record(lambda: found.append(self.run(MOST.tokens, MOST.rows)), MOST)
        assert program is not None
        return program, found[0]


def test_a_program_gives_the_bits_of_its_operations(kernels: Kernels, threads: int) -> None:
    chain = Chain(kernels)
    program, result = chain.record()
    for seed, (tokens, rows) in enumerate([(1, 1), (70, 41), (5, 3), (64, 7), (0, 0), (33, 33)] * 3):
        chain.fill(tokens, rows, seed)
        result.fill_(float("nan"))
        program.run(StepSizes(tokens, rows, 1, 1))
        assert torch.equal(result[:rows], chain.run(tokens, rows)), f"{tokens} tokens, {rows} rows"
        assert result[rows:].isnan().all(), "rows past the step's are not written"


def test_attention_and_cache_of_a_step(kernels: Kernels, threads: int) -> None:
    spec = KVCacheSpec(2, HEAD_DIM, 16, "float32")
    kv, steps = kernels.allocate_kv(spec, 120, "cpu"), kernels.allocate_kv(spec, 120, "cpu")
    query, key, value = (
        _draw(70, HEADS, HEAD_DIM),
        _draw(70, 2, HEAD_DIM, seed=1),
        _draw(70, 2, HEAD_DIM, seed=2),
    )
    tables, slots = torch.empty((22, 5), dtype=torch.int32), torch.empty(70, dtype=torch.int32)
    starts, lens = torch.empty(23, dtype=torch.int32), torch.empty(22, dtype=torch.int32)
    out = torch.empty(70, HEADS, HEAD_DIM)
    whole = AttentionMeta(starts, lens, tables, slots, MOST.tokens, 80)

    def build() -> None:
        for window in (None, 20, None):
            kernels.store_kv(key, value, kv, slots)
            kernels.attention(query, kv, whole, 0.25, window, out=out)

    program = kernels.record(build, MOST)
    assert program is not None
    for sequences, width, queries in ((22, 5, 1), (3, 3, 20), (1, 1, 9), (22, 3, 3)):
        tokens = sequences * queries
        own = torch.randperm(120, generator=torch.Generator().manual_seed(width))[: sequences * width]
        own = own.to(torch.int32).view(sequences, width)
        # A beginning that all share; the newest tokens lie behind it.
        own[:, 0] = own[0, 0]
        at = torch.arange(16 * width - queries, 16 * width)
        meta = AttentionMeta(
            torch.arange(sequences + 1, dtype=torch.int32) * queries,
            torch.full((sequences,), 16 * width, dtype=torch.int32),
            own,
            (own[:, at // 16] * 16 + at % 16).to(torch.int32).reshape(-1),
            queries,
            16 * width,
        )
        for target, given in (
            (starts, meta.query_start_loc),
            (lens, meta.seq_lens),
            (slots, meta.slot_mapping),
        ):
            target[: len(given)] = given
        tables.view(-1)[: sequences * width] = own.view(-1)
        program.run(StepSizes(tokens, 1, sequences, width))
        for _ in range(2):
            kernels.store_kv(key[:tokens], value[:tokens], steps, meta.slot_mapping)
        expected = kernels.attention(query[:tokens], steps, meta, 0.25)
        assert torch.equal(kv.data, steps.data)
        assert torch.equal(out[:tokens], expected)


def test_an_error_stops_the_program_where_it_happens(kernels: Kernels, threads: int) -> None:
    chain = Chain(kernels)
    program, result = chain.record()
    sizes = StepSizes(70, 41, 1, 1)
    for where, wrong, words in (
        (chain.ids, 50, "gather_rows: an id is outside of the 50 rows"),
        (chain.positions, 60, "rotary: a position is outside of the 60 in the table"),
        (chain.rows, -1, "gather_rows: an id is outside of the 70 rows"),
    ):
        chain.fill(70, 41, seed=1)
        where[40] = wrong
        result.fill_(float("nan"))
        with pytest.raises(KernelError, match=words):
            program.run(sizes)
        assert result.isnan().all(), "what comes after the error does not run"
    chain.fill(70, 41, seed=1)
    program.run(sizes)
    assert torch.equal(result, chain.run(70, 41))


@pytest.mark.parametrize("threads", [1, 2, 5, 16], indirect=True)
def test_threads_share_out_the_weights_of_products(kernels: Kernels, threads: int) -> None:
    """One chunk, fewer chunks than threads, more; more threads than there are shares."""
    wide = [
        kernels.pack_int8(torch.randint(-127, 128, (columns, WIDTH), dtype=torch.int8), _draw(columns).abs())
        for columns in (16, 1000, 9000, 130)
    ]
    x, weight = _draw(MOST.tokens, WIDTH), _draw(WIDTH)
    quantized = Quantized.empty(MOST.tokens, WIDTH, 8)
    outs = [torch.empty(MOST.tokens, packed.out_features) for packed in wide]

    def build() -> None:
        for packed, out in zip(wide, outs, strict=True):
            kernels.rms_norm(x, weight, 1e-5, quantized)
            kernels.linear(quantized, packed, out)

    program = kernels.record(build, MOST)
    assert program is not None
    build()
    expected = [out.clone() for out in outs]
    for tokens in (1, 2, 9, 70):
        for _ in range(5):
            for out in outs:
                out.fill_(float("nan"))
            program.run(StepSizes(tokens, 1, 1, 1))
            for out, right in zip(outs, expected, strict=True):
                assert torch.equal(out[:tokens], right[:tokens])
                assert out[tokens:].isnan().all()


def test_results_of_a_program_stay_while_it_does(kernels: Kernels) -> None:
    def record() -> tuple[Program, torch.Tensor]:
        chain = Chain(kernels)
        chain.fill(70, 41, seed=3)
        return chain.record()

    program, result = record()
    # Memory that was given back would be taken now.
    others = [torch.full((70, WIDTH), float("nan")) for _ in range(200)]
    program.run(StepSizes(70, 41, 1, 1))
    assert not result.isnan().any()
    assert all(other.isnan().all() for other in others)


def test_time_is_kept_by_kind(kernels: Kernels) -> None:
    chain = Chain(kernels)
    program, _ = chain.record()
    chain.fill(70, 41, seed=1)
    program.run(StepSizes(70, 41, 1, 1))
    assert program.profile() == {}
    program.measure()
    program.run(StepSizes(70, 41, 1, 1))
    spent = program.profile()
    assert {"linear", "rms_norm", "add_rms_norm", "rotary", "silu_mul", "gather_rows"} == set(spent)
    assert all(seconds > 0 for seconds in spent.values())


def test_rows_that_no_step_has_cannot_be_recorded(kernels: Kernels) -> None:
    weight = _draw(WIDTH)
    with pytest.raises(KernelError, match="rms_norm: 7 rows are none of a step's"):
        kernels.record(lambda: kernels.rms_norm(_draw(7, WIDTH), weight, 1e-5), MOST)
    with pytest.raises(KernelError, match="must differ"):
        kernels.record(lambda: None, StepSizes(4, 4, 5, 6))
    # Neither leaves the thread recording.
    assert kernels.rms_norm(_draw(7, WIDTH), weight, 1e-5).shape == (7, WIDTH)


def test_recordings_do_not_nest(kernels: Kernels) -> None:
    with pytest.raises(KernelError, match="being recorded already"):
        kernels.record(lambda: kernels.record(lambda: None, MOST), MOST)
    assert kernels.record(lambda: None, MOST) is not None


def test_other_backends_record_nothing() -> None:
    kernels = choose("cpu", "float32", backend="reference", head_dim=HEAD_DIM)
    assert kernels.record(lambda: pytest.fail("nothing is called"), MOST) is None
