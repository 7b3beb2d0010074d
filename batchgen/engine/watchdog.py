"""Watchdog: says which requests are concerned when a step takes unreasonably long."""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Watchdog:
    """Watches from a thread of its own; the loop only tells it when a step begins and ends.

    Args:
        describe: names what the step works on; called while the step runs.
        patience_s: a step longer than this is reported, again after every further such time.
    """

    def __init__(self, describe: Callable[[], str], patience_s: float = 60.0):
        self._describe = describe
        self._patience_s = patience_s
        self._since: float | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="batchgen-watchdog", daemon=True).start()

    def begin(self) -> None:
        """A step begins."""
        self._since = time.monotonic()

    def end(self) -> None:
        """The step has ended."""
        self._since = None

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        reported: tuple[float, int] | None = None
        while not self._stopped.wait(self._patience_s / 4):
            since = self._since
            if since is None:
                continue
            times = int((time.monotonic() - since) / self._patience_s)
            if times and reported != (since, times):
                reported = (since, times)
                log.warning(
                    "nothing has moved for %.0f s: one step is still computing %s",
                    time.monotonic() - since,
                    self._describe(),
                )
