"""run_job: a whole job from a script or a notebook."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.jobs.runner import JobSummary
    from batchgen.jobs.spec import JobSpec


def run_job(
    job: "str | Path | Mapping[str, Any] | JobSpec",
    *,
    overrides: Sequence[str] = (),
    limit: int | None = None,
    output: str | Path | None = None,
    restart: bool = False,
    quiet: bool = False,
) -> "JobSummary":
    """Run a job to its end, or go on with it where it was: what `batchgen run` does.

    Args:
        job: path of a job file, the same as a mapping, or a JobSpec.
        overrides: "section.key=value" strings, as `--set` takes them.
        limit: stop after so many rows.
        output: the output folder, in place of the job's own.
        restart: start over, dropping what an earlier run left.
        quiet: no progress display.

    Raises:
        ConfigError, InputError: the job is wrong; nothing was loaded.
        ResumeError: the output belongs to another job, or another run holds it.
    """
    from batchgen.jobs.launch import launch
    from batchgen.jobs.spec import JobSpec, load_spec

    if isinstance(job, str | Path):
        spec = load_spec(job, overrides=overrides, limit=limit, output=output)
    elif isinstance(job, Mapping):
        spec = JobSpec.from_mapping(job, overrides=overrides, limit=limit, output=output)
    else:
        spec = job.with_overrides(overrides, limit=limit, output=output)
    return launch(spec, restart=restart, quiet=quiet)
