"""ParallelContext: this rank's place among the ranks that share one model."""

from dataclasses import dataclass

from torch import Tensor

from batchgen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Rank `rank` of `size`. The base class serves size 1; a group of ranks subclasses the two exchanges."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> slice:
        """This rank's even share of `total` rows, columns or heads.

        Raises:
            ConfigError: the total does not divide.
        """
        if total % self.size:
            raise ConfigError(f"{what}: {total} does not divide among {self.size} ranks")
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        self._must_be_alone()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The last dimension of all ranks, one after the other."""
        self._must_be_alone()
        return x

    def _must_be_alone(self) -> None:
        if self.size != 1:
            raise NotImplementedError(f"{type(self).__name__} of size {self.size} has no exchange")
