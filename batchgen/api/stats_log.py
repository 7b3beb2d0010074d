"""StatsLog: one line of the engine's numbers per interval, at INFO."""

import logging
import time

from batchgen.engine.messages import EngineStats

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatsLog:
    """Writes a line when an interval is over. Rates are those of the interval, counts those of the moment.

    Args:
        is_disabled: `disable_log_stats`.
        interval_s: least time between two lines.
    """

    def __init__(self, is_disabled: bool, interval_s: float = INTERVAL_S):
        self._is_disabled = is_disabled
        self._interval_s = interval_s
        self._last: EngineStats | None = None
        self._last_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether `see` would do something."""
        is_early = self._last is not None and time.monotonic() - self._last_s < self._interval_s
        return not (self._is_disabled or is_early)

    def see(self, stats: EngineStats) -> None:
        """Take in a snapshot; nothing happens before a line is due."""
        if not self.is_due:
            return
        now = time.monotonic()
        # After a pause between two calls the rates would be those of doing nothing: begin anew.
        if self._last is not None and now - self._last_s < 3 * self._interval_s:
            log.info("%s", stats_line(self._last, stats, now - self._last_s))
        self._last, self._last_s = stats, now


def stats_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """The numbers of an interval in one line.

    Args:
        before: snapshot at its beginning.
        now: snapshot at its end.
        seconds: how long it was.
    """
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    parts = [
        f"running {now.num_running}, waiting {now.num_waiting}, swapped {now.num_swapped}",
        f"prompt {prompt:.1f} tokens/s, generation {generated:.1f} tokens/s",
        f"KV cache {_percent(now.num_used_blocks, now.num_blocks)} used",
    ]
    queried = now.prefix_cache_queries - before.prefix_cache_queries
    if queried:
        hits = now.prefix_cache_hits - before.prefix_cache_hits
        parts.append(f"prefix cache {_percent(hits, queried)} hits")
    if now.num_preemptions:
        parts.append(f"preemptions {now.num_preemptions}")
    drafted = now.num_draft_tokens - before.num_draft_tokens
    if drafted:
        accepted = now.num_accepted_tokens - before.num_accepted_tokens
        parts.append(f"speculation {_percent(accepted, drafted)} of {drafted} drafts accepted")
    return "; ".join(parts)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
