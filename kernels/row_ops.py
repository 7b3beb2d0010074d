"""RowOps: the operations of `Kernels` that work on rows of activations, given as floats or as integers."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from batchgen.kernels import checks, weight_checks
from batchgen.kernels.backend import KernelBackend, PackedLinear
from batchgen.kernels.coded import Coded
from batchgen.kernels.lora_ops import LoraOps
from batchgen.kernels.quantized import Quantized
from batchgen.kernels.sampling import check_columns

# What a linear layer takes.
Activation = Tensor | Quantized


class RowOps(LoraOps):
    """Linear layers, adapters beside them, norms and gate. `Kernels` documents what holds for all operations.

    Args:
        home: dtype and device of activations.
        backends: operation -> the backend that serves it.
    """

    def __init__(self, home: checks.Home, backends: dict[str, KernelBackend]):
        super().__init__(home, backends["lora"])
        self._backends = backends
        self._linear, self._pack_linear = backends["linear"].linear, backends["linear"].pack_linear
        integers = backends["linear_int8"]
        self._linear_int8, self._pack_int8 = integers.linear_int8, integers.pack_int8
        few = backends["linear_coded"]
        self._linear_coded, self._pack_coded = few.linear_coded, few.pack_coded
        self._rms_norm, self._add_rms_norm = (
            backends["rms_norm"].rms_norm,
            backends["add_rms_norm"].add_rms_norm,
        )
        self._silu_mul, self._quantizer = backends["silu_mul"].silu_mul, backends["quantize"]

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, is_head: bool = False
    ) -> PackedLinear:
        """Lay a linear layer's weight out as its backend wants it.

        For a head, whose largest results will be asked for, a backend may keep more than the weight.

        Shapes: weight [N, K]; bias [N] or None; of any floating dtype.
        In place: the weight may be kept without a copy, so the caller must neither change nor keep it.
        """
        weight_checks.check_weight(self.home, weight, bias)
        return self._pack_linear(weight, bias, is_head)

    def pack_int8(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Lay a weight of integers out for `linear` of quantized activations.

        Shapes: weight int8 [N, K], K at most MAX_WIDTH of kernels/quantized.py; scale float32 [N]: the weight
            means weight[n, k] * scale[n]; bias [N] or None, of any floating dtype.
        In place: the weight may be kept without a copy, so the caller must neither change nor keep it.
        """
        weight_checks.check_int8_weight(self.home, weight, scale, bias)
        return self._pack_int8(weight, scale, bias)

    def pack_coded(self, coded: Coded, bias: Tensor | None = None) -> PackedLinear:
        """Lay a weight of a few bits out for `linear` of floats; it stays in these bits.

        Shapes: as Coded says; bias [N] or None, of any floating dtype.
        Raises: ShapeError if the parts disagree; KernelError if a code or an input's group is out of range.
        """
        weight_checks.check_coded_weight(self.home, coded, bias)
        return self._pack_coded(coded, bias)

    def linear(self, x: Activation, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """Multiply by a packed weight: x [T, K] -> x · weightᵀ + bias, [T, N].

        Rows of x are dense; the stride between them is free. T may be 0.

        A weight from `pack_int8` takes quantized activations, others floats. One from `pack_coded` gives what
        `pack_linear` of its decoded weight does, and may write to some columns of a wider `out`. Integers are
        summed without rounding; then, in float32 and in this order, come the token's scale, the column's and
        the bias. In 16 bits 256 times the sum of high bytes and the sum of low bytes are added as float32.
        """
        if isinstance(x, Quantized):
            checks.check_linear_int8(self.home, x, packed, out)
            if out is None:
                shape = (x.values.shape[0], packed.out_features)
                out = torch.empty(shape, dtype=self.home.dtype, device=x.values.device)
            return self._linear_int8(x, packed, out)
        if packed.is_coded:
            checks.check_linear_coded(self.home, x, packed, out)
            if out is None:
                out = torch.empty((x.shape[0], packed.out_features), dtype=self.home.dtype, device=x.device)
            return self._linear_coded(x, packed, out)
        checks.check_linear(self.home, x, packed, out)
        return self._linear(x, packed, out)

    def linear_argmax(self, x: Activation, packed: PackedLinear, width: int) -> Tensor | None:
        """Where the largest of the first `width` results of each row stands: x [T, K] -> [T] int64.

        The lowest place of several that are equal; -1 for a row that holds a NaN or whose largest result is
        infinite. It is what a greedy draw takes from the results of `linear`, which are not written anywhere.

        Returns: None where the backend has no way that is better than `linear`.
        """
        return self._product_backend(x, packed).linear_argmax(x, packed, width)

    def linear_draw(
        self, x: Activation, packed: PackedLinear, width: int, temperature: Tensor, uniform: Tensor
    ) -> Tensor | None:
        """The token that `sample` draws from the first `width` results of each row: x [T, K] -> [T] int64.

        The results are not written anywhere. Rows are drawn by temperature alone, see `Draws`.

        Shapes: temperature and uniform [T] float64, contiguous, on the CPU.

        Returns: None where the backend has no way that is better than `linear`.
        """
        rows = x.values.shape[0] if isinstance(x, Quantized) else x.shape[0]
        check_columns("linear_draw", torch.float64, (rows,), temperature=temperature, uniform=uniform)
        return self._product_backend(x, packed).linear_draw(x, packed, width, temperature, uniform)

    def _product_backend(self, x: Activation, packed: PackedLinear) -> KernelBackend:
        """The backend of a product that is written nowhere, checked."""
        if isinstance(x, Quantized):
            checks.check_linear_int8(self.home, x, packed, None)
            return self._backends["linear_int8"]
        if packed.is_coded:
            checks.check_linear_coded(self.home, x, packed, None)
            return self._backends["linear_coded"]
        checks.check_linear(self.home, x, packed, None)
        return self._backends["linear"]

    def quantize(self, x: Tensor, out: Quantized) -> Quantized:
        """Round activations to integers, each token by its largest |x|, ties to even.

        Shapes: x [T, K] with dense rows, the stride between them is free; out as Quantized says.

        Returns: out. A token below 2^-100 counts as zeros.
        """
        checks.check_quantize(self.home, x, out)
        return self._quantizer.quantize(x, out)

    def rounding_loss(self, weight: Tensor, rounded: Quantized, mean: Tensor) -> Tensor:
        """What rounding a weight takes from its product with the mean of its inputs.

        Shapes: weight float32 [N, K], contiguous; rounded: its rows as `quantize` gives them in 8 bits; mean
            float32 [K], contiguous.

        Returns: (weight - rounded) · mean, [N] float32; each row's sum has one order.
        """
        weight_checks.check_rounding_loss(self.home, weight, rounded, mean)
        return self._quantizer.rounding_loss(weight, rounded, mean)

    def kronecker(
        self, x: Tensor, scale: Tensor, factors: Sequence[Tensor], dim: int, out: Tensor | None = None
    ) -> Tensor:
        """Multiply vectors by a Kronecker product of small matrices: (x * scale) · (F1 ⊗ F2 ⊗ …).

        Shapes: x float32, contiguous: [T, E] for dim 1, or [E, T], a vector in each column, for dim 0; scale
            float32 [E], contiguous; factors float32 [n, n], whose sizes multiply to E.

        Returns: like x.
        """
        weight_checks.check_kronecker(self.home, x, scale, factors, dim, out)
        return self._quantizer.kronecker(x, scale, factors, dim, out)

    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Quantized) -> Quantized: ...
    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Activation | None = None) -> Activation:
        """Divide each row by its root mean square and multiply by the weight.

        Shapes: x [T, E], or [T, H, E] to norm each head by itself, dense but for the stride between tokens;
            weight [E].

        Returns: like x, contiguous: x / sqrt(mean(x², last) + eps) * weight; quantized if `out` is, then x is
            [T, E].
        Source: Zhang and Sennrich 2019, arXiv:1910.07467.
        """
        if isinstance(out, Quantized):
            checks.check_rows("rms_norm", self.home, x, weight, None)
            checks.check_quantized_like("rms_norm", self.home, x, out)
            return self._quantizer.rms_norm_quantize(x, weight, eps, out)
        checks.check_rows("rms_norm", self.home, x, weight, out)
        return self._rms_norm(x, weight, eps, out)

    @overload
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Quantized
    ) -> tuple[Quantized, Tensor]: ...
    @overload
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Activation | None = None
    ) -> tuple[Activation, Tensor]:
        """Add x to the residual stream and norm the sum.

        Shapes: x, residual [T, E]; weight [E].
        In place: residual becomes x + residual, and is the second result.

        Returns: (rms_norm(x + residual) [T, E], quantized if `out` is; residual).
        """
        checks.check_residual(self.home, x, residual)
        if isinstance(out, Quantized):
            checks.check_rows("add_rms_norm", self.home, x, weight, None)
            checks.check_quantized_like("add_rms_norm", self.home, x, out)
            return self._quantizer.add_rms_norm_quantize(x, residual, weight, eps, out)
        checks.check_rows("add_rms_norm", self.home, x, weight, out)
        return self._add_rms_norm(x, residual, weight, eps, out)

    @overload
    def silu_mul(self, gate_up: Tensor, out: Quantized) -> Quantized: ...
    @overload
    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor, out: Activation | None = None) -> Activation:
        """Gate: gate_up [T, 2I] = (gate, up) -> silu(gate) * up, [T, I], quantized if `out` is.

        The stride between rows is free.
        """
        if isinstance(out, Quantized):
            checks.check_silu_mul(self.home, gate_up, None)
            checks.check_quantized_out("silu_mul", self.home, gate_up.shape[0], gate_up.shape[1] // 2, out)
            return self._quantizer.silu_mul_quantize(gate_up, out)
        checks.check_silu_mul(self.home, gate_up, out)
        return self._silu_mul(gate_up, out)
