"""bench: how fast the user's own model runs on this machine, what bounds it, and where the time goes."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from batchgen.api.batch_runner import BatchRunner
from batchgen.api.bench_report import BenchReport
from batchgen.api.caller import Caller
from batchgen.api.progress_bar import progress_bar
from batchgen.api.prompt_forms import Read
from batchgen.api.stats_log import StatsLog
from batchgen.api.workload import MadeUp, Workload, exact, from_file, of_job
from batchgen.engine.client import EngineClient
from batchgen.engine.messages import pack_ids
from batchgen.errors import ConfigError, InputError
from batchgen.outputs import RequestOutput

log = logging.getLogger(__name__)

# Rows of a job that are measured if nobody says how many.
_JOB_ROWS = 64
# A prompt that no workload begins with: it wakes every kernel and primes no prefix.
_WARM_UP = [Read(None, pack_ids([7 + number] * (8 + number))) for number in range(8)]


def bench(
    model: str | None = None,
    *,
    job: str | Path | None = None,
    requests: str | Path | None = None,
    made_up: MadeUp | None = None,
    limit: int | None = None,
    overrides: list[str] | None = None,
    use_tqdm: bool = True,
    on_phase: Callable[[str], None] | None = None,
    in_process: bool = False,
    **engine_args: Any,
) -> BenchReport:
    """Run a workload and measure it: the rates, the machine's ceilings, the bound that they set, the parts.

    A few tokens are generated first, untimed. The machine is measured before and after the run and every half
    second of it; that time is left out.

    Args:
        model: as `LLM` takes it; with a job, the job's own.
        job: a job file, whose first rows are the workload.
        requests: a file of lines {"prompt_token_ids": [...], "max_tokens": 128}.
        made_up: how a made-up workload looks; that is what runs without `job` and `requests`.
        limit: only the first so many rows, requests or made-up prompts.
        overrides: "section.key=value" strings for the job.
        use_tqdm: show a progress bar on stderr.
        on_phase: called with what is about to be done: loading, warming up, measuring, running. Without it
            this goes to the log.
        in_process: run the engine in this process instead of in a child.
        **engine_args: the engine arguments of `batchgen.config`, in place of the job's.

    Raises:
        ConfigError, InputError: the workload or an argument is wrong, or no request could be run.
        ModelError, CapacityError: the model cannot be loaded.
    """
    if (job is not None) + (requests is not None) + (made_up is not None) > 1:
        raise ConfigError("a job, a file of requests and a made-up workload: choose one of them")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be 1 or more; got {limit!r}")
    workload = None if requests is None else from_file(Path(requests), limit)
    placing: AbstractContextManager[None] = nullcontext()
    if job is not None:
        found = of_job(Path(job), overrides or (), limit or _JOB_ROWS)
        workload, placing = found.workload, found.placing_errors("engine")
        model, engine_args = model or found.model, {**found.engine_args, **engine_args}
    elif overrides:
        raise ConfigError("overrides are those of a job; give one")
    if model is None:
        raise ConfigError("name a model, or a job that names one")
    caller = Caller("bench", model, engine_args, begins=not in_process)
    with placing:
        engine = caller.start(in_process, on_loading=on_phase)
    try:
        workload = workload or (made_up or MadeUp()).make(engine.info.vocab_size, limit)
        return _measure(caller, engine, workload, use_tqdm, on_phase or log.info)
    finally:
        engine.shutdown()


def _measure(
    caller: Caller,
    engine: EngineClient,
    workload: Workload,
    use_tqdm: bool,
    say: Callable[[str], None],
) -> BenchReport:
    caller.check(workload.params, engine.info)
    for name, folder in workload.adapter_folders.items():
        engine.load_adapter(name, folder)
    say("warming up")
    runner = BatchRunner(engine, StatsLog(is_disabled=True))
    warm = [caller.request(prompt, exact(4)) for prompt in _WARM_UP]
    with progress_bar(0, False) as bar:
        runner.run(iter(warm), len(warm), bar)
    engine.reset_prefix_cache()
    count = len(workload.prompts)
    asked = [
        caller.request(Read(None, pack_ids(ids)), params, adapter=adapter)
        for ids, params, adapter in zip(
            workload.prompts, workload.params, workload.adapters or [None] * count, strict=True
        )
    ]
    say("measuring what the machine does at most")
    engine.begin_profile()
    say(f"running {workload.name}")
    with progress_bar(count, use_tqdm) as bar:
        started = time.perf_counter()
        outputs = runner.run(iter(asked), count, bar)
        seconds = time.perf_counter() - started
    say("measuring the machine again")
    profile = engine.end_profile()
    done = [output for output in outputs if output.error is None]
    failures = [
        f"request {number}: {output.error.message}"
        for number, output in enumerate(outputs, start=1)
        if output.error is not None
    ]
    if not done:
        raise InputError(f"{workload.name}: none could be run; {failures[0]}")
    resolved = engine.info.resolved
    return BenchReport(
        model=engine.info.model,
        workload=workload.name,
        num_requests=count,
        precision=f"weights {resolved['quantization'] or resolved['dtype']}, "
        f"KV cache {resolved['kv_cache_dtype']}",
        num_failed=len(failures),
        first_failure=failures[0] if failures else None,
        input_tokens=sum(len(output.prompt_token_ids) for output in done),
        cached_tokens=sum(output.num_cached_tokens for output in done),
        output_tokens=sum(_num_tokens(output) for output in done),
        seconds=seconds - profile.measuring_s,
        profile=profile,
        decisions=engine.info.decisions,
        environment=dict(engine.info.environment),
    )


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(sample.token_ids) for sample in output.outputs)
