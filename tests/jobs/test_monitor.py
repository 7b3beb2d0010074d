"""What a run's numbers say of the time to go."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from batchgen.engine.messages import EngineRequest, EngineStats
from batchgen.jobs.events import EventLog
from batchgen.jobs.monitor import Monitor
from batchgen.jobs.progress import ProgressState
from batchgen.jobs.tally import Tally
from batchgen.jobs.testing import QuietReporter
from batchgen.jobs.window import Ready, Window
from batchgen.sampling_params import SamplingParams


class Waves:
    """Rows of 100 tokens, 16 at a time, 10 tokens a second each; 200 rows in all, `before` of them done."""

    def __init__(self, folder: Path, before: int = 0) -> None:
        self.now = 0.0
        self.tally = Tally(rows=before, generated_tokens=before * 100)
        self.shown = QuietReporter()
        self.events = EventLog(folder / "events")
        self.monitor = Monitor(
            self.events,
            self.shown,
            self.tally,
            rows_total=200,
            rows_before=before,
            clock=lambda: self.now,
        )
        self.window = Window(32, lambda: self.now)
        for number in range(32):
            row = SimpleNamespace(index=number)
            self.window.admit(
                Ready(
                    row,
                    EngineRequest(request_id=str(number), prompt_token_ids=b"", params=SamplingParams()),
                    1,
                )
            )
        self.generated = 0

    def second(self, finished: int = 0) -> ProgressState:
        """One more second, at whose end so many rows finish."""
        self.now += 1
        self.generated += 160
        self.tally.rows += finished
        self.tally.generated_tokens += 100 * finished
        stats = EngineStats(
            generation_tokens=self.generated, prompt_tokens=500, num_running=16, max_num_seqs=16
        )
        self.monitor.tick(lambda with_map: stats, self.window, now=True)
        return self.shown.states[-1]


@pytest.mark.parametrize("before", [0, 40])
def test_no_time_to_go_before_the_first_wave_and_a_true_one_after(tmp_path: Path, before: int) -> None:
    job = Waves(tmp_path, before)
    for _ in range(9):
        assert job.second().eta_s is None
    assert job.second(finished=1).eta_s is None
    last = job.second(finished=15)
    assert last.generated_tokens_per_s and last.prompt_tokens_per_s is not None
    assert last.eta_s == pytest.approx((200 - before - 16) * 100 / 160, rel=0.15)
    for _ in range(9):
        job.second()
    # In the middle of a wave, with no row finished for long, what is in flight counts.
    assert job.shown.states[-1].eta_s == pytest.approx(last.eta_s - 9, abs=4)
    job.events.close()


def test_a_stop_is_said(tmp_path: Path) -> None:
    job = Waves(tmp_path)
    job.monitor.stopping(job.window, 5.0)
    assert job.shown.lines == ["stopping: up to 5 s for the rows in flight; Ctrl-C again stops at once"]
    assert job.monitor.phase == "draining"
    job.events.close()
