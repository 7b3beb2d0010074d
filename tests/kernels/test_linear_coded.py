"""The linear layer on weights of a few bits: the same bits as the float layer on the decoded weight."""

import pytest
import torch

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.cases import TOLERANCE, relative_rms
from batchgen.kernels.coded import Coded, float8_values

ALL_BITS = range(1, 9)


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _coded(
    outputs: int,
    inputs: int,
    bits: int = 4,
    *,
    group_size: int = 32,
    beside: str = "none",
    has_table: bool = False,
    is_shuffled: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> Coded:
    made = torch.Generator().manual_seed(7)
    groups = -(-inputs // group_size)
    levels = 2**bits
    scale = (torch.rand(outputs, groups, generator=made) + 0.5).to(scale_dtype)
    return Coded(
        codes=torch.randint(levels, (outputs, inputs), generator=made, dtype=torch.uint8),
        bits=bits,
        scale=scale,
        group_size=min(group_size, inputs),
        zero=torch.randint(levels, (outputs, groups), generator=made, dtype=torch.uint8)
        if beside == "zero"
        else None,
        least=-(scale * levels / 2).to(scale_dtype) if beside == "least" else None,
        table=torch.randn(levels, generator=made) if has_table else None,
        groups=(torch.arange(inputs, dtype=torch.int32) // group_size)[torch.randperm(inputs, generator=made)]
        if is_shuffled
        else None,
    )


def _assert_same_as_decoded(kernels, coded, rows=(1, 2, 3, 4, 7, 64)):
    bias, x = _draw(coded.shape[0], seed=1), _draw(max(rows), coded.shape[1], seed=2)
    packed, decoded = kernels.pack_coded(coded, bias), kernels.pack_linear(coded.dense(), bias)
    assert (packed.out_features, packed.in_features) == coded.shape
    for count in rows:
        given, expected = kernels.linear(x[:count], packed), kernels.linear(x[:count], decoded)
        if kernels.is_reproducible:
            assert torch.equal(given, expected), f"{count} rows"
        else:
            assert relative_rms(given, expected) < TOLERANCE["float32"], f"{count} rows"


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("beside", ["none", "zero", "least"])
def test_bits_are_those_of_the_decoded_weight(make_kernels, bits, beside):
    _assert_same_as_decoded(make_kernels(), _coded(70, 192, bits, beside=beside))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_codes_that_stand_for_entries_of_a_table(make_kernels, bits):
    _assert_same_as_decoded(make_kernels(), _coded(70, 192, bits, has_table=True))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("beside", ["zero", "least"])
def test_scales_of_every_type(make_kernels, scale_dtype, beside):
    _assert_same_as_decoded(make_kernels(), _coded(40, 128, beside=beside, scale_dtype=scale_dtype))


@pytest.mark.parametrize(
    ("inputs", "outputs", "group_size"),
    [(576, 192, 64), (33, 5, 8), (1, 31, 1), (1537, 33, 128), (100, 64, 30), (64, 1, 64), (576, 3072, 576)],
)
def test_sizes_that_fill_no_panel_and_no_group(make_kernels, num_threads, inputs, outputs, group_size):
    _assert_same_as_decoded(make_kernels(), _coded(outputs, inputs, group_size=group_size, beside="zero"))


@pytest.mark.parametrize("beside", ["none", "zero", "least"])
def test_groups_whose_inputs_lie_apart(make_kernels, beside):
    _assert_same_as_decoded(make_kernels(), _coded(70, 192, beside=beside, is_shuffled=True))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_eight_bits(make_kernels, name):
    table = float8_values(getattr(torch, name)).nan_to_num(480.0, posinf=480.0, neginf=480.0)
    codes = torch.arange(256, dtype=torch.uint8).repeat(40, 1)
    is_number = float8_values(getattr(torch, name)).isfinite()
    codes[:, ~is_number] = 1
    scale = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    _assert_same_as_decoded(
        make_kernels(), Coded(codes=codes, bits=8, scale=scale, group_size=128, table=table)
    )


def test_floats_of_eight_bits_that_are_no_numbers_are_what_the_table_says(make_kernels):
    table = float8_values(torch.float8_e4m3fn).nan_to_num(480.0)
    codes = torch.tensor([0x7F, 0xFF, 1, 0x81], dtype=torch.uint8).repeat(5, 8)
    _assert_same_as_decoded(
        make_kernels(), Coded(codes=codes, bits=8, scale=torch.rand(5, 1), group_size=32, table=table)
    )


def test_product_is_the_one_of_float64(make_kernels):
    kernels, coded, x = make_kernels(), _coded(96, 576, 3, beside="zero"), _draw(9, 576, seed=3)
    expected = x.double() @ coded.dense().double().T
    assert relative_rms(kernels.linear(x, kernels.pack_coded(coded)), expected) < TOLERANCE["float32"]


def test_columns_of_a_wider_result(make_kernels):
    kernels = make_kernels()
    parts = [_coded(outputs, 64, bits) for outputs, bits in ((40, 4), (5, 2), (33, 8))]
    x, out = _draw(6, 64), torch.full((6, 80), float("nan"))
    column = 0
    for part in parts:
        width = part.shape[0]
        kernels.linear(x, kernels.pack_coded(part), out[:, column : column + width])
        column += width
    whole = torch.cat([kernels.linear(x, kernels.pack_coded(part)) for part in parts], dim=1)
    assert torch.equal(out[:, :78], whole)
    assert bool(out[:, 78:].isnan().all())


def test_no_rows(make_kernels):
    kernels = make_kernels()
    assert kernels.linear(torch.empty(0, 64), kernels.pack_coded(_coded(48, 64))).shape == (0, 48)


def test_weight_takes_its_bits_and_no_more(make_invariant_kernels):
    kernels = make_invariant_kernels()
    packed = kernels.pack_coded(_coded(1024, 1024, 3, group_size=128, scale_dtype=torch.float16))
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in packed.tensors())
    assert num_bytes == 1024 * 1024 * 3 // 8 + 2 * 1024 * 8


def test_the_likeliest_is_left_to_the_sampler(make_kernels):
    kernels = make_kernels()
    assert kernels.linear_argmax(_draw(2, 64), kernels.pack_coded(_coded(48, 64)), 48) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": torch.ones(8, 3)}, "pack_coded"),
        ({"bits": 9}, "9 bits"),
        ({"group_size": 0}, "groups of 0"),
        ({"codes": torch.zeros(8, 64, dtype=torch.int32)}, "pack_coded"),
        ({"zero": torch.zeros(8, 2)}, "pack_coded"),
        ({"least": torch.zeros(8, 2, dtype=torch.float16)}, "pack_coded"),
        ({"table": torch.zeros(8)}, "pack_coded"),
        ({"groups": torch.zeros(63, dtype=torch.int32)}, "pack_coded"),
    ],
)
def test_parts_that_disagree(make_kernels, change, says):
    fields = {"codes": torch.zeros(8, 64, dtype=torch.uint8), "bits": 4, "scale": torch.ones(8, 2)}
    with pytest.raises(ShapeError, match=says):
        make_kernels().pack_coded(Coded(**{**fields, "group_size": 32, **change}))


def test_codes_and_groups_out_of_range(make_kernels):
    kernels = make_kernels()
    fields = {"bits": 3, "scale": torch.ones(8, 2), "group_size": 32}
    with pytest.raises(KernelError, match="a code of 8 has more than 3 bits"):
        kernels.pack_coded(Coded(codes=torch.full((8, 64), 8, dtype=torch.uint8), **fields))
    groups = torch.full((64,), 2, dtype=torch.int32)
    with pytest.raises(KernelError, match="outside of the 2"):
        kernels.pack_coded(Coded(codes=torch.zeros(8, 64, dtype=torch.uint8), groups=groups, **fields))


@pytest.mark.parametrize("beside", ["none", "zero", "least"])
@pytest.mark.parametrize(
    ("bits", "has_table", "is_shuffled"), [(4, False, True), (3, True, False), (8, True, False)]
)
def test_rows_of_the_decoded_weight(make_kernels, num_threads, bits, has_table, is_shuffled, beside):
    coded = _coded(70, 333, bits, beside=beside, has_table=has_table, is_shuffled=is_shuffled)
    kernels = make_kernels()
    packed, ids = kernels.pack_coded(coded), torch.tensor([0, 69, 31, 32, 33, 5, 5] * 9)
    assert torch.equal(kernels.gather_rows(packed, ids), coded.dense()[ids])
    for bad in (-1, 70):
        with pytest.raises(KernelError, match="gather_rows: an id is outside of the 70 rows"):
            kernels.gather_rows(packed, torch.tensor([3, bad]))
