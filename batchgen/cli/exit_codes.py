"""What the exit code of a command says."""

from batchgen.errors import BatchgenError, ConfigError, InputError, ResumeError

GOOD = 0  # all rows are good
FAILED = 1  # the job failed
USAGE = 2  # the job file or the command line is wrong; nothing was run
SOME_ROWS_FAILED = 3  # finished; some rows hold an error
INTERRUPTED = 130  # by Ctrl-C; progress is saved
TERMINATED = 143  # by SIGTERM; progress is saved


def of_error(error: BatchgenError) -> int:
    """The exit code of an error that ended a command.

    A job that does not fit its output, or whose output another run holds, counts as usage: nothing was run.
    """
    return USAGE if isinstance(error, ConfigError | InputError | ResumeError) else FAILED
