"""The `batchgen` command: its commands, and how their errors become messages and exit codes."""

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from batchgen.cli import exit_codes
from batchgen.cli.bench import bench
from batchgen.cli.eval_quant import eval_quant
from batchgen.cli.generate import generate
from batchgen.cli.quantize import quantize
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
app.command()(quantize)
app.command("eval-quant")(eval_quant)


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
        typer.echo("interrupted", err=True)
        sys.exit(exit_codes.INTERRUPTED)
    except OSError as error:
        # What names a file, or leaves standard output as it was, is none of its errors.
        if error.filename is not None or _can_write_output():
            _own_mistake()
        typer.echo(f"error: cannot write to standard output: {error.strerror}", err=True)
        sys.exit(exit_codes.FAILED)
    except Exception:
        _own_mistake()
    sys.exit(exit_codes.GOOD)


def _own_mistake() -> NoReturn:
    traceback.print_exc()
    typer.echo("error: this is a mistake in batchgen, not in what you asked for", err=True)
    sys.exit(exit_codes.FAILED)


def _can_write_output() -> bool:
    try:
        # Nothing would be written by writing nothing, nor would anybody notice a full disk.
        os.write(sys.stdout.fileno(), b"\n")
        return True
    except OSError:
        # The interpreter would try once more as it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


if __name__ == "__main__":
    main()
