"""ModelFiles: the files of one model, from which it is built as often as it is wanted."""

import logging
import time
from typing import Any

import torch

from batchgen.errors import ConfigError
from batchgen.kernels.kv import torch_dtype
from batchgen.kernels.ops import Kernels
from batchgen.models.decoder import Decoder
from batchgen.models.gguf_config import config_from_gguf
from batchgen.models.gguf_file import GGUFFile
from batchgen.models.gguf_weights import GGUFSource
from batchgen.models.hf_config import config_from_hf
from batchgen.models.location import ModelLocation, resolve_model
from batchgen.models.weight_source import SafetensorsSource, WeightSource
from batchgen.models.weights import WeightLoader, load_weights
from batchgen.quantization.base import method_for
from batchgen.quantization.rotation import Rotation
from batchgen.worker.device import frugal_memory, hand_back_memory
from batchgen.worker.load_while_running import load_while_running

log = logging.getLogger("batchgen.worker")
loading = logging.getLogger("batchgen.loading")


class ModelFiles:
    """Where a model is, and its shape.

    Args:
        model: a folder, a .gguf file, a hub id or package:NAME/FILE.
        revision: of a hub id.

    Raises:
        ConfigError: no such model.
        ModelError: an architecture that is not built, or a damaged file.
    """

    def __init__(self, model: str, revision: str | None = None):
        self.location = resolve_model(model, revision)
        self._gguf = GGUFFile(self.location.path) if self.location.kind == "gguf" else None
        self.shape = (
            config_from_gguf(self._gguf)
            if self._gguf
            else config_from_hf(_config_json(self.location), self.location.name)
        )

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self._gguf is not None

    def source(self, keeps_blocks: bool = False) -> WeightSource:
        """The weights by their names in a Hugging Face checkpoint; those of a GGUF file as floats.

        Args:
            keeps_blocks: give what a GGUF file holds of linear layers in its own blocks.
        """
        if self._gguf is None:
            return SafetensorsSource(self.location.path)
        return GGUFSource(self._gguf, self.shape, keeps_blocks)

    def build(
        self,
        kernels: Kernels,
        *,
        dtype: str,
        quantization: str | None,
        kv_dtype: str,
        device: torch.device,
        max_len: int,
        block_size: int,
    ) -> Decoder:
        """The model with its weights, read anew.

        Args:
            kernels: the operations.
            dtype: of activations.
            quantization: how float weights are rounded; "gguf": they stay the file's blocks; None: not
                at all, or as the checkpoint says.
            kv_dtype: of the cache.
            device: of weights and activations.
            max_len: positions that will be asked for.
            block_size: of the cache.

        Raises:
            ModelError: weights that do not fit or cannot be read.
        """
        begin = time.perf_counter()
        keeps_blocks = quantization == "gguf"
        rounding = f", rounding its weights to {quantization}" if quantization and not keeps_blocks else ""
        loading.info("loading %s%s", self.location.name, rounding)
        source = self.source(keeps_blocks)
        divisors, config = None, self.shape.quantization
        if rounding:
            config = {"tie_word_embeddings": self.shape.tie_embeddings}
        if isinstance(source, GGUFSource):
            divisors = source.rope_divisors()
            if keeps_blocks:
                config = {"modules": source.kept_modules}
        method_class = method_for(self.shape.quantization, self.location.name, quantization)
        rotates = method_class.wants_rotation and self.shape.family.has_foldable_norms
        method = method_class(kernels, torch_dtype(dtype), device, config, self.location.name)
        model = Decoder(
            self.shape, kernels, method, kv_dtype=kv_dtype,
            device=device, max_len=max_len, block_size=block_size, rope_divisors=divisors,
            rotation=Rotation(self.shape.hidden_size, kernels) if rotates else None,
        )  # fmt: skip
        with frugal_memory():
            if method_class.wants_inputs:
                load_while_running(model, WeightLoader(model, source))
            else:
                load_weights(model, source)
        # What lay on the way of the weights is many times what the next step needs.
        hand_back_memory()
        log.info("weights of %s loaded in %.1f s", self.location.name, time.perf_counter() - begin)
        return model


def _config_json(location: ModelLocation) -> dict[str, Any]:
    data = location.read_json("config.json")
    if data is None:
        raise ConfigError(f"model {location.name!r}: {location.path} holds no config.json")
    return data
