"""What changes a row of logits before a token is drawn from it: one function each, all in place."""

from collections.abc import Iterable, Mapping

from torch import Tensor

NEVER = float("-inf")


def add_bias(row: Tensor, bias: Mapping[int, float]) -> None:
    """Add to the logits of some ids: row [V]. Ids past the row have no token and are left out."""
    ids = [index for index in bias if index < row.shape[0]]
    if ids:
        row[ids] += row.new_tensor([bias[index] for index in ids])


def hold_back(row: Tensor, ids: Iterable[int]) -> None:
    """Forbid ids: row [V]."""
    inside = [index for index in ids if index < row.shape[0]]
    if inside:
        row[inside] = NEVER
