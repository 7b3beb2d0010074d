"""`batchgen status`: what an output folder holds, derived from the disk alone."""

import json
from pathlib import Path
from typing import Annotated

import typer


def status(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The output folder of a job.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how far a job is, whether or not it is running."""
    from batchgen.jobs.status import status as read_status

    found = read_status(output)
    if as_json:
        typer.echo(json.dumps(found.to_mapping(), ensure_ascii=False))
    else:
        typer.echo("\n".join(found.lines()))
