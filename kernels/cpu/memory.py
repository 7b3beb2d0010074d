"""Memory for weights and KV blocks, in huge pages where the system gives them.

They are read from end to end, or in a random order, at every step: with pages of 4 KiB, looking addresses up
costs up to a third of the time.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# Weights of a layer are smaller than a page: they are laid into chunks one after the other.
CHUNK_BYTES = 32 << 20
_ALIGNMENT = 64


def allocate(num_floats: int) -> Tensor:
    """A float32 tensor of zeros, [num_floats], that begins on a huge page. Pages are taken when touched."""
    num_bytes = max(4 * num_floats, 4)
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    whole = torch.frombuffer(mapped, dtype=torch.float32)
    offset = -whole.data_ptr() % HUGE_PAGE // 4
    return whole[offset : offset + num_floats]


class Arena:
    """Tensors in shared chunks. A full chunk is given back when the last tensor in it is gone."""

    def __init__(self) -> None:
        self._free = torch.empty(0)

    def take(self, num_floats: int) -> Tensor:
        """A float32 tensor of zeros, [num_floats]."""
        step = _ALIGNMENT // 4
        needed = -(-num_floats // step) * step
        if needed > self._free.numel():
            if 4 * needed >= CHUNK_BYTES:
                return allocate(num_floats)
            self._free = allocate(CHUNK_BYTES // 4)
        taken, self._free = self._free[:num_floats], self._free[needed:]
        return taken
