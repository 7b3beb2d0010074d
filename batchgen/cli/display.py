"""How a job shows itself on a terminal, in a log file or to a program, and which of these it is."""

import dataclasses
import json
import os
import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from batchgen.jobs.progress import LineReporter, ProgressState, Reporter
from batchgen.quantities import counted

if TYPE_CHECKING:
    from tqdm import tqdm

_JSON_EVERY_S = 1.0
# What stands before and after the rows.
_BAR_HEAD, _BAR_TAIL = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/", " [{elapsed}{postfix}]"


class Style(StrEnum):
    """What `--progress` may be."""

    AUTO = "auto"
    BAR = "bar"
    LOG = "log"
    JSON = "json"
    NONE = "none"


def reporter(style: Style, stream: TextIO | None = None) -> Reporter:
    """The reporter of a style; "auto" is a bar on a terminal that can redraw a line, else lines for a log.

    Args:
        style: see `Style`.
        stream: where to write; by default stderr.
    """
    stream = stream or sys.stderr
    if style is Style.AUTO:
        style = Style.BAR if _can_redraw(stream) else Style.LOG
    if style is Style.BAR:
        return BarReporter(stream)
    if style is Style.JSON:
        return JsonReporter(stream)
    return LineReporter(stream, quiet=style is Style.NONE)


def _can_redraw(stream: TextIO) -> bool:
    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        # Pseudo-terminals that nobody has given a size are 0 by 0; tqdm draws nothing there.
        return os.get_terminal_size(stream.fileno()).lines > 0
    except (OSError, ValueError):
        return True


class BarReporter:
    """A tqdm bar, without colours, under the lines that stay.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._bar: tqdm[Any] | None = None

    def say(self, line: str) -> None:
        """Print the line above the bar."""
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)

    def show(self, state: ProgressState) -> None:
        """Redraw the bar."""
        if state.phase == "loading":
            self.say(state.line())
            return
        if self._bar is None:
            self._bar = self._new_bar(state)
        bar = self._bar
        bar.total, bar.n, bar.bar_format = state.rows_total, state.rows_done, _bar_format(state)
        bar.set_description_str("" if state.phase == "running" else f"{state.phase} ", refresh=False)
        self._fit_postfix(bar, [f"{name} {text}" for name, text in state.numbers().items()])
        bar.refresh()

    @staticmethod
    def _fit_postfix(bar: "tqdm[Any]", parts: list[str]) -> None:
        """Show as many of the parts, from the left, as the line holds beside a bar of ten characters."""
        while True:
            # tqdm puts a comma before the postfix itself.
            bar.set_postfix_str(", ".join(parts), refresh=False)
            drawn = bar.format_dict
            if (
                not parts
                or not drawn["ncols"]
                or len(bar.format_meter(**drawn | {"ncols": None})) <= drawn["ncols"]
            ):
                return
            parts = parts[:-1]

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.close()

    def _new_bar(self, state: ProgressState) -> "tqdm[Any]":
        from tqdm import tqdm

        # No thread that redraws a stalled bar: this one is drawn a few times a second.
        tqdm.monitor_interval = 0
        return tqdm(
            total=state.rows_total,
            initial=state.rows_done,
            bar_format=_bar_format(state),
            file=self._stream,
            dynamic_ncols=True,
        )


def _bar_format(state: ProgressState) -> str:
    if state.rows_total is None:
        return "{desc}" + counted(state.rows_done, "row") + _BAR_TAIL
    return _BAR_HEAD + counted(state.rows_total, "row") + _BAR_TAIL


class JsonReporter:
    """One JSON object a line, for programs: what is said, and the state about once a second.

    Args:
        stream: where.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._phase, self._next = "", 0.0

    def say(self, line: str) -> None:
        """Write {"message": line}."""
        self._write({"message": line})

    def show(self, state: ProgressState) -> None:
        """Write the state's fields when its phase changed or a second has passed."""
        now = time.monotonic()
        if state.phase == self._phase and now < self._next:
            return
        self._phase, self._next = state.phase, now + _JSON_EVERY_S
        self._write(dataclasses.asdict(state))

    def close(self) -> None:
        """Nothing to do."""

    def summary(self, values: dict[str, object]) -> None:
        """Write {"summary": values}, the last line of a run."""
        self._write({"summary": values})

    def error(self, message: str, exit_code: int) -> None:
        """Write {"error": message, "exit_code": exit_code}, the last line of a run that failed."""
        self._write({"error": message, "exit_code": exit_code})

    def _write(self, value: dict[str, object]) -> None:
        print(json.dumps(value, ensure_ascii=False), file=self._stream, flush=True)
