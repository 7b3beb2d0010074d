"""Workspace: the memory of a decoder's activations, taken once and used by every layer of every step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Activations:
    """What the layers of one step write into (T tokens). `query`, `key`, `value` are views of `qkv`.

    Shapes: residual, normed, hidden [T, E]; qkv [T, (H + 2G) * D]; query [T, H, D]; key, value [T, G, D];
        attended [T, H * D] and heads [T, H, D], the same memory; wide [T, 2I]; gated [T, I].
    """

    residual: Tensor
    normed: Tensor
    hidden: Tensor
    qkv: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    heads: Tensor
    wide: Tensor
    gated: Tensor


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

    def logits(self, num_rows: int) -> Tensor:
        """An uninitialised [R, V] buffer; it holds until the next call."""
        return self._take("logits", num_rows, self._vocab_size)

    def release(self) -> None:
        """Give all buffers back; the next use takes new ones."""
        self._buffers.clear()
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
        attended = self._take("attended", num_tokens, heads * size)
        return Activations(
            residual=self._take("residual", num_tokens, self._hidden_size),
            normed=self._take("normed", num_tokens, self._hidden_size),
            hidden=self._take("hidden", num_tokens, self._hidden_size),
            qkv=qkv,
            query=query,
            key=key,
            value=value,
            attended=attended,
            heads=attended.view(num_tokens, heads, size),
            wide=self._take("wide", num_tokens, self._wide_size),
            gated=self._take("gated", num_tokens, self._wide_size // 2),
        )

    def _take(self, name: str, rows: int, columns: int) -> Tensor:
        size = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
            # Views of the smaller buffer would keep it alive.
            self._activations.clear()
        return buffer[:size].view(rows, columns)
