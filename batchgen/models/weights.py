"""load_weights: tensors of a checkpoint, streamed one by one straight into a model's layers."""

from collections.abc import Container, Iterable

import torch
from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.layers.linear import LinearLayer
from batchgen.models.decoder import Decoder
from batchgen.models.decoder_layer import WeightTarget
from batchgen.models.rotated_weights import RotatedSource
from batchgen.models.weight_source import HEAD, TABLE, UntiedSource, WeightSource, listed
from batchgen.quantization.base import PartError

# Buffers that old checkpoints carry and that are computed here.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def load_weights(model: Decoder, source: WeightSource) -> None:
    """Fill a model from a checkpoint, the largest layers first, while little else is in memory.

    Raises:
        WeightsError: what `WeightLoader` raises.
    """
    WeightLoader(model, source).load_rest()


class WeightLoader:
    """Fills a model from a checkpoint, layer by layer. Names are compared before anything is read.

    Args:
        model: as built, without weights.
        source: the checkpoint.

    Raises:
        WeightsError: tensors are missing or left over; names them.
    """

    def __init__(self, model: Decoder, source: WeightSource):
        self._targets = model.weight_targets()
        names = _checked_names(model, source)
        source_shapes, source = source.shapes, _FiniteSource(source, model.method.beside_bytes)
        if HEAD in names and HEAD not in source_shapes:
            source = UntiedSource(source)
        if model.rotation is not None:
            source = RotatedSource(source, model.rotation)
        self._source = source
        # The parts of a fused layer have one target.
        self._waiting: dict[int, list[str]] = {}
        for name in names:
            target, _ = self._targets[self._split(name)[0]]
            self._waiting.setdefault(id(target), []).append(name)

    def load(self, target: WeightTarget) -> None:
        """Fill one layer, unless it is full.

        Raises:
            WeightsError: a tensor is of the wrong shape or not finite; names it.
        """
        for name in self._waiting.pop(id(target), []):
            module, parameter = self._split(name)
            tensor = self._source.read(name)
            try:
                target.load(self._targets[module][1], parameter, tensor)
            except WeightsError as error:
                place = module if isinstance(error, PartError) else name
                raise WeightsError(f"{self._source.where}: {place}: {error}") from error

    def _split(self, name: str) -> tuple[str, str]:
        return split_name(name, self._targets)

    def load_rest(self) -> None:
        """Fill all that is not full yet, the largest layers first.

        Raises:
            WeightsError: what `load` raises.
        """

        def size(target: WeightTarget) -> int:
            names = self._waiting.get(id(target), [])
            return sum(torch.Size(self._source.shapes[name]).numel() for name in names)

        for target in sorted((target for target, _ in self._targets.values()), key=size, reverse=True):
            self.load(target)


def split_name(name: str, modules: Container[str]) -> tuple[str, str]:
    """A tensor's module and what it is to that: model.norm and weight, or weight.absmax."""
    module, _, parameter = name.rpartition(".")
    rest = module
    while rest:
        if rest in modules:
            return rest, name[len(rest) + 1 :]
        rest = rest.rpartition(".")[0]
    return module, parameter


class _FiniteSource:
    """A checkpoint whose tensors are looked at as they are read.

    A single NaN would turn every text into the same token, with no other sign of it.

    Args:
        source: the checkpoint.
        beside_bytes: see `LinearMethod`.
    """

    def __init__(self, source: WeightSource, beside_bytes: Iterable[str]):
        self.where, self.shapes, self._source = source.where, source.shapes, source
        self._beside_bytes = tuple(beside_bytes)

    def read(self, name: str) -> Tensor:
        """One tensor, without a NaN or an infinity."""
        tensor = self._source.read(name)
        is_bytes = any(name + end in self.shapes for end in self._beside_bytes)
        if tensor.dtype not in _FLOATS or is_bytes or bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
            return tensor
        num_bad = int((~torch.isfinite(tensor)).sum())
        if num_bad:  # else only the sum was too large
            raise WeightsError(
                f"{self.where}: {name}: {num_bad} of {tensor.numel()} values are NaN or infinite; the "
                f"checkpoint is damaged"
            )
        return tensor


def _checked_names(model: Decoder, source: WeightSource) -> list[str]:
    """The names to load, in the file's order, once they are known to be just those that the model needs."""
    targets = model.weight_targets()
    found = [name for name in source.shapes if not name.endswith(_IGNORED_SUFFIXES + model.method.unused)]
    for name in found:
        module, parameter = split_name(name, targets)
        target, part = targets.get(module, (None, 0))
        if isinstance(target, LinearLayer):
            target.expect(part, parameter)
    expected: set[str] = set()
    for module, (target, part) in targets.items():
        expected |= {f"{module}.{parameter}" for index, parameter in target.missing() if index == part}
    if model.config.tie_embeddings:
        if HEAD in found:
            _check_tied(source)
            found.remove(HEAD)
        if model.embedding.head is None and TABLE in found:
            found.append(HEAD)
    missing = sorted(expected.difference(found))
    extra = sorted(set(found) - expected)
    if missing or extra:
        problems = [f"missing {listed(missing)}"] if missing else []
        problems += [f"not in the model: {listed(extra)}"] if extra else []
        hint = ""
        if missing == [HEAD]:
            hint = "; if the head is the embedding, config.json must say tie_word_embeddings: true"
        raise WeightsError(f"{source.where}: {'; '.join(problems)}{hint}")
    return found


def _check_tied(source: WeightSource) -> None:
    """A head stored beside a tied embedding must be the same numbers; then the embedding serves as both."""
    if TABLE in source.shapes:
        head, embedding = source.read(HEAD), source.read(TABLE)
        if head.shape == embedding.shape and torch.equal(head, embedding):
            return
    raise WeightsError(
        f"{source.where}: config.json says tie_word_embeddings: true, but {HEAD} is there and differs "
        f"from {TABLE}; if the model has a head of its own, set tie_word_embeddings: false, else remove "
        f"the tensor"
    )
