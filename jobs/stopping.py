"""StopFlag: how a running job is asked to stop, by a signal, a command or another thread."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal that came where nothing needs to be brought to an end."""


class StopFlag:
    """Asked once: let rows in flight finish. Asked twice: stop at once. May be asked from any thread.

    Attributes:
        signal: number of the first signal, SIGINT for a request without one; None while nobody asked.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._times = 0
        self._is_raising = False

    @property
    def is_set(self) -> bool:
        """Whether the job is to end."""
        return self._times > 0

    @property
    def is_urgent(self) -> bool:
        """Whether it is to end at once."""
        return self._times > 1

    @property
    def exit_code(self) -> int:
        """128 and the signal's number."""
        return 128 + (self.signal or signal.SIGINT)

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask to stop."""
        self.signal = self.signal or number
        self._times += 1

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a request by a signal raises Interrupted: for work that has nothing to save.

        Raises:
            Interrupted: also on entering, when the flag is set.
        """
        if self.is_set:
            raise Interrupted
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM ask to stop, and a third one ends the process the hard way.

        Does nothing outside the main thread, where Python gives no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(number)
        if self.is_urgent:
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_DFL)
        if self._is_raising:
            raise Interrupted
