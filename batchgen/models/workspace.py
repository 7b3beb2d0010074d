"""Workspace: buffers for activations that every step and every layer use again."""

import torch
from torch import Tensor


class Workspace:
    """Named buffers, each as large as its largest use so far.

    Fresh memory costs a page fault every 4 KiB, which in a decode step would be a good part of the time.

    Args:
        dtype, device: of all buffers.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """A contiguous [rows, columns] buffer, uninitialised; it holds until the same name is taken again."""
        size = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(rows, columns)
