"""Memory for weights and KV blocks, in huge pages where the system gives them.

They are read from end to end, or in a random order, at every step: with pages of 4 KiB, looking addresses up
costs up to a third of the time.
"""

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# Weights of a layer are smaller than a page: they are laid into chunks one after the other.
CHUNK_BYTES = 32 << 20
_ALIGNMENT = 64


def allocate(num_floats: int) -> Tensor:
    """A float32 tensor of zeros, [num_floats], that begins on a huge page. Pages are taken when touched."""
    mapped, offset = _map(4 * num_floats)
    return torch.frombuffer(mapped, dtype=torch.float32, offset=offset)[:num_floats]


class Arena:
    """Tensors in shared chunks, for any thread. A chunk is given back when the last tensor in it is gone."""

    def __init__(self) -> None:
        # Models may be loaded by several threads at once, and share their backend's arena.
        self._lock = threading.Lock()
        # Only the tensors keep a chunk alive.
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._next = self._end = 0

    def take(self, num_floats: int) -> Tensor:
        """A float32 tensor of zeros, [num_floats]."""
        num_bytes = max(-(-4 * num_floats // _ALIGNMENT), 1) * _ALIGNMENT
        if num_bytes >= CHUNK_BYTES:
            return allocate(num_floats)
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._next + num_bytes > self._end:
                chunk, self._next = _map(CHUNK_BYTES)
                self._chunk, self._end = weakref.ref(chunk), self._next + CHUNK_BYTES
            taken = torch.frombuffer(chunk, dtype=torch.float32, offset=self._next, count=num_bytes // 4)
            self._next += num_bytes
        return taken[:num_floats]


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Fresh memory, and where in it a huge page begins with `num_bytes` after it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, max(num_bytes, 4) + HUGE_PAGE, flags=flags)
    with suppress(AttributeError, OSError):  # a system without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped, -torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() % HUGE_PAGE
