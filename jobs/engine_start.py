"""The start of a job's engine: with what the first run decided, its decisions said, logged and stored."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from batchgen.config import Decision
from batchgen.engine.client import EngineClient
from batchgen.engine.messages import EngineInfo
from batchgen.engine.start import start_engine
from batchgen.jobs.events import EventLog
from batchgen.jobs.fingerprint import pinned_engine_args
from batchgen.jobs.manifest import Manifest, json_form, pack_schema
from batchgen.jobs.prepare import PreparedJob
from batchgen.jobs.progress import Reporter

if TYPE_CHECKING:
    from batchgen.engine.child_process import ChildProcess


def start_job_engine(
    job: PreparedJob,
    stored: Manifest | None,
    reporter: Reporter,
    events: EventLog,
    begun: "ChildProcess | None" = None,
) -> EngineClient:
    """Start the engine and say what was decided.

    Args:
        job: the job.
        stored: the first run's manifest, whose decisions hold; None in the first run.
        reporter: told what takes time while it loads, every decision, and every sampling parameter that is
            not the default.
        events: logs what the engine is.
        begun: of `begin_engine`, if it was called.

    Raises:
        ConfigError: a setting that this machine or this model cannot have; nothing was loaded.
        ModelError, CapacityError: the model cannot be loaded.
    """
    pinned = {} if stored is None else pinned_engine_args(stored)
    with job.spec.placing_errors("engine"):
        config = job.config.with_values(**pinned)
        engine = start_engine(config, job.tokenizer, on_loading=reporter.say, begun=begun)
    info = engine.info
    for line in _decisions(job, info, pinned):
        reporter.say(line)
    for name, (value, origin) in job.sampling_with_origins().items():
        if origin != "default":
            reporter.say(f"sampling.{name}={value} ({origin})")
    environment = json_form(dict(info.environment))
    if stored is not None and dict(stored.environment) != environment:
        reporter.say(_other_environment(stored.environment, environment))
    events.put(
        "engine",
        model=info.model,
        architecture=info.architecture,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        reproducible=info.reproducible,
        load_s=info.load_s,
        pid=info.pid,
        decisions=list(info.decisions),
        environment=environment,
    )
    return engine


def _decisions(job: PreparedJob, info: EngineInfo, pinned: Mapping[str, Any]) -> Iterable[str]:
    """A line for each decision; those of the first run are said again, as they hold again."""
    lines = {line.partition("=")[0]: line for line in info.decisions}
    given = job.config.to_engine_args()
    for name, value in pinned.items():
        if value != given[name]:
            lines[name] = str(Decision(name, value, "as in the first run"))
    return lines.values()


def first_manifest(job: PreparedJob, info: EngineInfo | None) -> Manifest:
    """What a first run stores; without an engine (an input without rows) "auto" is left as it is."""
    return Manifest(
        source=job.source.identity(),
        num_rows=job.source.num_rows,
        schema=pack_schema(job.columns.schema),
        schema_text=job.columns.schema.to_string(show_schema_metadata=False),
        shard_rows=job.spec.output.shard_rows,
        fingerprint=job.fingerprint,
        sampling=job.sampling_with_origins(),
        engine=json_form(job.config.to_engine_args() if info is None else dict(info.resolved)),
        environment={} if info is None else json_form(dict(info.environment)),
    )


def _other_environment(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    listed = ", ".join(f"{name} {then.get(name)} → {now.get(name)}" for name in names)
    return f"this is not the kind of machine of the first run ({listed}): rows may differ in their last bits"
