"""make_checkpoint: a float model -> a folder of compressed-tensors that other engines read, too."""

import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchgen.errors import ConfigError, SinkError, UnsupportedModelError
from batchgen.kernels.ops import choose
from batchgen.models.decoder import Decoder
from batchgen.models.weight_source import WeightSource
from batchgen.models.weights import WeightLoader, split_name
from batchgen.quantization.compressed_layout import quantization_config
from batchgen.quantization.for_checkpoint import ForCheckpoint, Rounding, layouts_of
from batchgen.worker.checkpoint_files import (
    ShardWriter,
    config_json,
    stored_dtype,
    write_json,
    write_tokenizer,
)
from batchgen.worker.load_while_running import load_while_running
from batchgen.worker.model_files import ModelFiles

# The first that all layers' inputs divide by.
GROUP_SIZES = (128, 64, 32)
_BLOCK_SIZE = 16
# Of real text there is enough to see how inputs go together at a distance; of made-up tokens there is not.
# Little damping fits weights to the very texts: with 0.01 in place of 0.3 others lose half as much again.
_MOST_INPUTS, _MOST_INPUTS_MADE_UP = 8192, 512
_DAMPING, _DAMPING_MADE_UP = 0.3, 0.5


@dataclass(frozen=True, slots=True)
class MadeCheckpoint:
    """What was written.

    Args:
        folder: of the checkpoint.
        group_size: of weights of 4 bits; None for other schemes.
        num_layers: linear layers that were rounded.
        num_bytes: of all tensors.
        bits_per_weight: of the rounded layers, scales and zero points included.
    """

    folder: Path
    group_size: int | None
    num_layers: int
    num_bytes: int
    bits_per_weight: float


@torch.no_grad()
def make_checkpoint(
    files: ModelFiles,
    out: Path,
    scheme: str,
    *,
    group_size: int | None = None,
    has_zeros: bool = False,
    texts: Sequence[Sequence[int]] = (),
    on_layer: Callable[[int, int], None] | None = None,
) -> MadeCheckpoint:
    """Round a model's weights and write them.

    Args:
        files: of the model.
        out: the new folder; it appears when all is written.
        scheme: see `layouts_of`.
        group_size: inputs that share a scale of 4 bits; None: the first of `GROUP_SIZES` that fits.
        has_zeros: whether groups of 4 bits have zero points.
        texts: token ids that layers are rounded for; without any, random ones.
        on_layer: called with the number of layers that are done, and of all.

    Raises:
        ConfigError: a group size that does not fit, or a folder that is not empty.
        UnsupportedModelError: the model is quantized already, or cannot be written as a folder.
        SinkError: the folder cannot be written.
    """
    shape, name = files.shape, files.location.name
    if shape.quantization is not None:
        raise UnsupportedModelError(
            f"{name}: the checkpoint is quantized already ({shape.stored_as!r}); take the float model"
        )
    size = _checked_group_size(files, group_size) if scheme == "int4" else None
    if group_size is not None and size is None:
        raise ConfigError(f"group_size: {scheme} has a scale for each output; leave it out")
    config = config_json(files.location, shape)
    dtype = stored_dtype(shape.dtype)
    layouts = layouts_of(scheme, size or -1, has_zeros, dtype)
    with _new_folder(out) as folder:
        writer = ShardWriter(folder)
        rounded: dict[str, int] = {}

        def take(module: str, tensors: Mapping[str, Tensor]) -> None:
            rounded[module] = 8 * sum(each.numel() * each.element_size() for each in tensors.values())
            for parameter, tensor in tensors.items():
                writer.add(f"{module}.{parameter}", tensor)

        rounding = Rounding(
            layouts, *((_MOST_INPUTS, _DAMPING) if texts else (_MOST_INPUTS_MADE_UP, _DAMPING_MADE_UP))
        )
        source = files.source()
        model = _run(files, source, rounding, take, texts, on_layer)
        num_weights = _write_rest(writer, source, model, rounded, dtype)
        writer.finish()
        config |= {"dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        write_json(
            folder / "config.json",
            {**config, "quantization_config": quantization_config(layouts, ["lm_head"])},
        )
        write_tokenizer(files.location, folder)
    return MadeCheckpoint(
        out, size, len(rounded), writer.num_bytes, sum(rounded.values()) / max(num_weights, 1)
    )


def check_new_folder(out: Path) -> None:
    """Refuse a folder that holds something, or a file.

    Raises:
        ConfigError: it is one.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out} is there already and not an empty folder; name another, or remove it first")


def _run(
    files: ModelFiles,
    source: WeightSource,
    rounding: Rounding,
    take: Callable[[str, Mapping[str, Tensor]], None],
    texts: Sequence[Sequence[int]],
    on_layer: Callable[[int, int], None] | None,
) -> Decoder:
    shape = files.shape
    kernels = choose("cpu", "float32", head_dim=shape.head_dim, block_size=_BLOCK_SIZE)
    method = ForCheckpoint(
        kernels, torch.float32, torch.device("cpu"), {"tie_word_embeddings": shape.tie_embeddings},
        files.location.name, rounding=rounding, take=take,
    )  # fmt: skip
    model = Decoder(
        shape, kernels, method, kv_dtype="float32", device=torch.device("cpu"), block_size=_BLOCK_SIZE,
        max_len=max((len(ids) for ids in texts), default=min(shape.max_len, 1024)),
    )  # fmt: skip
    load_while_running(model, WeightLoader(model, source), texts, on_layer)
    return model


def _write_rest(
    writer: ShardWriter, source: WeightSource, model: Decoder, rounded: Container[str], dtype: torch.dtype
) -> int:
    """Write what is not rounded, as floats; how many weights are."""
    num_weights, targets = 0, model.weight_targets()
    for name in source.shapes:
        module, parameter = split_name(name, targets)
        if module in rounded and parameter == "weight":
            num_weights += torch.Size(source.shapes[name]).numel()
        elif module in targets:
            writer.add(name, source.read(name).to(dtype))
    return num_weights


def _checked_group_size(files: ModelFiles, group_size: int | None) -> int:
    shape = files.shape
    inputs = {
        "the hidden size": shape.hidden_size,
        "the attention's outputs": shape.num_heads * shape.head_dim,
        "the intermediate size": shape.intermediate_size,
    }
    for size in GROUP_SIZES if group_size is None else (group_size,):
        bad = [f"{what}, {count}" for what, count in inputs.items() if size < 8 or size % 8 or count % size]
        if not bad:
            return size
    wanted = f"of {group_size}" if group_size is not None else "of any size that is built"
    fitting = [size for size in GROUP_SIZES if not any(count % size for count in inputs.values())]
    hint = f"it does in groups of {', '.join(map(str, fitting))}" if fitting else "take another scheme"
    raise ConfigError(
        f"group_size: {files.location.name} does not divide into groups {wanted} ({bad[0]}); {hint}"
    )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when nothing goes wrong, and is removed otherwise."""
    check_new_folder(out)
    made = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        yield made
        made.chmod(0o755)
        made.rename(out)
    except OSError as error:
        raise SinkError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
