"""`batchgen eval-quant`: what schemes of quantization do to a model: its texts, its memory and its speed."""

import json
from pathlib import Path
from typing import Annotated

import typer

from batchgen.cli.settings import parse_settings
from batchgen.errors import ConfigError, SinkError


def eval_quant(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id or package:NAME/FILE.")],
    data: Annotated[
        str, typer.Option(metavar="FILE[:COLUMN]", help="Texts to measure with, as jobs read files.")
    ],
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            "-s",
            help="With commas between: none, int8, fp8, int4, gguf, or a folder with another form of it.",
        ),
    ] = "none,int8,fp8,int4",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="With commas between; each scheme is measured with each. Default: its own.")
    ] = "",
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of the data at most.")] = 8192,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens of a piece; each begins anew.")] = 512,
    picture: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.svg", help="Draw a picture, too.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Engine setting, the same for all schemes."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the report.")] = False,
) -> None:
    """Measure quantization schemes beside the float model.

    Perplexity, divergence, greedy agreement, memory and speed, as a table, JSON or a picture.
    """
    engine_args, sampling = parse_settings(settings or [])
    if sampling:
        raise ConfigError("--set sampling.…: nothing is sampled here; leave it out")
    for name in ("quantization", "kv_cache_dtype"):
        if name in engine_args:
            option = "scheme" if name == "quantization" else "kv-cache-dtype"
            raise ConfigError(f"--set {name}: say it by --{option}")
    if picture is not None and picture.suffix != ".svg":
        raise ConfigError(f"--output {picture}: the picture is an SVG; name it FILE.svg")

    from batchgen.api.eval_picture import draw
    from batchgen.api.eval_quant import eval_quant as run

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    report = run(
        model, _names(scheme), data, kv_cache_dtypes=_names(kv_cache_dtype), tokens=tokens, length=length,
        on_phase=say, **engine_args,
    )  # fmt: skip
    typer.echo(json.dumps(report.to_mapping(), ensure_ascii=False) if as_json else str(report))
    if picture is not None:
        try:
            picture.write_text(draw(report), encoding="utf-8")
        except OSError as error:
            raise SinkError(f"{picture}: cannot be written: {error.strerror}") from error
        say(f"drawn: {picture}")


def _names(given: str) -> list[str]:
    return [each.strip() for each in given.split(",") if each.strip()]
