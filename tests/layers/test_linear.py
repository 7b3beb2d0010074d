"""Linear layers: the shares of ranks make the whole; other methods and exchanges fit the seams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import ConfigError, WeightsError
from batchgen.kernels.ops import Activation, Kernels, Quantized, choose
from batchgen.layers.embedding import Embedding
from batchgen.layers.linear import ColumnLinear, LMHead, MergedLinear, QKVLinear, RowLinear
from batchgen.layers.parallel import ParallelContext
from batchgen.quantization.base import (
    LinearMethod,
    LinearShape,
    ParameterLayout,
    method_for,
)
from batchgen.quantization.unquantized import Unquantized

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class OneOfTwo(ParallelContext):
    """A rank of two whose exchanges only note what they were given; the test adds the other rank's."""

    sent: list[Tensor] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sent.append(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent.append(x)
        return x


RANKS = (OneOfTwo(0, 2), OneOfTwo(1, 2))


@pytest.fixture
def kernels() -> Kernels:
    return choose("cpu", "float32", backend="reference", head_dim=16)


@pytest.fixture
def method(kernels: Kernels) -> LinearMethod:
    return Unquantized(kernels, torch.float32, CPU)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = numbers(5, 12, seed=9)


def test_column_shares_concatenate_to_the_whole(method: LinearMethod) -> None:
    weight, bias = numbers(8, 12), numbers(8, seed=1)
    outputs = []
    for rank in RANKS:
        layer = ColumnLinear("up", method, rank, 12, (8,), has_bias=True)
        layer.load(0, "weight", weight)
        layer.load(0, "bias", bias)
        outputs.append(layer(X))
    torch.testing.assert_close(torch.cat(outputs, dim=1), X @ weight.T + bias)


def test_row_shares_add_up_to_the_whole(method: LinearMethod) -> None:
    weight, bias = numbers(6, 12), numbers(6, seed=1)
    total = torch.zeros(5, 6)
    for rank in RANKS:
        layer = RowLinear("down", method, rank, 12, (6,), has_bias=True)
        layer.load(0, "weight", weight)
        layer.load(0, "bias", bias)
        assert not layer.missing()
        total += layer(X[:, rank.rank * 6 : rank.rank * 6 + 6])
    torch.testing.assert_close(total, X @ weight.T + bias)


def test_merged_shares_take_their_part_of_each(method: LinearMethod) -> None:
    gate, up = numbers(8, 12), numbers(8, 12, seed=1)
    halves = []
    for rank in RANKS:
        layer = MergedLinear("gate_up", method, rank, 12, (8, 8))
        layer.load(1, "weight", up)
        assert layer.missing() == [(0, "weight")]
        layer.load(0, "weight", gate)
        halves.append(layer(X).split(4, dim=1))
    torch.testing.assert_close(torch.cat([half[0] for half in halves], dim=1), X @ gate.T)
    torch.testing.assert_close(torch.cat([half[1] for half in halves], dim=1), X @ up.T)


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_heads_are_shared_whole_and_doubled_when_there_are_too_few(
    num_kv_heads: int, method: LinearMethod
) -> None:
    query, key, value = (
        numbers(4 * 3, 12),
        numbers(num_kv_heads * 3, 12, seed=1),
        numbers(num_kv_heads * 3, 12, seed=2),
    )
    for rank in RANKS:
        layer = QKVLinear("qkv", method, rank, 12, 4, num_kv_heads, 3)
        for part, weight in enumerate((query, key, value)):
            layer.load(part, "weight", weight)
        assert (layer.num_heads, layer.num_kv_heads) == (2, 1)
        head = rank.rank if num_kv_heads == 2 else 0
        expected = [
            query[rank.rank * 6 : rank.rank * 6 + 6],
            key[head * 3 : head * 3 + 3],
            value[head * 3 : head * 3 + 3],
        ]
        torch.testing.assert_close(layer(X), X @ torch.cat(expected).T)


def test_head_and_embedding_over_two_ranks(method: LinearMethod, kernels: Kernels) -> None:
    table = numbers(10, 12)
    ids = torch.tensor([0, 4, 5, 9, 9])
    logits, rows = [], torch.zeros(5, 12)
    for rank in RANKS:
        head = LMHead("lm_head", method, rank, 12, (10,))
        tied = Embedding("embed", 10, 12, rank, kernels, torch.float32, CPU, head=head)
        tied.load(0, "weight", table)
        logits.append(head(X))
        own = Embedding("embed", 10, 12, rank, kernels, torch.float32, CPU)
        own.load(0, "weight", table)
        assert torch.equal(own(ids), tied(ids))
        rows += tied(ids)
    torch.testing.assert_close(torch.cat(logits, dim=1), X @ table.T)
    assert torch.equal(rows, table[ids])


def test_what_does_not_divide_is_refused(method: LinearMethod) -> None:
    with pytest.raises(ConfigError, match="up, part 0: 7 does not divide among 2 ranks"):
        ColumnLinear("up", method, RANKS[0], 12, (7,))
    with pytest.raises(ConfigError, match="heads"):
        QKVLinear("qkv", method, RANKS[0], 12, 3, 1, 4)


def test_a_context_of_several_ranks_needs_an_exchange(method: LinearMethod) -> None:
    layer = RowLinear("down", method, ParallelContext(0, 2), 12, (6,))
    layer.load(0, "weight", numbers(6, 12))
    with pytest.raises(NotImplementedError, match="no exchange"):
        layer(X[:, :6])


def test_a_tensor_given_twice_or_unknown_is_refused(method: LinearMethod) -> None:
    layer = ColumnLinear("up", method, ParallelContext(), 12, (8,))
    with pytest.raises(WeightsError, match="no parameter 'qweight'"):
        layer.load(0, "qweight", numbers(8, 12))
    layer.load(0, "weight", numbers(8, 12))
    with pytest.raises(WeightsError, match="given twice"):
        layer.load(0, "weight", numbers(8, 12))


class HalvesAndScale(LinearMethod):
    """A made-up scheme: weights stored transposed and halved, with a scale per output; narrow activations."""

    @override
    def layouts(self, shape: LinearShape) -> Mapping[str, ParameterLayout]:
        return {"halves": ParameterLayout(output_dim=1, input_dim=0), "scale": ParameterLayout(0, None)}

    @override
    def input_bits(self, shape: LinearShape) -> int | None:
        return 16

    @override
    def create_weights(self, shape: LinearShape) -> dict[str, Any]:
        return {
            "halves": torch.zeros(shape.in_features, shape.out_features),
            "scale": torch.zeros(shape.out_features),
        }

    @override
    def load(self, weights: Any, shape: LinearShape, part: int, parameter: str, tensor: Tensor) -> None:
        weights[parameter][..., shape.rows(part)] = tensor

    @override
    def process(self, weights: Any, shape: LinearShape) -> None:
        weights["packed"] = self.kernels.pack_linear(
            (weights.pop("halves") * 2 * weights.pop("scale")).T.contiguous()
        )

    @override
    def apply(self, weights: Any, x: Activation, out: Tensor | None = None) -> Tensor:
        return self.kernels.linear(x.dense() if isinstance(x, Quantized) else x, weights["packed"], out)

    @override
    def tensors(self, weights: Any) -> list[Tensor]:
        return list(weights["packed"].tensors())


@pytest.mark.parametrize("parallel", [ParallelContext(), *RANKS])
def test_another_method_stores_in_its_own_way(parallel: ParallelContext, kernels: Kernels) -> None:
    gate, up = numbers(8, 12), numbers(8, 12, seed=1)
    layer = MergedLinear("gate_up", HalvesAndScale(kernels, torch.float32, CPU), parallel, 12, (8, 8))
    scale = torch.rand(8, generator=torch.Generator().manual_seed(3)) + 0.5
    for part, weight in enumerate((gate, up)):
        layer.load(part, "halves", (weight / scale.unsqueeze(1)).T / 2)
        layer.load(part, "scale", scale)
    share = parallel.share(8, "rows")
    expected = torch.cat((X @ gate[share].T, X @ up[share].T), dim=1)
    torch.testing.assert_close(layer(X), expected)
    assert sum(tensor.numel() for tensor in layer.tensors()) >= expected.shape[1] * 12
    assert layer.input_bits == 16
    torch.testing.assert_close(layer(narrowed(X)), expected, atol=1e-3, rtol=1e-3)


def narrowed(x: Tensor) -> Quantized:
    """As 16 bits, by hand."""
    scale = x.abs().amax(dim=1) / 32767
    value = (x / scale[:, None]).round().to(torch.int32)
    narrow = Quantized.empty(*x.shape, bits=16)
    narrow.values.zero_()
    narrow.values[:, 0, : x.shape[1]] = value >> 8
    narrow.values[:, 1, : x.shape[1]] = (value & 255).to(torch.uint8).view(torch.int8)
    narrow.scale.copy_(scale)
    return narrow


def test_float_weights_take_quantized_activations(method: LinearMethod) -> None:
    layer = ColumnLinear("up", method, ParallelContext(), 12, (8,))
    layer.load(0, "weight", numbers(8, 12))
    assert layer.input_bits is None
    torch.testing.assert_close(layer(narrowed(X)), layer(X), atol=1e-3, rtol=1e-3)


def test_methods_are_found_by_the_checkpoints_own_name() -> None:
    assert method_for(None, "m") is Unquantized
