"""first_prompts: the prompts of a job's first rows, for who wants to measure and not to run it."""

from typing import NamedTuple

from batchgen.config import EngineConfig
from batchgen.jobs.prepare import prepare
from batchgen.jobs.row import Row, RowPosition
from batchgen.jobs.spec import JobSpec
from batchgen.outputs import RowFailure
from batchgen.sampling_params import SamplingParams


class FirstPrompts(NamedTuple):
    """What is measured of a job: settings, token ids of each prompt, its adapter, and where adapters lie."""

    config: EngineConfig
    params: SamplingParams
    prompts: list[list[int]]
    adapters: list[str | None]
    adapter_folders: dict[str, str]


def first_prompts(spec: JobSpec, limit: int) -> FirstPrompts:
    """At most `limit` prompts of a job, with all that they are run by.

    Rows without a prompt are passed over. Nothing is written.

    Raises:
        ConfigError, InputError: the job is wrong.
    """
    job = prepare(spec)
    renderer = job.renderer(None)
    prompts: list[list[int]] = []
    adapters: list[str | None] = []
    folders = {name: str(facts.path) for name, facts in job.adapters.items()}
    for batch in job.source.batches(RowPosition(0, 0, 0)):
        for offset in range(len(batch)):
            prompt = renderer.render(Row(batch, offset))
            if not isinstance(prompt, RowFailure):
                prompts.append(prompt.token_ids)
                adapters.append(prompt.adapter)
            if len(prompts) == limit:
                return FirstPrompts(job.config, job.params, prompts, adapters, folders)
    return FirstPrompts(job.config, job.params, prompts, adapters, folders)
