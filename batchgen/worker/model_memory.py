"""ModelMemory: what of a model is in memory, its weights and its KV blocks; given back and taken again."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from batchgen.errors import EngineError
from batchgen.models.decoder import Decoder
from batchgen.worker.device import hand_back_memory, is_host
from batchgen.worker.kv_blocks import KVBlocks

LEVELS = (1, 2)


class ModelMemory:
    """A model and its blocks, awake or asleep.

    Args:
        model: with its weights.
        blocks: of its layers.
        reload: reads the model from its files again.
    """

    def __init__(self, model: Decoder, blocks: KVBlocks, reload: Callable[[], Decoder]):
        self.blocks = blocks
        self._model: Decoder | None = model
        self._reload: Callable[[], Decoder] | None = reload
        self._level = 0
        self._moved: MovedWeights | None = None
        model.bind_kv(blocks.caches)

    @property
    def model(self) -> Decoder:
        """The model, ready to run.

        Raises:
            EngineError: asleep, or after `free`.
        """
        if self._reload is None:
            raise EngineError("the executor is shut down")
        if self._level or self._model is None:
            raise EngineError("the executor is asleep; wake_up comes first")
        return self._model

    def sleep(self, level: int) -> None:
        """Give memory back: see `Executor.sleep`. Asleep already, it may only sink deeper.

        Raises:
            EngineError: no such level, or after `free`.
        """
        if level not in LEVELS:
            raise EngineError(f"sleep has the levels 1 and 2, not {level}")
        if self._reload is None:
            raise EngineError("the executor is shut down")
        if level <= self._level:
            return
        if not self._level and self._model is not None:
            self._model.release()
            self.blocks.drop()
        if level == 2:
            self._model = self._moved = None
        elif self._model is not None and not is_host(self._model.device):
            self._moved = MovedWeights(self._model.tensors())
        self._level = level
        hand_back_memory()

    def wake_up(self) -> None:
        """Be ready again: see `Executor.wake_up`. Awake already, nothing happens.

        Raises:
            EngineError: after `free`.
            BatchgenError: what reading the model again raises; then it sleeps on.
        """
        if self._reload is None:
            raise EngineError("the executor is shut down")
        if not self._level:
            return
        if self._moved is not None:
            self._moved.move_back()
            self._moved = None
        if self._model is None:
            self._model = self._reload()
        self.blocks.allocate()
        self._model.bind_kv(self.blocks.caches)
        self._level = 0

    def free(self) -> None:
        """Give everything back for good. May be called twice."""
        self._model = self._moved = self._reload = None
        self.blocks.drop()
        hand_back_memory()


class MovedWeights:
    """Weights of which only a copy in host memory is left.

    The memory is taken from under the tensors, whose views and holders all stay as they are.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            copy.copy_(storage)
            storage.resize_(0)
            self._moved.append((storage, copy))

    def move_back(self) -> None:
        """Put the weights where they were."""
        while self._moved:
            storage, copy = self._moved.pop()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
