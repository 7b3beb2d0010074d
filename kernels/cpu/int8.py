"""Linear layers on integers, and activations made integers: calls into linear_int8.c and quantize.c."""

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.cpu.calls import Calls, Field, Operation
from batchgen.kernels.cpu.memory import Arena
from batchgen.kernels.quantized import GROUP, Quantized

PRODUCT = "pnnpppnsnn"  # fields of LinearInt8
_LINEAR = Operation("linear_int8", PRODUCT, door="linear")
_QUANTIZE = Operation("quantize", "pnpnnnpsn")
_NORM_QUANTIZE = Operation("norm_quantize", "pnpppnnnpsnd", door="rms_norm")
_ROUNDING_LOSS = Operation("rounding_loss", "ppnpppnn")
_SILU_MUL_QUANTIZE = Operation("silu_mul_quantize", "pnpnnnpsn", door="silu_mul")


class CpuInt8Linear(PackedLinear):
    """A weight of integers in panels of columns, with scales and bias behind them (linear_int8.h)."""

    def __init__(self, calls: Calls, arena: Arena, weight: Tensor, scale: Tensor, bias: Tensor | None):
        library = calls.library
        self.out_features, self.in_features = weight.shape
        self.depth = -(-self.in_features // GROUP) * GROUP
        self.panels = arena.take(library.int8_bytes(self.out_features, self.depth) // 4)
        weight, scale = weight.detach().contiguous(), scale.detach().contiguous()
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        library.int8_pack(
            weight.data_ptr(),
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self.panels.data_ptr(),
            self.out_features,
            self.in_features,
            self.depth,
            torch.get_num_threads(),
        )

    @override
    def tensors(self) -> list[Tensor]:
        return [self.panels]


def linear(calls: Calls, x: Quantized, packed: PackedLinear, out: Tensor) -> Tensor:
    """See `Kernels.linear`."""
    if not isinstance(packed, CpuInt8Linear):
        raise KernelError("linear: quantized activations need a weight from pack_int8 of the same kernels")
    rows, planes, _ = x.values.shape
    calls(
        _LINEAR, x.values, x.values.stride(0), planes, x.scale, packed.panels, out, out.stride(0), rows,
        packed.out_features, packed.depth,
    )  # fmt: skip
    return out


def _target(out: Quantized) -> tuple[Tensor, int, int, int, Tensor, int]:
    rows, planes, depth = out.values.shape
    return out.values, out.values.stride(0), planes, depth, out.scale, rows


def quantize(calls: Calls, x: Tensor, out: Quantized) -> Quantized:
    """See `Kernels.quantize`."""
    operation, fields = quantizing(x, out)
    calls(operation, *fields)
    return out


def quantizing(x: Tensor, out: Quantized) -> tuple[Operation, tuple[Field, ...]]:
    """`quantize` as one of several operations."""
    return _QUANTIZE, (x, x.stride(0), *_target(out), out.width)


def product(x: Quantized, packed: CpuInt8Linear) -> tuple[Field, ...]:
    """The fields of a product that is written nowhere."""
    (rows, planes, _), columns = x.values.shape, packed.out_features
    return (
        x.values, x.values.stride(0), planes, x.scale, packed.panels, None, columns, rows, columns,
        packed.depth,
    )  # fmt: skip


def norm_quantize(
    calls: Calls, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Quantized
) -> Quantized:
    """See `Kernels.rms_norm`, and `Kernels.add_rms_norm` if there is a residual."""
    calls(_NORM_QUANTIZE, x, x.stride(0), residual, weight, *_target(out), out.width, eps)
    return out


def silu_mul_quantize(calls: Calls, gate_up: Tensor, out: Quantized) -> Quantized:
    """See `Kernels.silu_mul`."""
    calls(_SILU_MUL_QUANTIZE, gate_up, gate_up.stride(0), *_target(out), out.width)
    return out


def rounding_loss(calls: Calls, weight: Tensor, rounded: Quantized, mean: Tensor) -> Tensor:
    """See `Kernels.rounding_loss`."""
    rows, width = weight.shape
    loss = torch.empty(rows)
    values = rounded.values
    calls(_ROUNDING_LOSS, weight, values, values.stride(0), rounded.scale, mean, loss, rows, width)
    return loss
