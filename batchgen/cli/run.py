"""`batchgen run`: run a job, or go on with it."""

from pathlib import Path
from typing import Annotated

import typer

from batchgen.cli import exit_codes
from batchgen.cli.display import JsonReporter, Style, reporter
from batchgen.errors import BatchgenError


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key, as in --set sampling.temperature=0.2; any number.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Run only the first N rows.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The output folder, in place of the job file's.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over; drops what an earlier run left.")
    ] = False,
    progress: Annotated[
        Style, typer.Option(help="auto: a bar on a terminal, else lines. json: for programs. All on stderr.")
    ] = Style.AUTO,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors.")] = False,
) -> None:
    """Run a model over every row of a dataset.

    The same command again goes on where it was.

    Exit codes: 0 all rows good; 3 finished, some rows hold an error; 1 failed; 2 wrong job file or usage; 130
    or 143 interrupted, progress saved.
    """
    from batchgen.jobs.launch import launch
    from batchgen.jobs.spec import load_spec

    style = Style.NONE if quiet else progress
    shown = reporter(style)
    try:
        spec = load_spec(job, overrides=overrides or (), limit=limit, output=output)
        summary = launch(spec, restart=restart, reporter=shown)
    except BatchgenError as error:
        if not isinstance(shown, JsonReporter):
            raise
        shown.error(str(error), exit_codes.of_error(error))
        raise typer.Exit(exit_codes.of_error(error)) from error
    if isinstance(shown, JsonReporter):
        shown.summary(summary.to_mapping())
    elif style is not Style.NONE:
        typer.echo("\n".join(summary.lines()))
    raise typer.Exit(summary.exit_code)
