"""Kernel backends: what one is, which there are, and which serves an operation, with the reason."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels.coded import Coded
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.lora import LoraBackend
from batchgen.kernels.program import Program, StepSizes
from batchgen.kernels.quantized import Quantized
from batchgen.kernels.sampling import Draws, Penalties, Scores
from batchgen.registry import Registry

log = logging.getLogger("batchgen.kernels")

# The order is the order of the printed choices. `store_kv` follows `attention`: both must know one layout.
OPERATIONS = (
    "linear", "linear_int8", "linear_coded", "gather_rows", "rms_norm", "add_rms_norm", "rotary", "silu_mul",
    "quantize", "lora", "attention", "store_kv", "sample", "score_tokens", "penalise",
)  # fmt: skip

# Which backends "auto" tries on a device, best first.
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("gpu", "reference")}


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend of one operation, and why it is that one."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShape:
    """What is known at start of the shapes that an operation will see.

    Args:
        head_dim: D, size of one attention head.
        block_size: B, tokens in a KV block.
        reproducible: a row's result must not depend on the rows computed with it, nor on chunking.
        kv_dtype: of the KV cache; None if nothing is known of one.
    """

    head_dim: int
    block_size: int = 16
    reproducible: bool = False
    kv_dtype: str | None = None


class PackedLinear(ABC):
    """A weight [N, K] and bias [N] in the layout of the backend that made it; opaque outside of it."""

    in_features: int
    out_features: int
    # Whether it holds codes of a few bits, from `pack_coded`.
    is_coded: ClassVar[bool] = False
    # Integers that are multiplied first, in 16 bits, where only the largest result of a row is asked for.
    screen: "PackedLinear | None" = None

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that is kept, so that it can be moved out of the way and back."""


class KernelBackend(LoraBackend, ABC):
    """One set of kernels for one kind of device. `batchgen.kernels.ops.Kernels` documents every operation.

    An operation is a method of its name here; a backend implements those in `operations`, takes what
    `Kernels` has already checked, and returns what `Kernels` documents.
    """

    name: ClassVar[str]
    # Operations that the backend has at all.
    operations: ClassVar[frozenset[str]]
    # Of these, the ones whose result for a row has the same bits whatever is computed with it.
    invariant: ClassVar[frozenset[str]] = frozenset()

    def unavailable(self, device: str) -> str | None:
        """Why nothing of this backend can run on the device, or None if it can."""
        return None

    def unsupported(self, op: str, dtype: str, shape: OpShape) -> str | None:
        """Why this operation cannot run for this dtype and shape, or None if it can."""
        return None

    def kv_block_bytes(self, spec: KVCacheSpec) -> int:
        """Bytes of one block as `allocate_kv` lays it out."""
        return spec.block_bytes

    def pack_linear(self, weight: Tensor, bias: Tensor | None, is_head: bool) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        raise NotImplementedError

    def record(self, build: Callable[[], None], sizes: StepSizes) -> Program | None:
        """See `Kernels.record`."""
        return None

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        raise NotImplementedError

    def linear_argmax(self, x: Tensor | Quantized, packed: PackedLinear, width: int) -> Tensor | None:
        """See `Kernels.linear_argmax`."""
        return None

    def linear_draw(
        self, x: Tensor | Quantized, packed: PackedLinear, width: int, temperature: Tensor, uniform: Tensor
    ) -> Tensor | None:
        """See `Kernels.linear_draw`."""
        return None

    def pack_int8(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> PackedLinear:
        """See `Kernels.pack_int8`."""
        raise NotImplementedError

    def linear_int8(self, x: Quantized, packed: PackedLinear, out: Tensor) -> Tensor:
        """See `Kernels.linear`, for quantized activations."""
        raise NotImplementedError

    def pack_coded(self, coded: Coded, bias: Tensor | None) -> PackedLinear:
        """See `Kernels.pack_coded`."""
        raise NotImplementedError

    def linear_coded(self, x: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        """See `Kernels.linear`, for weights of a few bits."""
        raise NotImplementedError

    def quantize(self, x: Tensor, out: Quantized) -> Quantized:
        """See `Kernels.quantize`. The five that follow belong to it."""
        raise NotImplementedError

    def rounding_loss(self, weight: Tensor, rounded: Quantized, mean: Tensor) -> Tensor:
        """See `Kernels.rounding_loss`."""
        raise NotImplementedError

    def kronecker(
        self, x: Tensor, scale: Tensor, factors: Sequence[Tensor], dim: int, out: Tensor | None
    ) -> Tensor:
        """See `Kernels.kronecker`."""
        raise NotImplementedError

    def rms_norm_quantize(self, x: Tensor, weight: Tensor, eps: float, out: Quantized) -> Quantized:
        """Quantize what `rms_norm` gives."""
        return self.quantize(self.rms_norm(x, weight, eps, None), out)

    def add_rms_norm_quantize(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Quantized
    ) -> tuple[Quantized, Tensor]:
        """Quantize what `add_rms_norm` gives."""
        normed, residual = self.add_rms_norm(x, residual, weight, eps, None)
        return self.quantize(normed, out), residual

    def silu_mul_quantize(self, gate_up: Tensor, out: Quantized) -> Quantized:
        """Quantize what `silu_mul` gives."""
        return self.quantize(self.silu_mul(gate_up, None), out)

    def gather_rows(self, source: Tensor | PackedLinear, ids: Tensor, out: Tensor | None) -> Tensor:
        """See `Kernels.gather_rows`."""
        raise NotImplementedError

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        """See `Kernels.rms_norm`."""
        raise NotImplementedError

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        raise NotImplementedError

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool) -> None:
        """See `Kernels.rotary`."""
        raise NotImplementedError

    def silu_mul(self, gate_up: Tensor, out: Tensor | None) -> Tensor:
        """See `Kernels.silu_mul`."""
        raise NotImplementedError

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> LayerKV:
        """See `Kernels.allocate_kv`."""
        raise NotImplementedError

    def store_kv(self, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        """See `Kernels.store_kv`."""
        raise NotImplementedError

    def read_kv(self, kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.read_kv`."""
        raise NotImplementedError

    def attention(
        self,
        query: Tensor,
        kv: LayerKV,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: Tensor | None,
    ) -> Tensor:
        """See `Kernels.attention`."""
        raise NotImplementedError

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `Kernels.sample`."""
        raise NotImplementedError

    def score_tokens(self, logits: Tensor, tokens: Tensor, num_top: Tensor) -> Scores:
        """See `Kernels.score_tokens`."""
        raise NotImplementedError

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        """See `Kernels.penalise`."""
        raise NotImplementedError


BACKENDS: Registry[KernelBackend] = Registry("kernel backend", "batchgen.kernels")


def refusal(backend: KernelBackend, op: str, device: str, dtype: str, shape: OpShape) -> str | None:
    """Why the backend cannot serve the operation, or None if it can."""
    if op not in backend.operations:
        return f"{backend.name} has no {op}"
    reason = backend.unavailable(device) or backend.unsupported(op, dtype, shape)
    if reason:
        return reason
    if shape.reproducible and op not in backend.invariant:
        return f"{op} of {backend.name} depends on the batch around a row"
    return None


def select(op: str, device: str, dtype: str, shape: OpShape, *, backend: str | None = None) -> Choice:
    """Choose the backend of one operation.

    Args:
        op: one of OPERATIONS.
        device: "cpu" or "cuda".
        dtype: name of the activations' dtype, "float32" and so on.
        shape: what is known of the shapes.
        backend: force this one. Operations that it does not have at all go to the reference, with the reason.

    Raises:
        UnknownNameError: no backend of that name.
        KernelError: the forced backend cannot serve the operation, or none can.
    """
    if backend is not None:
        forced = BACKENDS.get(backend, "engine.kernel_backend")
        why_not = forced.unavailable(device)
        if why_not is None and op in forced.operations:
            why_not = refusal(forced, op, device, dtype, shape)
            if why_not is None:
                return Choice(forced.name, "forced")
        if why_not is not None:
            case = f"{op} for {dtype} on {device}"
            raise KernelError(f"kernel_backend={backend!r} cannot serve {case}: {why_not}")
        candidates: tuple[str, ...] = ("reference",)
        passed_over = [f"{forced.name} has no {op}"]
    else:
        candidates = PREFERENCE.get(device, ("reference",))
        passed_over = []
    for name in candidates:
        why_not = refusal(BACKENDS.get(name), op, device, dtype, shape)
        if why_not is None:
            return Choice(name, "; ".join(passed_over) or f"best for {dtype} on {device}")
        passed_over.append(why_not)
    hint = "; set reproducible: false, or " if shape.reproducible else "; "
    raise KernelError(
        f"no kernel backend can serve {op} for {dtype} on {device}: {'; '.join(passed_over)}{hint}"
        "choose another dtype or kernel_backend"
    )
