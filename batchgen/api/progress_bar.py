"""ProgressBar: what `generate` and its like show on stderr while they run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchgen.engine.messages import EngineStats
from batchgen.outputs import RequestOutput

if TYPE_CHECKING:
    from tqdm.auto import tqdm

# Seconds between two looks at the numbers: a long text that nothing finishes beside shows that it goes on.
_INTERVAL_S = 0.5


class ProgressBar:
    """Prompts done; when `shows_tokens`, tokens a second, those of unfinished prompts included."""

    def __init__(self, bar: "tqdm[None]", shows_tokens: bool):
        self._bar = bar
        self._shows_tokens = shows_tokens and not bar.disable
        self._num_tokens = 0
        self._tokens_before: int | None = None
        self._next_look = 0.0

    def add(self, output: RequestOutput) -> None:
        """One prompt is done."""
        self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self._write(self._num_tokens)
        self._bar.update()

    def see(self, stats: EngineStats) -> None:
        """Look at the engine's numbers, now and then."""
        now = time.monotonic()
        if not self._shows_tokens or now < self._next_look:
            return
        self._next_look = now + _INTERVAL_S
        if self._tokens_before is None:
            self._tokens_before = stats.generation_tokens
            return
        self._write(max(stats.generation_tokens - self._tokens_before, self._num_tokens))
        self._bar.refresh()

    def _write(self, num_tokens: int) -> None:
        elapsed = self._bar.format_dict["elapsed"] if self._shows_tokens else 0
        if elapsed:
            self._bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)


@contextmanager
def progress_bar(total: int, use_tqdm: bool, unit: str = "prompt") -> Iterator[ProgressBar]:
    """A bar for `total` of `unit`; without any, or without `use_tqdm`, one that shows nothing.

    Only a bar of prompts shows tokens a second; a score generates none that count.
    """
    from tqdm.auto import tqdm

    with tqdm(total=total, disable=not use_tqdm or total == 0, unit=unit, dynamic_ncols=True) as bar:
        yield ProgressBar(bar, shows_tokens=unit == "prompt")
