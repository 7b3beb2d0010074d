"""Monitor: turns the state of a run, a few times a second, into ProgressState and events."""

import time
from collections.abc import Callable

from batchgen.engine.messages import EngineStats
from batchgen.jobs.events import EventLog
from batchgen.jobs.progress import ETA_SPAN_S, ProgressState, RateMeter, Reporter
from batchgen.jobs.tally import Tally
from batchgen.jobs.window import Window

_SHOW_EVERY_S = 0.25
_EVENT_EVERY_S = 0.5
_BLOCK_MAP_EVERY_S = 1.0
_NUM_SLOWEST = 5
# Rows finish in waves: before one has passed, or this many and this share are done, nobody can tell the rest.
_LEAST_ROWS = 20
_LEAST_SHARE = 0.05
# How much of a row in flight counts as done at most, as nobody knows how long it gets.
_MOST_OF_A_ROW = 0.75


class Monitor:
    """Watches one run.

    Args:
        events: the event log.
        reporter: shows progress to the user.
        tally: counts over all rows of the output; kept current by the store.
        rows_total: rows of the job, when known.
        rows_before: rows that earlier runs did, of those that count.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        events: EventLog,
        reporter: Reporter,
        tally: Tally,
        *,
        rows_total: int | None,
        rows_before: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._events, self._reporter, self._tally, self._clock = events, reporter, tally, clock
        self._offset = rows_before - tally.rows
        self._rows_before = rows_before
        self._tokens_before = tally.generated_tokens
        self.rows_total = rows_total
        self.phase = "loading"
        self._start = clock()
        self._next_show = self._next_event = self._next_map = self._start
        self._rates, self._eta_rates = RateMeter(clock), RateMeter(clock, ETA_SPAN_S)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start

    def know(self, rows_total: int, rows_done: int) -> None:
        """Take in how many rows the job has, and how many of these are done; earlier ones may lie beyond."""
        self.rows_total = rows_total
        shift = rows_done - self._tally.rows - self._offset
        self._offset += shift
        self._rows_before += shift

    def stopping(self, window: Window, timeout_s: float) -> None:
        """Say at once that a stop was asked for, and what is waited for."""
        self.phase = "draining"
        if window and timeout_s > 0:
            what = f"up to {timeout_s:g} s for the rows in flight; Ctrl-C again stops at once"
            self._reporter.say(f"stopping: {what}")
        else:
            self._reporter.say("stopping")

    def loading(self) -> None:
        """Show that the model loads."""
        self._reporter.show(ProgressState(phase="loading", rows_total=self.rows_total))

    def tick(self, stats: Callable[[bool], EngineStats], window: Window, *, now: bool = False) -> None:
        """Show and log what is due.

        Args:
            stats: gives the engine's snapshot, with the block map if asked; not called when nothing is due.
            window: the rows in flight.
            now: show and log in any case.
        """
        moment = self._clock()
        if not now and moment < self._next_show:
            return
        self._next_show = moment + _SHOW_EVERY_S
        is_event_due = now or moment >= self._next_event
        with_map = is_event_due and moment >= self._next_map
        snapshot = stats(with_map)
        state = self._state(snapshot, len(window))
        self._reporter.show(state)
        if is_event_due:
            self._next_event = moment + _EVENT_EVERY_S
            self._log(state, snapshot, window)
        if with_map and snapshot.block_map is not None:
            self._next_map = moment + _BLOCK_MAP_EVERY_S
            self._events.put("block_map", num_blocks=snapshot.num_blocks, blocks=snapshot.block_map)

    def _eta_s(self, stats: EngineStats, rows_done: int, num_in_flight: int) -> float | None:
        """Tokens to go by the speed of tokens: rows tell too little while most are in flight."""
        self._eta_rates.add(stats.generation_tokens, rows_done)
        tokens_per_s, rows_per_s = self._eta_rates.rates()
        if self.rows_total is None:
            return None
        rows_now, rows_left = rows_done - self._rows_before, max(0, self.rows_total - rows_done)
        wave = min(num_in_flight, stats.max_num_seqs)
        enough = max(_LEAST_ROWS, _LEAST_SHARE * (self.rows_total - self._rows_before))
        if rows_now < max(1, min(wave, enough)):
            return None
        tokens_done = self._tally.generated_tokens - self._tokens_before
        if not tokens_done or not tokens_per_s:
            return rows_left / rows_per_s if rows_per_s else None
        mean = tokens_done / rows_now
        in_flight = max(0, stats.generation_tokens - tokens_done)
        counted = min(in_flight, _MOST_OF_A_ROW * mean * min(num_in_flight, rows_left))
        return (rows_left * mean - counted) / tokens_per_s

    def _state(self, stats: EngineStats, num_in_flight: int) -> ProgressState:
        rows_done = self._tally.rows + self._offset
        self._rates.add(stats.generation_tokens, stats.prompt_tokens, rows_done)
        tokens_per_s, prompt_tokens_per_s, rows_per_s = self._rates.rates()
        queries = stats.prefix_cache_queries
        return ProgressState(
            phase=self.phase,
            rows_total=self.rows_total,
            rows_done=rows_done,
            rows_failed=self._tally.rows_failed,
            rows_before=self._rows_before,
            elapsed_s=self.elapsed_s,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generation_tokens,
            generated_tokens_per_s=tokens_per_s,
            prompt_tokens_per_s=prompt_tokens_per_s,
            rows_per_s=rows_per_s,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            max_num_seqs=stats.max_num_seqs,
            num_preemptions=stats.num_preemptions,
            kv_usage=stats.num_used_blocks / max(1, stats.num_blocks),
            prefix_cache_hit_rate=stats.prefix_cache_hits / queries if queries else None,
            eta_s=self._eta_s(stats, rows_done, num_in_flight),
        )

    def _log(self, state: ProgressState, stats: EngineStats, window: Window) -> None:
        self._events.put(
            "interval",
            phase=state.phase,
            rows_total=state.rows_total,
            rows_done=state.rows_done,
            rows_failed=state.rows_failed,
            rows_before=state.rows_before,
            rows_per_s=state.rows_per_s,
            generated_tokens=state.generated_tokens,
            prompt_tokens=state.prompt_tokens,
            generated_tokens_per_s=state.generated_tokens_per_s,
            prompt_tokens_per_s=state.prompt_tokens_per_s,
            eta_s=state.eta_s,
            elapsed_s=state.elapsed_s,
            num_in_flight=len(window),
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_swapped=stats.num_swapped,
            max_num_seqs=stats.max_num_seqs,
            num_blocks=stats.num_blocks,
            num_used_blocks=stats.num_used_blocks,
            kv_usage=state.kv_usage,
            num_cached_blocks=stats.num_cached_blocks,
            num_pinned_blocks=stats.num_pinned_blocks,
            num_cpu_blocks=stats.num_cpu_blocks,
            num_used_cpu_blocks=stats.num_used_cpu_blocks,
            num_steps=stats.num_steps,
            step_time_s=stats.step_time_s,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            choices=dict(stats.choices),
            finish_reasons=dict(self._tally.finish_reasons),
            failures=dict(self._tally.failures),
            adapters=dict(window.num_finished),
            slowest=[[row, round(seconds, 3)] for row, seconds in window.oldest(_NUM_SLOWEST)],
        )
