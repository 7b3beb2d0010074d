import io
import json

import pytest

from batchgen.cli.display import BarReporter, JsonReporter, Style, reporter
from batchgen.jobs.progress import LineReporter, ProgressState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def running(**values: object) -> ProgressState:
    known = {"rows_total": 200, "generated_tokens_per_s": 312.0, "kv_usage": 0.3, "eta_s": 70}
    return ProgressState(phase="running", **(known | values))


@pytest.mark.parametrize(
    ("stream", "term", "kind"),
    [
        (Terminal, "xterm", BarReporter),
        (Terminal, "dumb", LineReporter),  # BS-25
        (Terminal, "", LineReporter),
        (io.StringIO, "xterm", LineReporter),  # a file, or nohup
    ],
)
def test_a_bar_only_where_a_line_can_be_redrawn(
    monkeypatch: pytest.MonkeyPatch, stream: type, term: str, kind: type
) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(reporter(Style.AUTO, stream())) is kind


def test_the_bar_shows_rows_speed_kv_failures_and_time_to_go() -> None:
    terminal = Terminal()
    bar = BarReporter(terminal)
    bar.show(ProgressState(phase="loading"))
    bar.show(running(rows_done=50, rows_failed=2))
    bar.close()
    last = terminal.getvalue().strip("\r\n").split("\r")[-1]
    assert "25%" in last
    assert "50/200 rows" in last
    for word in ("312", "30%", "failed 2", "1m10s"):
        assert word in last


def test_one_row_is_no_rows() -> None:
    terminal = Terminal()
    bar = BarReporter(terminal)
    bar.show(running(rows_total=1, rows_done=0))
    bar.close()
    assert "0/1 row [" in terminal.getvalue()


def test_the_bar_counts_without_a_total() -> None:
    terminal = Terminal()
    bar = BarReporter(terminal)
    bar.show(running(rows_total=None, rows_done=7, eta_s=None))
    bar.close()
    assert "7 rows" in terminal.getvalue()
    assert "%|" not in terminal.getvalue()


def test_what_is_said_stands_above_the_bar() -> None:
    terminal = Terminal()
    bar = BarReporter(terminal)
    bar.say("before")
    bar.show(running(rows_done=1))
    bar.say("between")
    bar.show(running(rows_done=2))
    bar.close()
    lines = [line.split("\r")[-1] for line in terminal.getvalue().split("\n")]
    assert lines[:2] == ["before", "between"]
    assert "2/200" in lines[2]


def test_the_bar_has_no_colours() -> None:  # NO_COLOR has nothing to turn off
    terminal = Terminal()
    bar = BarReporter(terminal)
    bar.show(running(rows_done=1))
    bar.close()
    assert "\x1b" not in terminal.getvalue()


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    shown = JsonReporter(stream)
    shown.say("max_num_seqs=8 (default)")
    shown.show(running(rows_done=1))
    shown.show(running(rows_done=2))  # within the same second
    shown.show(ProgressState(phase="finished", rows_done=200))
    objects = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert objects[0] == {"message": "max_num_seqs=8 (default)"}
    assert [(each["phase"], each["rows_done"]) for each in objects[1:]] == [("running", 1), ("finished", 200)]


def test_quiet_shows_nothing() -> None:
    stream = io.StringIO()
    shown = reporter(Style.NONE, stream)
    shown.say("a decision")
    shown.show(running(rows_done=1))
    shown.close()
    assert stream.getvalue() == ""


def test_a_narrow_bar_leaves_out_numbers_from_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in range(40, 110):
        monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda columns=columns: lambda _: (columns, 24))
        terminal = Terminal()
        bar = BarReporter(terminal)
        bar.show(running(rows_done=1, rows_failed=1))
        bar.close()
        last = terminal.getvalue().rstrip("\r\n").split("\r")[-1]
        assert len(last) <= columns
        assert last.endswith("]")
        assert not last.endswith((",]", ", ]"))
        assert ("tok/s" in last) == (columns >= 46)
    assert "eta 1m10s, failed 1, kv 30%" in last
