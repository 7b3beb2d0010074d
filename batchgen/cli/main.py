"""The `batchgen` command: its commands, and how their errors become messages and exit codes."""

import sys
import traceback
from typing import Annotated, NoReturn

import typer

from batchgen.cli import exit_codes
from batchgen.cli.bench import bench
from batchgen.cli.generate import generate
from batchgen.cli.run import run
from batchgen.cli.status import status
from batchgen.errors import BatchgenError

app = typer.Typer(
    name="batchgen",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(status)
app.command()(generate)
app.command()(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        from batchgen.version import __version__

        typer.echo(f"batchgen {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run a language model over every row of a dataset."""


def main() -> NoReturn:
    """Run the command that the arguments name, and exit with one of `exit_codes`.

    What goes wrong on purpose, a `BatchgenError`, is one message without a traceback. Anything else is a
    mistake of ours and shows where it happened.
    """
    try:
        app(prog_name="batchgen")
    except BatchgenError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(exit_codes.of_error(error))
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    except Exception:
        traceback.print_exc()
        typer.echo("error: this is a mistake in batchgen, not in what you asked for", err=True)
        sys.exit(exit_codes.FAILED)
    sys.exit(exit_codes.GOOD)


if __name__ == "__main__":
    main()
