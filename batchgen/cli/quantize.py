"""`batchgen quantize`: a float model -> a folder of weights of few bits that other engines load, too."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def quantize(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id or package:NAME/FILE.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="A new or empty folder, there once it is whole."),
    ],
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            "-s",
            help="int4: weights in groups; int8: weights and activations; fp8: weights as 8-bit floats.",
        ),
    ] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Inputs that share a scale (int4). Default: 128, 64 or 32, as they fit."
        ),
    ] = None,
    zero_points: Annotated[
        bool,
        typer.Option("--zero-points", help="One for each group (int4): better, but fewer kernels take it."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:COLUMN]",
            help="Texts to round the weights for; clearly better than none at 4 bits.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Pieces taken from the data.")] = 128,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens of a piece.")] = 512,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Write a model as a compressed-tensors checkpoint.

    batchgen and transformers load it; with --data it is calibrated on texts of yours.
    """
    from batchgen.api.quantize import quantize as run

    made = run(
        model, output, scheme=scheme, group_size=group_size, zero_points=zero_points, data=data,
        samples=samples, length=length, revision=revision, use_tqdm=not quiet and sys.stderr.isatty(),
    )  # fmt: skip
    if as_json:
        facts = {"folder": str(made.folder), "scheme": scheme, "group_size": made.group_size,
                 "num_layers": made.num_layers, "num_bytes": made.num_bytes,
                 "bits_per_weight": round(made.bits_per_weight, 3)}  # fmt: skip
        typer.echo(json.dumps(facts))
        return
    groups = "" if made.group_size is None else f" in groups of {made.group_size}"
    typer.echo(
        f"{made.folder}: {made.num_bytes / 2**20:.0f} MiB; {made.num_layers} layers in {scheme}{groups}, "
        f"{made.bits_per_weight:.2f} bits a weight; embedding and head as they were\n"
        f"measure it:  batchgen eval-quant {model} --scheme none,{made.folder} --data FILE[:COLUMN]\n"
        f"run it:      batchgen generate --model {made.folder} --prompt 'Once upon a time'"
    )
