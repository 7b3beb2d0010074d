"""ceilings: what this machine can do at most, measured."""

import torch

from batchgen.kernels.ceilings import Ceilings
from batchgen.kernels.cpu.library import Library, load

# Larger than most caches; a part of it is read at a time.
_FLOATS, _PARTS = 512 << 18, 8


class CeilingMeter:
    """Measures with the threads that the kernels use, as often as asked: 15 to 20 ms each time.

    Args:
        library: of the C kernels.
        free_bytes: memory that may be taken as long as this object lives.
    """

    def __init__(self, library: Library, free_bytes: int):
        self._library = library
        count = max(min(_FLOATS, free_bytes // 16), 1 << 18) // _PARTS
        self._memory = torch.ones(_PARTS, count)
        self._next = 0

    @classmethod
    def of_machine(cls, free_bytes: int) -> "CeilingMeter | None":
        """One for this machine; None without the C kernels."""
        library = load()
        return cls(library, free_bytes) if isinstance(library, Library) else None

    def sample(self) -> Ceilings:
        """The rates now. Something else that runs makes them lower, as it makes the kernels slower."""
        part = self._memory[self._next]
        self._next = (self._next + 1) % _PARTS
        rates = torch.empty(3, dtype=torch.float64)
        self._library.ceilings(part.data_ptr(), part.numel(), rates.data_ptr(), torch.get_num_threads())
        return Ceilings(*rates.tolist())


def measure(free_bytes: int) -> Ceilings | None:
    """The best of some samples: what the machine does when it is left alone. None without the C kernels.

    Args:
        free_bytes: memory that may be taken for a moment.
    """
    meter = CeilingMeter.of_machine(free_bytes)
    return None if meter is None else Ceilings.best([meter.sample() for _ in range(2 * _PARTS)])
