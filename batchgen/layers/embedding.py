"""Embedding: token ids to hidden states, from a table of its own or from the rows of a tied head."""

import torch
from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.kernels.ops import Kernels
from batchgen.layers.linear import LMHead
from batchgen.layers.parallel import ParallelContext


class Embedding:
    """The table [V, E] on one rank: an even share of its rows.

    Args:
        name: for messages.
        vocab_size, hidden_size: of the whole table.
        parallel: this rank's place.
        kernels: the model's operations.
        dtype, device: of the table.
        head: the output head whose weight is this table; then nothing is loaded here.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        parallel: ParallelContext,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        head: LMHead | None = None,
    ):
        self.name, self.parallel, self.head = name, parallel, head
        self.size = (vocab_size, hidden_size)
        self.share = parallel.share(vocab_size, name)
        self._kernels, self._dtype, self._device = kernels, dtype, device
        self._table: Tensor | None = None

    def load(self, part: int, parameter: str, tensor: Tensor) -> None:
        """Take the whole table, of which this rank's rows are kept."""
        if self.head is not None:
            self.head.load(0, parameter, tensor)
            return
        if parameter != "weight" or tensor.shape != self.size:
            raise WeightsError(
                f"{self.name}: {parameter} has shape {list(tensor.shape)}, the model needs weight "
                f"{list(self.size)}"
            )
        self._table = tensor[self.share].to(dtype=self._dtype, device=self._device, copy=True)

    def missing(self) -> list[tuple[int, str]]:
        """(part, parameter) of the tensors that have not come."""
        if self.head is not None:
            return self.head.missing()
        return [(0, "weight")] if self._table is None else []

    def tensors(self) -> list[Tensor]:
        """The table in memory, or the head that it is."""
        if self.head is not None:
            return self.head.tensors()
        return [] if self._table is None else [self._table]

    def __call__(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Look up: ids [T] int64, within the vocabulary -> [T, E]."""
        if self.parallel.size == 1:
            return self._rows(ids, out)
        local = ids - self.share.start
        is_here = (local >= 0) & (local < self.share.stop - self.share.start)
        rows = self._rows(local.where(is_here, torch.zeros_like(local)))
        rows = self.parallel.all_reduce(rows * is_here.unsqueeze(1))
        return rows if out is None else out.copy_(rows)

    def _rows(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        if self.head is not None:
            return self.head.rows(ids, out)
        assert self._table is not None
        return self._kernels.gather_rows(self._table, ids, out)
