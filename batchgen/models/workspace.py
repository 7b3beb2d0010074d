"""Workspace: the memory of a decoder's activations, taken once and used by every layer of every step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.ops import Activation, Quantized


class InputRoom:
    """Room for what a linear layer reads, in the form that the layer wants.

    Args:
        floats: [T, K].
        take: makes room for T tokens of K, as integers of so many bits.
    """

    __slots__ = ("_quantized", "_take", "floats")

    def __init__(self, floats: Tensor, take: Callable[[int], Quantized]):
        self.floats, self._take = floats, take
        self._quantized: dict[int, Quantized] = {}

    def of(self, bits: int | None) -> Activation:
        """The room for a layer whose `input_bits` these are."""
        return self.floats if bits is None else self.quantized(bits)

    def quantized(self, bits: int) -> Quantized:
        """The room for integers."""
        if bits not in self._quantized:
            self._quantized[bits] = self._take(bits)
        return self._quantized[bits]


@dataclass(frozen=True, slots=True)
class Activations:
    """What the layers of one step write into (T tokens). `query`, `key`, `value` are views of `qkv`.

    Shapes: residual, hidden [T, E]; normed of [T, E]; qkv [T, (H + 2G) * D]; query [T, H, D]; key, value
        [T, G, D]; attended of [T, H * D] and heads [T, H, D], the same memory as its floats; wide [T, 2I];
        gated of [T, I].
    """

    residual: Tensor
    normed: InputRoom
    hidden: Tensor
    qkv: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attended: InputRoom
    heads: Tensor
    wide: Tensor
    gated: InputRoom


class Workspace:
    """Buffers as large as their largest use so far.

    Fresh memory costs a page fault every 4 KiB, which in a decode step would be a good part of the time.

    Args:
        dtype, device: of all buffers.
        hidden_size, wide_size, vocab_size: E, 2I and V on this rank.
        num_heads, num_kv_heads, head_dim: H, G and D on this rank.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        hidden_size: int,
        wide_size: int,
        vocab_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ):
        self._dtype, self._device = dtype, device
        self._hidden_size, self._wide_size, self._vocab_size = hidden_size, wide_size, vocab_size
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._buffers: dict[str, Tensor] = {}
        self._quantized: dict[tuple[str, int], Quantized] = {}
        # Views by number of tokens: a prefill step and a decode step alternate between few of them.
        self._activations: dict[int, Activations] = {}

    def activations(self, num_tokens: int) -> Activations:
        """Uninitialised activations of a step; they hold until the next call."""
        found = self._activations.get(num_tokens)
        if found is None:
            if len(self._activations) >= 8:
                self._activations.clear()
            found = self._activations[num_tokens] = self._make(num_tokens)
        return found

    def normed_heads(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Room for queries [T, H, D] and keys [T, G, D] whose heads are normed each by itself."""
        heads, groups, size = self._heads
        return (
            self._take("normed_query", num_tokens, heads * size).view(num_tokens, heads, size),
            self._take("normed_key", num_tokens, groups * size).view(num_tokens, groups, size),
        )

    def picked(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Room for some tokens' attention result [R, H * D] and residual stream [R, E]."""
        heads, _, size = self._heads
        return (
            self._take("picked_attended", num_rows, heads * size),
            self._take("picked_residual", num_rows, self._hidden_size),
        )

    def logits(self, num_rows: int) -> Tensor:
        """An uninitialised [R, V] buffer; it holds until the next call."""
        return self._take("logits", num_rows, self._vocab_size)

    def release(self) -> None:
        """Give all buffers back; the next use takes new ones."""
        self._buffers.clear()
        self._quantized.clear()
        self._activations.clear()

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of qkv [T, (H + 2G) * D] as query [T, H, D], key and value [T, G, D]."""
        heads, groups, size = self._heads
        rows = qkv.view(qkv.shape[0], heads + 2 * groups, size)
        return rows[:, :heads], rows[:, heads : heads + groups], rows[:, heads + groups :]

    def _make(self, num_tokens: int) -> Activations:
        heads, groups, size = self._heads
        qkv = self._take("qkv", num_tokens, (heads + 2 * groups) * size)
        query, key, value = self.split_heads(qkv)
        attended = self._room("attended", num_tokens, heads * size)
        return Activations(
            residual=self._take("residual", num_tokens, self._hidden_size),
            normed=self._room("normed", num_tokens, self._hidden_size),
            hidden=self._take("hidden", num_tokens, self._hidden_size),
            qkv=qkv,
            query=query,
            key=key,
            value=value,
            attended=attended,
            heads=attended.floats.view(num_tokens, heads, size),
            wide=self._take("wide", num_tokens, self._wide_size),
            gated=self._room("gated", num_tokens, self._wide_size // 2),
        )

    def _room(self, name: str, rows: int, columns: int) -> InputRoom:
        def take(bits: int) -> Quantized:
            buffer = self._quantized.get((name, bits))
            if buffer is None or buffer.shape[0] < rows:
                buffer = self._quantized[name, bits] = Quantized.empty(rows, columns, bits, self._device)
            return buffer[:rows]

        return InputRoom(self._take(name, rows, columns), take)

    def _take(self, name: str, rows: int, columns: int) -> Tensor:
        size = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
            # Views of the smaller buffer would keep it alive.
            self._activations.clear()
        return buffer[:size].view(rows, columns)
