"""RowLoop: the one loop that joins rows and engine."""

import time
from collections.abc import Callable

from batchgen.engine.client import EngineClient
from batchgen.engine.messages import Limits
from batchgen.errors import BatchgenError, InputError
from batchgen.jobs.adapter_turns import AdapterTurns
from batchgen.jobs.control import ControlServer
from batchgen.jobs.events import EventLog
from batchgen.jobs.feeder import RowFeeder
from batchgen.jobs.logprob_arrays import flat
from batchgen.jobs.monitor import Monitor
from batchgen.jobs.row import RowResult, Sample
from batchgen.jobs.stopping import StopFlag
from batchgen.jobs.store import ShardStore
from batchgen.jobs.window import Ready, Window
from batchgen.outputs import RequestOutput

# Requests in flight for each one that can run: enough that the engine never waits for this process.
_ROWS_PER_SEQ = 2
_LEAST_ROWS = 8
# Rows that may be read beyond one that waits for its adapter's turn, for each that may be in flight.
_ROWS_AHEAD = 4
# Takes from the feeder between two looks at signals and clocks, where rows fail faster than the window fills.
_MAX_TAKES = 64
# The longest wait for the engine: how late a signal, a command or a commit may be noticed.
_POLL_S = 0.1
# The wait while rows are still being rendered and the engine has room for them.
_SHORT_POLL_S = 0.01


class RowLoop:
    """Feeds rows to the engine and results to the store, until all are done or a stop is asked for.

    Args:
        feeder: gives rows.
        engine: runs them.
        store: keeps results.
        stop: asks for an end.
        monitor: shows and logs.
        events: the event log.
        control: brings commands, or None where there is no socket.
        num_samples: sequences a row needs (`n`, or `best_of`).
        max_adapters: adapters in flight at once; None: any number.
        commit_interval_s: seconds between commits.
        drain_timeout_s: seconds that rows in flight get once a stop is asked for.
    """

    def __init__(
        self,
        feeder: RowFeeder,
        engine: EngineClient,
        store: ShardStore,
        *,
        stop: StopFlag,
        monitor: Monitor,
        events: EventLog,
        control: ControlServer | None = None,
        num_samples: int = 1,
        max_adapters: int | None = None,
        commit_interval_s: float = 5.0,
        drain_timeout_s: float = 5.0,
    ):
        self._feeder, self._engine, self._store = feeder, engine, store
        self._stop, self._monitor, self._events, self._control = stop, monitor, events, control
        self._num_samples = num_samples
        self._commit_interval_s, self._drain_timeout_s = commit_interval_s, drain_timeout_s
        self._window, self._turns = Window(0), AdapterTurns(max_adapters)
        self._is_paused = False
        self._next_commit = 0.0
        self.num_appended = 0

    @property
    def adapters(self) -> dict[str, int]:
        """Adapter -> rows of it that are done."""
        return dict(self._window.num_finished)

    def run(self) -> None:
        """Run until everything is committed, or a stop is asked for and what could finish is committed.

        Raises:
            EngineError, InputError, SinkError: finished rows may still be pending in the store.
        """
        self._size_window(self._engine.stats().max_num_seqs)
        self._next_commit = time.monotonic() + self._commit_interval_s
        self._monitor.phase = "running"
        while not self._stop.is_set:
            self._obey()
            try:
                self._admit()
            except InputError:
                # The source broke off: what was read before is finished first.
                self._drain(sends=True)
                raise
            if self._feeder.is_exhausted and not self._window and not self._turns:
                break
            self._collect(self._poll_s())
            self._commit_if_due()
            self._learn_total()
            self._monitor.tick(self._engine.stats, self._window)
        if self._stop.is_set:
            self._monitor.stopping(self._window, 0 if self._is_paused else self._drain_timeout_s)
            self._drain()
        # Where reading ended after the last row was collected, no turn of the loop came after it.
        self._learn_total()
        self._monitor.tick(self._engine.stats, self._window, now=True)

    def _learn_total(self) -> None:
        """Tell the monitor how many rows there are, once reading came to their end."""
        if self._monitor.rows_total is None and (total := self._feeder.rows_total) is not None:
            self._monitor.know(total, self._store.count_done_before(total))

    def _drain(self, *, sends: bool = False) -> None:
        """Let rows in flight finish, for a while; those of a paused engine never would.

        Args:
            sends: those that wait for their adapter's turn too.
        """
        self._monitor.phase = "draining"
        self._events.put("draining", num_in_flight=len(self._window))
        deadline = time.monotonic() + self._drain_timeout_s
        while not self._is_paused and not self._stop.is_urgent:
            if sends:
                self._send()
            if not self._window:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._collect(min(left, _POLL_S))
            self._monitor.tick(self._engine.stats, self._window)

    def _admit(self) -> None:
        """Fill the window; rows that failed before the engine are results already."""
        if self._is_paused:
            return
        for _ in range(_MAX_TAKES):
            self._send()
            room = self._turns.room(self._window.room)
            # With an idle engine there is nothing else to wait for.
            wait_s = 0.0 if self._window else _POLL_S
            items = self._feeder.take(room, wait_s) if room else []
            if not items:
                return
            for item in items:
                if isinstance(item, Ready):
                    self._turns.put(item)
                else:
                    self._append(item)
            self._commit_if_due()
        self._send()

    def _send(self) -> None:
        """Hand rows that are ready to the engine, as many as may be in flight."""
        while self._window.room and (ready := self._turns.next()) is not None:
            self._engine.add(self._window.admit(ready))

    def _poll_s(self) -> float:
        has_room = self._turns.room(self._window.room) > 0
        is_hungry = has_room and not self._feeder.is_exhausted and not self._is_paused
        return _SHORT_POLL_S if is_hungry else _POLL_S

    def _collect(self, timeout_s: float) -> None:
        if not self._window:
            if self._is_paused:
                time.sleep(timeout_s)
            return
        for output in self._engine.poll(timeout_s):
            if output.finished:
                ready = self._window.finish(output.request_id)
                self._turns.finish(ready)
                self._append(_result(ready, output))

    def _append(self, result: RowResult) -> None:
        self._store.append(result)
        self.num_appended += 1

    def _commit_if_due(self) -> None:
        if time.monotonic() < self._next_commit and not self._store.is_full:
            return
        self._store.commit()
        self._next_commit = time.monotonic() + self._commit_interval_s

    def _size_window(self, max_num_seqs: int) -> None:
        self._window.capacity = max(_LEAST_ROWS, _ROWS_PER_SEQ * max_num_seqs // self._num_samples)
        self._turns.most_ahead = _ROWS_AHEAD * self._window.capacity

    def _obey(self) -> None:
        for command in self._control.take() if self._control is not None else ():
            self._events.put("command", command=command.name, **dict(command.settings))
            if command.name == "stop":
                self._stop.request()
            elif command.name == "set":
                limits = Limits(**dict(command.settings))
                self._engine.set_limits(limits)
                self._size_window(limits.max_num_seqs or self._window.capacity)
            elif command.name in ("pause", "resume"):
                self._is_paused = command.name == "pause"
                act: Callable[[], None] = self._engine.pause if self._is_paused else self._engine.resume
                act()
                self._monitor.phase = "paused" if self._is_paused else "running"


def check_conserved(num_read: int, num_appended: int) -> None:
    """Check that every row that was read has one result.

    Raises:
        BatchgenError: rows were lost or doubled on their way; a fault of batchgen.
    """
    if num_read != num_appended:
        raise BatchgenError(
            f"rows read: {num_read}, written: {num_appended}; a fault of batchgen, please report it"
        )


def _result(ready: Ready, output: RequestOutput) -> RowResult:
    samples = tuple(
        Sample(
            sample.text,
            str(sample.finish_reason),
            len(sample.token_ids),
            flat(sample.logprobs),
            sample.valid,
        )
        for sample in output.outputs
    )
    return RowResult(
        ready.row,
        samples,
        ready.num_input_tokens,
        output.error,
        ready.warnings,
        flat(output.prompt_logprobs),
    )
