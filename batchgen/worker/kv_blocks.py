"""KVBlocks: the KV blocks of a model on its device and in host memory, and what a step does to them."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from batchgen.engine.scheduler_output import SchedulerOutput
from batchgen.errors import EngineError
from batchgen.kernels.kv import LayerKV
from batchgen.kernels.ops import Kernels
from batchgen.models.kv_layout import KVLayout
from batchgen.worker.device import wait_for


class KVBlocks:
    """The pool of blocks: one cache for each place of the layout, and as many in host memory.

    Args:
        kernels: of the model.
        layout: of its layers.
        num_blocks: in the pool.
        num_host_blocks: in host memory, for swapping.
        device: of the pool.
    """

    def __init__(
        self,
        kernels: Kernels,
        layout: KVLayout,
        num_blocks: int,
        num_host_blocks: int = 0,
        *,
        device: torch.device,
    ):
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self._kernels, self._layout, self._device = kernels, layout, device
        self.caches: list[LayerKV] = []
        self.host: list[LayerKV] = []
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, at the beginning and after `drop`. What the blocks held is lost."""
        spec, places = self._layout.spec, range(self._layout.num_places)
        self.caches = [self._kernels.allocate_kv(spec, self.num_blocks, self._device) for _ in places]
        if self.num_host_blocks:
            self.host = self._kernels.allocate_host_kv(self.caches, self.num_host_blocks)

    def drop(self) -> None:
        """Give the memory back; whoever holds `caches` must let go of them too."""
        self.caches, self.host = [], []

    def apply(self, step: SchedulerOutput) -> float:
        """Do what the step asks for, in its order: swap out, swap in, copy.

        Returns: seconds that the swaps took; 0 when there were none.

        Raises:
            KernelError: a block that is in no pool.
            EngineError: a swap without a pool in host memory.
        """
        swap_s = 0.0
        if step.swap_out or step.swap_in:
            started = time.perf_counter()
            self._swap(self.caches, self.host, step.swap_out)
            self._swap(self.host, self.caches, step.swap_in)
            wait_for(self._device)
            swap_s = time.perf_counter() - started
        if step.block_copies:
            pairs = torch.from_numpy(np.array(step.block_copies, dtype=np.int64)).to(self._device)
            for kv in self.caches:
                self._kernels.copy_blocks(kv, pairs)
        return swap_s

    def _swap(
        self, sources: Sequence[LayerKV], targets: Sequence[LayerKV], pairs: Sequence[tuple[int, int]]
    ) -> None:
        if not pairs:
            return
        if not self.num_host_blocks:
            raise EngineError("blocks are to be swapped, but there is no pool in host memory (swap_space)")
        for source, target in zip(sources, targets, strict=True):
            self._kernels.swap_blocks(source, target, pairs)
