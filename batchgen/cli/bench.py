"""`batchgen bench`: how fast a model runs on this machine, what bounds it, and where the time goes."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchgen.cli.settings import parse_settings
from batchgen.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.api.bench_report import BenchReport
    from batchgen.api.workload import MadeUp


def bench(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB]", help="A job file: its first rows, its model and settings."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A folder, a .gguf file, a hub id or package:NAME/FILE."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Requests to run: lines of {"prompt_token_ids": [...], "max_tokens": 128}.',
        ),
    ] = None,
    prompts: Annotated[int | None, typer.Option(metavar="N", help="Made-up prompts. Default: 64.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a made-up prompt. Default: 128.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens generated for each. Default: 128.")
    ] = None,
    shared_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of each made-up prompt, the same for all. Default: 0.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only the first N rows (default: 64), requests or prompts."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Engine setting, as in --set quantization=int8; with a job any key of it, as in "
            "--set sampling.max_tokens=16.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the report.")] = False,
) -> None:
    """Measure a model on this machine.

    Tokens a second, the machine's own limits, how much of them was reached, and where the time goes. Without
    a job and without --requests a workload is made up: random tokens, greedy, exact counts.
    """
    made = {"num_prompts": prompts, "prompt_tokens": prompt_tokens}
    made |= {"new_tokens": new_tokens, "shared_tokens": shared_tokens}
    report = _measured(model, job, requests, made, limit, settings or [], quiet=quiet)
    typer.echo(json.dumps(report.to_mapping(), ensure_ascii=False) if as_json else str(report))


def _measured(
    model: str | None,
    job: Path | None,
    requests: Path | None,
    made: dict[str, int | None],
    limit: int | None,
    settings: list[str],
    *,
    quiet: bool,
) -> "BenchReport":
    overrides: list[str] = []
    engine_args: dict[str, Any] = {}
    if job is not None:
        overrides = [each if "." in each.partition("=")[0] else f"engine.{each}" for each in settings]
    else:
        engine_args, sampling = parse_settings(settings)
        if sampling:
            raise ConfigError(
                f"--set sampling.{next(iter(sampling))}: a job says how it samples; all else is greedy"
            )

    from batchgen.api.bench import bench as run_bench

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    given = {name: value for name, value in made.items() if value is not None}
    return run_bench(
        model,
        job=job,
        requests=requests,
        made_up=_made_up(given),
        limit=limit,
        overrides=overrides,
        use_tqdm=not quiet and sys.stderr.isatty(),
        on_phase=say,
        **engine_args,
    )


def _made_up(given: dict[str, int]) -> "MadeUp | None":
    from batchgen.api.workload import MadeUp

    try:
        return MadeUp(**given) if given else None
    except ConfigError as error:
        # The option is spelled otherwise than the argument.
        message = str(error).replace("num_prompts", "--prompts")
        for name in ("prompt_tokens", "new_tokens", "shared_tokens"):
            message = message.replace(name, "--" + name.replace("_", "-"))
        raise ConfigError(message) from error
