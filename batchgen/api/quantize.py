"""quantize: what `batchgen quantize` does, from a script or a notebook."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.api.text_pieces import text_pieces
from batchgen.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.worker.make_checkpoint import MadeCheckpoint


def quantize(
    model: str,
    output: str | Path,
    *,
    scheme: str = "int4",
    group_size: int | None = None,
    zero_points: bool = False,
    data: str | None = None,
    samples: int = 128,
    length: int = 512,
    revision: str | None = None,
    use_tqdm: bool = True,
) -> "MadeCheckpoint":
    """Round a float model's weights and write them as a folder that batchgen, transformers and vLLM load.

    Without data a scale is searched for each group, and what rounding does to the outputs is taken back as
    far as made-up tokens show how inputs go together. With data they show it (GPTQ), which is clearly better
    at 4 bits.

    Args:
        model: as `LLM` takes it; of a GGUF file too.
        output: the new folder. It appears when all is written; one that holds something is refused.
        scheme: "int4": weights of 4 bits in groups; "int8": weights and activations of 8 bits; "fp8": weights
            as floats of 8 bits.
        group_size: inputs that share a scale of 4 bits; by default 128, 64 or 32, the first that fits.
        zero_points: whether groups of 4 bits have one: a little better, but fewer kernels take it, and
            transformers only with `CompressedTensorsConfig(dequantize=True)`.
        data: "FILE" or "FILE:COLUMN", texts like those that the model will see; see `text_pieces`.
        samples: how many pieces are taken from the data.
        length: tokens of a piece.
        revision: of a hub id.
        use_tqdm: show a progress bar on stderr.

    Raises:
        ConfigError: no such model or scheme, a group size that does not fit, a folder that is not empty.
        InputError: no such data, or not enough of it.
        ModelError: the model cannot be read, or is quantized already.
        SinkError: the folder cannot be written.
    """
    from tqdm.auto import tqdm

    from batchgen.quantization.for_checkpoint import SCHEMES
    from batchgen.tokenizer import load_tokenizer
    from batchgen.worker.make_checkpoint import check_new_folder, make_checkpoint
    from batchgen.worker.model_files import ModelFiles

    _check(scheme, SCHEMES, samples=samples, length=length)
    out = Path(output)
    check_new_folder(out)
    files = ModelFiles(model, revision)
    texts: list[list[int]] = []
    if data is not None:
        encode = load_tokenizer(model, revision=revision).encode
        texts = text_pieces(data, encode, length=min(length, files.shape.max_len), count=samples)
    with tqdm(disable=not use_tqdm, unit="layer", dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return make_checkpoint(
            files, out, scheme, group_size=group_size, has_zeros=zero_points, texts=texts, on_layer=show
        )


def _check(scheme: str, schemes: Sequence[str], **counts: int) -> None:
    if scheme not in schemes:
        raise ConfigError(f"scheme {scheme!r} is not built (built: {', '.join(schemes)})")
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more; got {value}")
