"""ceilings: what this machine can do at most, measured."""

import torch

from batchgen.kernels.ceilings import Ceilings
from batchgen.kernels.cpu.library import Library, load

# Larger than most caches, and read in a fraction of a second.
_BYTES = 512 << 20


def measure(free_bytes: int) -> Ceilings | None:
    """Measure with the threads that the kernels use; takes about a second. None without the C kernels.

    Args:
        free_bytes: memory that may be taken for a moment.
    """
    library = load()
    if not isinstance(library, Library):
        return None
    memory = torch.ones(max(min(_BYTES, free_bytes // 4), 1 << 20) // 4)
    rates = torch.empty(3, dtype=torch.float64)
    library.ceilings(memory.data_ptr(), memory.numel(), rates.data_ptr(), torch.get_num_threads())
    return Ceilings(*rates.tolist())
