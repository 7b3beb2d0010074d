"""launch: a job from its spec to its summary, with the engine's process begun before anything else."""

from typing import TYPE_CHECKING, Any

from batchgen.engine.start import begin_engine
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.spec import JobSpec

if TYPE_CHECKING:
    from batchgen.jobs.summary import JobSummary


def launch(spec: JobSpec, *, restart: bool = False, **options: Any) -> "JobSummary":
    """Run a job; see `batchgen.jobs.runner.run`.

    A job that has run before may be finished, and is looked at first; any other needs its engine, whose
    process imports torch while this one imports pyarrow and opens the input.
    """
    is_new = restart or not OutputFolder(spec.output_dir).manifest.exists()
    begun = begin_engine(spec.engine_config()) if is_new else None
    try:
        from batchgen.jobs.runner import run

        return run(spec, restart=restart, begun=begun, **options)
    finally:
        if begun is not None:
            begun.kill()
