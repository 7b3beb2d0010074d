"""Linear layers that know which share of the weights is theirs: Column, Row, QKV, Merged and LMHead.

Weights come in through `load`, one tensor of the checkpoint at a time, whole; the layer takes its rank's
share. How they are stored and multiplied is the `LinearMethod`'s affair. A layer is ready as soon as its
last tensor is in, so that a model fills layer by layer and the loaded form of only one is in memory.
"""

from typing import Any

from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.kernels.ops import Activation, PackedLinear
from batchgen.layers.parallel import ParallelContext
from batchgen.quantization.base import LinearMethod, LinearShape, ParameterLayout


class LinearLayer:
    """One matrix product, possibly of several fused parts.

    Args:
        name: for messages.
        method: how weights are stored and multiplied.
        parallel: this rank's place.
        in_features: inputs of the whole layer.
        part_sizes: outputs of each part of the whole layer.
        has_bias: whether each part has a bias.
    """

    def __init__(
        self,
        name: str,
        method: LinearMethod,
        parallel: ParallelContext,
        in_features: int,
        part_sizes: tuple[int, ...],
        has_bias: bool = False,
    ):
        self.name, self.method, self.parallel = name, method.of(name), parallel
        method = self.method
        self.in_features, self.part_sizes = in_features, part_sizes
        inputs = self.input_share()
        outputs = tuple(self.output_share(part) for part in range(len(part_sizes)))
        self.shape = LinearShape(
            name,
            inputs.stop - inputs.start,
            tuple(share.stop - share.start for share in outputs),
            has_bias and self._adds_bias(),
        )
        # The form in which the layer wants its input: None for floats, else the bits of a `Quantized`.
        self.input_bits = method.input_bits(self.shape)
        self.layouts = method.layouts(self.shape)
        self.weights: Any = method.create_weights(self.shape)
        needed = self.layouts.keys() - method.optional(self.shape)
        self._waiting = {(part, parameter) for part in range(len(part_sizes)) for parameter in needed}
        self._loaded: set[tuple[int, str]] = set()

    def input_share(self) -> slice:
        """Which inputs are this rank's."""
        return slice(0, self.in_features)

    def output_share(self, part: int) -> slice:
        """Which outputs of a part are this rank's."""
        return slice(0, self.part_sizes[part])

    def load(self, part: int, parameter: str, tensor: Tensor) -> None:
        """Take one tensor of the checkpoint, of the whole layer's size.

        Raises:
            WeightsError: unknown, given twice, or of the wrong shape.
        """
        if not self._adds_bias() and parameter == "bias":
            return
        if parameter not in self.layouts:
            raise WeightsError(f"{self.name}: has no parameter {parameter!r}")
        if (part, parameter) in self._loaded:
            raise WeightsError(f"{self.name}, part {part}: {parameter} is given twice")
        share = self._slice(tensor, part, self.layouts[parameter])
        self.method.load(self.weights, self.shape, part, parameter, share)
        self._loaded.add((part, parameter))
        self._waiting.discard((part, parameter))
        if all(waits_for != part for waits_for, _ in self._waiting):
            self.method.process_part(self.weights, self.shape, part)
        if not self._waiting:
            self.method.process(self.weights, self.shape)

    def expect(self, part: int, parameter: str) -> None:
        """Be told that a tensor will come; if the layer has it, it is waited for."""
        if parameter in self.layouts:
            self._waiting.add((part, parameter))

    def missing(self) -> list[tuple[int, str]]:
        """(part, parameter) of the tensors that have not come."""
        return sorted(self._waiting)

    def tensors(self) -> list[Tensor]:
        """The weights in memory."""
        return self.method.tensors(self.weights)

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        """Multiply: x [T, K] -> [T, N], this rank's inputs to this rank's outputs (Row: the whole sum)."""
        return self.method.apply(self.weights, x, out)

    def argmax(self, x: Activation, width: int) -> Tensor | None:
        """Where the largest of the first `width` outputs of each row stands; None where that is not built."""
        if self.parallel.size > 1:
            return None
        return self.method.argmax(self.weights, x, width)

    @property
    def screen(self) -> PackedLinear | None:
        """What `argmax` multiplies first and reads whole; None: the weights themselves."""
        return self.method.screen(self.weights)

    def draw(self, x: Activation, width: int, temperature: Tensor, uniform: Tensor) -> Tensor | None:
        """A token drawn from the first `width` outputs of each row; None where that is not built."""
        if self.parallel.size > 1:
            return None
        return self.method.draw(self.weights, x, width, temperature, uniform)

    def _adds_bias(self) -> bool:
        return True

    def _slice(self, tensor: Tensor, part: int, layout: ParameterLayout) -> Tensor:
        shares = (
            (layout.output_dim, self.output_share(part), self.part_sizes[part]),
            (layout.input_dim, self.input_share(), self.in_features),
        )
        for dim, share, total in shares:
            if dim is None or share.stop - share.start == total or tensor.dim() <= dim:
                continue
            length = tensor.shape[dim]
            if length == 1:  # a scale that all share
                continue
            if length * share.start % total or length * share.stop % total:
                raise WeightsError(
                    f"{self.name}: {length} entries do not divide among {self.parallel.size} ranks"
                )
            begin, end = length * share.start // total, length * share.stop // total
            tensor = tensor.narrow(dim, begin, end - begin)
        return tensor


class ColumnLinear(LinearLayer):
    """Each rank has a share of the outputs of every part and all inputs."""

    def output_share(self, part: int) -> slice:
        """An even share of each part."""
        return self.parallel.share(self.part_sizes[part], f"{self.name}, part {part}")


class MergedLinear(ColumnLinear):
    """Several column layers over one input, fused: gate and up."""


class QKVLinear(ColumnLinear):
    """Query, key and value projections, fused; shared among ranks by whole heads.

    With more ranks than key/value heads, several ranks hold the same head.
    """

    def __init__(
        self,
        name: str,
        method: LinearMethod,
        parallel: ParallelContext,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        has_bias: bool = False,
    ):
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        kv_size = num_kv_heads * head_dim
        parts = (num_heads * head_dim, kv_size, kv_size)
        super().__init__(name, method, parallel, hidden_size, parts, has_bias)
        self.num_heads = self.shape.part_sizes[0] // head_dim
        self.num_kv_heads = self.shape.part_sizes[1] // head_dim

    def output_share(self, part: int) -> slice:
        """Whole heads: an even share, or the one head that this rank's queries read."""
        heads = self._num_heads if part == 0 else self._num_kv_heads
        if part > 0 and self.parallel.size > heads:
            head = self.parallel.rank * heads // self.parallel.size
            share = slice(head, head + 1)
        else:
            share = self.parallel.share(heads, f"{self.name}, heads of part {part}")
        return slice(share.start * self._head_dim, share.stop * self._head_dim)


class RowLinear(LinearLayer):
    """Each rank has a share of the inputs and all outputs; the results are summed over ranks."""

    def input_share(self) -> slice:
        """An even share."""
        return self.parallel.share(self.in_features, self.name)

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        """Multiply: x [T, this rank's inputs] -> [T, N], summed over ranks."""
        return self.parallel.all_reduce(self.method.apply(self.weights, x, out))

    def _adds_bias(self) -> bool:
        # The sum over ranks must count it once.
        return self.parallel.rank == 0


class LMHead(ColumnLinear):
    """The output head: hidden states to logits over the vocabulary; may also serve as the embedding."""

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        """Logits: x [R, E] -> [R, V], the whole vocabulary."""
        return self.parallel.all_gather(self.method.apply(self.weights, x, out))

    def rows(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of this rank's share of the weight as floats: ids [T] -> [T, E]."""
        return self.method.rows(self.weights, ids, out)
