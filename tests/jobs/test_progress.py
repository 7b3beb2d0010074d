"""The words for a job's progress."""

import io

from batchgen.jobs.progress import LineReporter, ProgressState, RateMeter


def test_line() -> None:
    state = ProgressState(
        phase="running",
        rows_total=10_000,
        rows_done=1234,
        rows_failed=2,
        generated_tokens_per_s=6.04,
        kv_usage=0.314,
        eta_s=61,
    )
    assert state.line() == "running: 1,234/10,000 rows, tok/s 6.0, eta 1m01s, failed 2, kv 31%"
    assert ProgressState(phase="running", rows_done=1).line() == "running: 1 row, kv 0%"
    early = ProgressState(phase="running", rows_total=1, generated_tokens_per_s=12, prompt_tokens_per_s=34)
    assert early.line() == "running: 0/1 row, tok/s 12, prompt tok/s 34, kv 0%"
    assert ProgressState(phase="loading").line() == "starting the engine"


def test_rates_are_means_over_the_last_seconds() -> None:
    now = 0.0
    meter = RateMeter(lambda: now)
    meter.add(0, 0)
    assert meter.rates() == (None, None)
    for _ in range(100):
        now += 1
        meter.add(int(now * 10) if now <= 50 else 500, int(now))
    assert meter.rates() == (0.0, 1.0)


def test_lines_come_when_the_phase_changes_and_never_hold_control_codes() -> None:
    # BS-25: no floods, no carriage returns in log files.
    stream = io.StringIO()
    reporter = LineReporter(stream)
    for done in range(100):
        reporter.show(ProgressState(phase="running", rows_done=done))
    reporter.show(ProgressState(phase="draining", rows_done=100))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    quiet = io.StringIO()
    LineReporter(quiet, quiet=True).say("a line")
    assert quiet.getvalue() == ""
