"""Coded: a weight as codes of a few bits, with scales for groups of inputs."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

MOST_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A weight [N, K]: scale[n, g] * (value - zero[n, g]), or scale[n, g] * value + least[n, g].

    `value` is the code itself or, with a table, what stands in it for the code; g is the group of the input.

    Args:
        codes: uint8 [N, K], each below 2 ** bits.
        bits: 1 to 8, in which a code is kept.
        scale: [N, G], float32, float16 or bfloat16; each kept as it is and widened to float32.
        zero: uint8 [N, G] or None; in units of codes.
        least: [N, G] of the dtype of `scale`, or None; not both it and `zero`.
        table: float32 [2 ** bits] or None.
        group_size: inputs of a group, one after the other; the last may have fewer. At most K.
        groups: int32 [K], the group of each input, where they do not lie one after the other (GPTQ's
            act-order); then `group_size` says nothing.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    group_size: int
    zero: Tensor | None = None
    least: Tensor | None = None
    table: Tensor | None = None
    groups: Tensor | None = None

    @property
    def num_groups(self) -> int:
        """G, groups of inputs that have a scale."""
        return self.scale.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def to(self, device: str | torch.device) -> "Coded":
        """The same on a device."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in held.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def dense(self) -> Tensor:
        """The weight: float32 [N, K], one rounding for each difference, product and sum."""
        value = self.codes.to(torch.float32) if self.table is None else self.table[self.codes.long()]
        if self.groups is None:
            group = torch.arange(self.codes.shape[1]) // self.group_size
        else:
            group = self.groups.long()
        scale = self.scale.to(torch.float32)[:, group]
        if self.zero is not None:
            value = value - self.zero.to(torch.float32)[:, group]
        weight = value * scale
        return weight if self.least is None else weight + self.least.to(torch.float32)[:, group]


def float8_values(dtype: torch.dtype) -> Tensor:
    """What the 256 bytes of an 8-bit float stand for: float32 [256], NaN or infinite for some."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
