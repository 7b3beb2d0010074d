"""first_prompts: the prompts of a job's first rows, for who wants to measure and not to run it."""

from batchgen.config import EngineConfig
from batchgen.jobs.prepare import prepare
from batchgen.jobs.row import Row, RowPosition
from batchgen.jobs.spec import JobSpec
from batchgen.outputs import RowFailure
from batchgen.sampling_params import SamplingParams


def first_prompts(spec: JobSpec, limit: int) -> tuple[EngineConfig, SamplingParams, list[list[int]]]:
    """The engine's settings, the sampling parameters, and the token ids of at most `limit` prompts.

    Rows without a prompt are passed over. Nothing is written.

    Raises:
        ConfigError, InputError: the job is wrong.
    """
    job = prepare(spec)
    renderer = job.renderer(None)
    prompts: list[list[int]] = []
    for batch in job.source.batches(RowPosition(0, 0, 0)):
        for offset in range(len(batch)):
            prompt = renderer.render(Row(batch, offset))
            if not isinstance(prompt, RowFailure):
                prompts.append(prompt.token_ids)
            if len(prompts) == limit:
                return job.config, job.params, prompts
    return job.config, job.params, prompts
