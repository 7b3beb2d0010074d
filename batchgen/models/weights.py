"""load_weights: tensors of a checkpoint, streamed one by one straight into a model's layers."""

import torch
from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.models.decoder import Decoder
from batchgen.models.rotated_weights import RotatedSource
from batchgen.models.weight_source import HEAD, TABLE, UntiedSource, WeightSource, listed

# Buffers that old checkpoints carry and that are computed here.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def load_weights(model: Decoder, source: WeightSource) -> None:
    """Fill a model from a checkpoint.

    Names are compared before anything is read. The largest layers come first, while little else is in memory.

    Args:
        model: as built, without weights.
        source: the checkpoint.

    Raises:
        WeightsError: tensors are missing, left over, of the wrong shape or not finite; names them.
    """
    targets = model.weight_targets()
    names = _checked_names(model, source)
    shapes = source.shapes
    source = _FiniteSource(source)
    if HEAD in names and HEAD not in shapes:
        source = UntiedSource(source)
    if model.rotation is not None:
        source = RotatedSource(source, model.rotation)
    groups: dict[int, list[str]] = {}
    for name in names:
        target, _ = targets[name.rpartition(".")[0]]
        groups.setdefault(id(target), []).append(name)

    def size(group: list[str]) -> int:
        return sum(torch.Size(source.shapes[name]).numel() for name in group)

    for group in sorted(groups.values(), key=size, reverse=True):
        for name in group:
            module, _, parameter = name.rpartition(".")
            target, part = targets[module]
            tensor = source.read(name)
            try:
                target.load(part, parameter, tensor)
            except WeightsError as error:
                raise WeightsError(f"{source.where}: {name}: {error}") from error


class _FiniteSource:
    """A checkpoint whose tensors are looked at as they are read.

    A single NaN would turn every text into the same token, with no other sign of it.
    """

    def __init__(self, source: WeightSource):
        self.where, self.shapes, self._source = source.where, source.shapes, source

    def read(self, name: str) -> Tensor:
        """One tensor, without a NaN or an infinity."""
        tensor = self._source.read(name)
        if tensor.dtype not in _FLOATS or bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
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
    expected: set[str] = set()
    for module, (target, part) in model.weight_targets().items():
        expected |= {f"{module}.{parameter}" for index, parameter in target.missing() if index == part}
    found = [name for name in source.shapes if not name.endswith(_IGNORED_SUFFIXES)]
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
