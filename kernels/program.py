"""Program: the operations of a forward pass, recorded once, then run for every step at once."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What differs from step to step: tokens, rows of logits, sequences, and columns of the block tables."""

    tokens: int
    rows: int
    sequences: int
    table_width: int

    def in_order(self) -> tuple[int, int, int, int]:
        """The order in which kernels count them."""
        return self.tokens, self.rows, self.sequences, self.table_width


class Program(ABC):
    """Operations on tensors that stay where they are: a step's input is copied into them, then `run` follows.

    It keeps what it was recorded with alive. Sizes of a step may be anything up to those recorded with.
    """

    @abstractmethod
    def run(self, sizes: StepSizes) -> None:
        """Run all operations.

        Raises:
            KernelError: what the operation that failed raises; those after it have not run.
        """

    @abstractmethod
    def measure(self) -> None:
        """Keep time from now on."""

    @abstractmethod
    def profile(self) -> dict[str, float]:
        """Seconds spent so far in operations of each kind, by name; empty without `measure`."""
