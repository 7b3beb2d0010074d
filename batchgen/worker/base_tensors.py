"""BaseTensors: single tensors of a model's checkpoint, read when somebody asks for them."""

from functools import cached_property

import torch
from torch import Tensor

from batchgen.models.weight_source import WeightSource
from batchgen.worker.model_files import ModelFiles


class BaseTensors:
    """The floats of a model by their names in a checkpoint. Any thread may call it.

    Args:
        files: of the model.
    """

    def __init__(self, files: ModelFiles):
        self._files = files

    def __call__(self, name: str) -> Tensor | None:
        """One tensor; None where there is none of that name, or one that is no floats."""
        if name not in self._source.shapes:
            return None
        tensor = self._source.read(name)
        return tensor if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else None

    @cached_property
    def _source(self) -> WeightSource:
        return self._files.source()
