"""KVLayout: how the layers of a model share one pool of KV blocks, whatever each of them keeps.

All groups draw blocks from one pool, and a block belongs to one group at a time. So every group has the
same number of places, one for each of its layers, and the memory at a place is shared by the layers that
stand there, one of each group: a block that a window gives back is at once good for full attention.

A model of 4 full and 12 windowed layers has 4 groups over 4 places:

              place 0   place 1   place 2   place 3
    group 0   layer 3   layer 7   layer 11  layer 15    full
    group 1   layer 0   layer 1   layer 2   layer 4     window
    group 2   layer 5   layer 6   ...                   window
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.errors import UnsupportedModelError
from batchgen.kernels.kv import KVCacheSpec
from batchgen.windows import blocks_in_window

# What a group costs, in shares of the memory of a sequence: block tables to keep and to hand over.
GROUP_COST = 0.02


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups and places.

    Args:
        groups: of each layer, which group it is in: whose block tables are its own.
        places: of each layer, which of the pool's tensors holds its keys and values.
        windows: of each group, how many positions its layers see; None for all.
        spec: of the cache at every place.
    """

    groups: tuple[int, ...]
    places: tuple[int, ...]
    windows: tuple[int | None, ...]
    spec: KVCacheSpec

    @property
    def num_places(self) -> int:
        """Tensors in the pool: layers of a group."""
        return 1 + max(self.places)

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Blocks of all groups that hold a sequence of `num_tokens`, of which a step computes `chunk`."""
        return sum(
            blocks_in_window(num_tokens, window, self.spec.block_size, chunk) for window in self.windows
        )


def kv_layout(specs: Sequence[KVCacheSpec], max_len: int) -> KVLayout:
    """Lay out the cache of a model's layers.

    A window that reaches over `max_len` is none. Of all numbers of places, and of keeping windowed layers
    whole among the full ones, the cheapest is taken, by the memory of a sequence: the mean of one of
    `max_len` tokens and one that has just filled the smallest window (padding counts there, and nothing is
    saved yet), and GROUP_COST for every group. Places that no layer fills are padding.

    Args:
        specs: of each layer.
        max_len: the longest sequence.

    Raises:
        UnsupportedModelError: layers whose blocks are of different size, which cannot share memory.
    """
    if len({replace(spec, window=None) for spec in specs}) != 1:
        raise UnsupportedModelError("layers with KV caches of different shapes are not built")
    spec = replace(specs[0], window=None)
    windows = [None if each.window is None or each.window >= max_len else each.window for each in specs]
    lengths = [max_len, min((window for window in windows if window is not None), default=max_len)]

    def cost(layout: KVLayout) -> float:
        filled = sum(
            layout.num_places * layout.blocks_for(length) * spec.block_size / length for length in lengths
        )
        return filled / len(lengths) + GROUP_COST * len(specs) * len(layout.windows)

    whole = _lay_out([None] * len(specs), len(specs), spec)
    split = [_lay_out(windows, places, spec) for places in range(1, len(specs) + 1)]
    # The fewest groups among equals.
    return min([*reversed(split), whole], key=cost)


def _lay_out(windows: Sequence[int | None], num_places: int, spec: KVCacheSpec) -> KVLayout:
    """Fill groups of `num_places`, layer by layer, each with layers of one window."""
    of_group: list[int | None] = []
    filling: dict[int | None, tuple[int, int]] = {}  # window -> group to fill next, places filled in it
    groups, places = [], []
    for window in windows:
        group, filled = filling.get(window, (0, num_places))
        if filled == num_places:
            group, filled = len(of_group), 0
            of_group.append(window)
        groups.append(group)
        places.append(filled)
        filling[window] = (group, filled + 1)
    return KVLayout(tuple(groups), tuple(places), tuple(of_group), spec)
