"""run: one job from its spec to its shards."""

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from batchgen.errors import BatchgenError, EngineError, ResumeError, SinkError
from batchgen.jobs.adapters import load_adapters
from batchgen.jobs.atomic import Disk
from batchgen.jobs.control import ControlServer
from batchgen.jobs.engine_start import first_manifest, start_job_engine
from batchgen.jobs.events import EventLog
from batchgen.jobs.feeder import RowFeeder
from batchgen.jobs.fingerprint import check_same_job
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.lock import OutputLock
from batchgen.jobs.manifest import Manifest
from batchgen.jobs.monitor import Monitor
from batchgen.jobs.output_state import (
    display_path,
    make_folders,
    read_source_rows,
    refuse_strangers,
    start_over,
    write_source_rows,
)
from batchgen.jobs.prepare import PreparedJob, prepare
from batchgen.jobs.progress import LineReporter, Reporter
from batchgen.jobs.requests import RequestMaker
from batchgen.jobs.row_loop import RowLoop, check_conserved
from batchgen.jobs.row_reader import RowReader
from batchgen.jobs.spec import JobSpec
from batchgen.jobs.stopping import Interrupted, StopFlag
from batchgen.jobs.store import ShardStore
from batchgen.jobs.summary import JobSummary
from batchgen.quantities import counted
from batchgen.sampling_checks import check_engine_limits
from batchgen.version import __version__

if TYPE_CHECKING:
    from batchgen.engine.child_process import ChildProcess

__all__ = ["JobRunner", "JobSummary", "run"]

_RENDER_THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))


def run(
    spec: JobSpec,
    *,
    restart: bool = False,
    quiet: bool = False,
    stop: StopFlag | None = None,
    reporter: Reporter | None = None,
    disk: Disk | None = None,
    begun: "ChildProcess | None" = None,
) -> JobSummary:
    """Run a job, or go on with it where an earlier run ended; without the model when all is done.

    In the main thread, SIGINT and SIGTERM are taken as in DESIGN: the first lets rows in flight finish for a
    while, the second stops at once; both leave a consistent output and end here with a summary.

    Args:
        spec: the job.
        restart: remove what earlier runs wrote to this output first.
        quiet: no lines on stderr, when no `reporter` is given.
        stop: asks for an end from another thread.
        reporter: shows progress; by default lines on stderr.
        disk: the hand that writes.
        begun: of `begin_engine`; without one the engine's process is started when it is needed.

    Raises:
        ConfigError, InputError: the job is wrong; found before the model loads.
        ResumeError: the output holds rows of another job, or another run has it.
        ModelError, CapacityError: the model cannot be loaded.
        EngineError: the engine died; finished rows are committed.
        SinkError: the output cannot be written; what was committed before is kept.
    """
    stop = stop or StopFlag()
    reporter = reporter or LineReporter(quiet=quiet)
    runner = JobRunner(spec, stop, reporter, disk or Disk(), begun)
    try:
        with stop.handling_signals():
            return runner.run(restart)
    finally:
        reporter.close()


class JobRunner:
    """One run of one job; see `run`."""

    def __init__(
        self, spec: JobSpec, stop: StopFlag, reporter: Reporter, disk: Disk, begun: "ChildProcess | None"
    ):
        self._spec, self._stop, self._reporter, self._disk = spec, stop, reporter, disk
        self._begun = begun
        self._folder = OutputFolder(spec.output_dir)
        self._started = time.monotonic()

    def run(self, restart: bool) -> JobSummary:
        """Run, and clean up whatever happens."""
        with ExitStack() as stack:
            try:
                with self._stop.raising():
                    stored = None if restart else Manifest.read(self._folder)
                    job = prepare(self._spec, stored)
                    make_folders(self._folder, self._disk)
                    lock = stack.enter_context(OutputLock(self._folder.lock))
                    if lock.dead_holder is not None:
                        self._reporter.say(f"the run before ({lock.dead_holder}) ended without a word")
                    stored = self._settle(job, restart)
                    store = self._open_store(job, stored)
                    reader = RowReader(job.source, store, self._spec.limit)
                    has_rows = reader.peek()
            except Interrupted:
                return self._stopped_early()
            if not has_rows:
                if stored is None:
                    # An input without rows: the engine, which decides what is "auto", is not needed.
                    first_manifest(job, None).write(self._folder, self._disk)
                return self._finished_before(store, reader)
            return self._run_rows(stack, job, stored, store, reader)

    def _settle(self, job: PreparedJob, restart: bool) -> Manifest | None:
        """Make sure that the output is ours to write; the first run's manifest, if there was one."""
        if restart:
            start_over(self._folder, self._disk, self._reporter.say)
        stored = Manifest.read(self._folder)
        if stored is None:
            refuse_strangers(self._folder)
            return None
        try:
            job.source.verify(stored.source)
        except ResumeError as error:
            raise ResumeError(
                f"{error}\n{display_path(self._folder.root)} holds rows of the first run's input: restore "
                f"it, choose another output, or start over with --restart (removes these rows)"
            ) from None
        check_same_job(stored, job.fingerprint, display_path(self._folder.root), job.config.model.model)
        return stored

    def _open_store(self, job: PreparedJob, stored: Manifest | None) -> ShardStore:
        shard_rows = self._spec.output.shard_rows if stored is None else stored.shard_rows
        if shard_rows != self._spec.output.shard_rows:
            self._reporter.say(f"output.shard_rows stays {shard_rows:,}, as in the first run")
        return ShardStore(self._folder, job.columns, shard_rows, disk=self._disk, say=self._reporter.say)

    def _run_rows(
        self,
        stack: ExitStack,
        job: PreparedJob,
        stored: Manifest | None,
        store: ShardStore,
        reader: RowReader,
    ) -> JobSummary:
        events = EventLog(self._folder.events)
        stack.callback(events.close)
        control = self._open_control(stack)
        rows_total = self._rows_total(job.source.num_rows, reader)
        rows_before = store.tally.rows if rows_total is None else store.count_done_before(rows_total)
        monitor = Monitor(events, self._reporter, store.tally, rows_total=rows_total, rows_before=rows_before)
        events.put(
            "run", pid=os.getpid(), version=__version__, rows_total=rows_total, rows_before=rows_before
        )
        monitor.loading()
        try:
            with self._stop.raising():
                engine = start_job_engine(job, stored, self._reporter, events, self._begun)
                stack.callback(engine.shutdown)
                with self._spec.placing_errors("sampling"):
                    check_engine_limits(job.params, engine.info)
                load_adapters(self._spec, job.adapters, engine, self._reporter, events)
                if stored is None:
                    first_manifest(job, engine.info).write(self._folder, self._disk)
        except Interrupted:
            return self._stopped_early(store)
        make = RequestMaker(job.renderer(engine.info.max_model_len), job.params)
        feeder = RowFeeder(reader, make, _RENDER_THREADS)
        stack.callback(feeder.close)
        loop = RowLoop(
            feeder,
            engine,
            store,
            stop=self._stop,
            monitor=monitor,
            events=events,
            control=control,
            num_samples=job.params.num_samples,
            max_adapters=engine.info.resolved.get("max_loras"),
            commit_interval_s=self._spec.output.commit_interval_s,
            drain_timeout_s=self._spec.output.drain_timeout_s,
        )
        self._run_loop(loop, store)
        if not self._stop.is_set:
            check_conserved(feeder.num_taken, loop.num_appended)
            self._end_rows(store, reader)
        store.commit()
        summary = replace(self._summary(store, reader, rows_now=loop.num_appended), adapters=loop.adapters)
        events.put("end", exit_code=summary.exit_code, rows_done=summary.rows_done, adapters=summary.adapters)
        return summary

    def _run_loop(self, loop: RowLoop, store: ShardStore) -> None:
        """Run the rows. After an error what is finished is committed, unless the output is what fails."""
        try:
            loop.run()
        except SinkError:
            raise
        except EngineError as error:
            store.commit()
            # A SIGTERM to the whole group has ended the engine too: that is the stop that was asked for.
            if not self._stop.is_set:
                raise EngineError(f"{error}\n{self._kept(store)}") from error
        except BatchgenError:
            store.commit()
            raise

    def _open_control(self, stack: ExitStack) -> ControlServer | None:
        try:
            control = ControlServer(self._folder.root)
        except OSError as error:
            self._reporter.say(f"no control socket ({error}): pause and set are not to be had in this run")
            return None
        stack.callback(control.close)
        return control

    def _rows_total(self, num_rows: int | None, reader: RowReader | None) -> int | None:
        """Rows that the job is to do, its limit applied; None as long as nobody has seen so many."""
        known = read_source_rows(self._folder) if num_rows is None else num_rows
        if known is None:
            return None if reader is None else reader.rows_total
        return known if self._spec.limit is None else min(self._spec.limit, known)

    def _end_rows(self, store: ShardStore, reader: RowReader) -> None:
        if reader.num_rows is not None:
            write_source_rows(self._folder, self._disk, reader.num_rows)
        total = reader.num_rows if reader.num_rows is not None else self._spec.limit
        if total is not None:
            store.end_at(total)

    def _finished_before(self, store: ShardStore, reader: RowReader) -> JobSummary:
        self._end_rows(store, reader)
        store.commit()
        return replace(self._summary(store, reader, rows_now=0), was_finished=True)

    def _stopped_early(self, store: ShardStore | None = None) -> JobSummary:
        if store is not None:
            return self._summary(store, None, rows_now=0)
        root = display_path(self._folder.root)
        return JobSummary(
            output=root, rows_total=None, rows_done=0, rows_failed=0, rows_now=0, stopped=self._stop.exit_code
        )

    def _summary(self, store: ShardStore, reader: RowReader | None, *, rows_now: int) -> JobSummary:
        total = self._rows_total(None if reader is None else reader.num_rows, reader)
        # What an earlier run did beyond this one's limit is no part of it.
        end = self._spec.limit if total is None else total
        tally = store.tally if end is None else store.tally_before(end)
        return JobSummary(
            output=display_path(self._folder.root),
            rows_total=total,
            rows_done=tally.rows,
            rows_failed=tally.rows_failed,
            rows_now=rows_now,
            failures=dict(tally.failures),
            finish_reasons=dict(tally.finish_reasons),
            input_tokens=tally.input_tokens,
            generated_tokens=tally.generated_tokens,
            elapsed_s=time.monotonic() - self._started,
            stopped=self._stop.exit_code if self._stop.is_set else None,
        )

    def _kept(self, store: ShardStore) -> str:
        return (
            f"{counted(store.tally.rows, 'finished row')} kept in {display_path(self._folder.root)}; "
            f"run the same command again to go on"
        )
