"""Workload: requests to measure an engine with: made up, from a file of token ids, or the rows of a job."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.errors import ConfigError, InputError
from batchgen.quantities import counted
from batchgen.sampling_params import SamplingParams

# Ids below are control tokens in most vocabularies.
_FIRST_ID = 100


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, all handed over at once.

    Args:
        name: what they are, in words.
        prompts: token ids of each.
        params: of each.
        adapters: of each; none are there if all are of the model alone.
        adapter_folders: name -> where the adapter lies.
    """

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    adapters: list[str | None] = field(default_factory=list)
    adapter_folders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUp:
    """How a made-up workload looks: random tokens, greedy, exact counts.

    Args:
        num_prompts: requests.
        prompt_tokens: of each, those that all share included.
        new_tokens: generated for each.
        shared_tokens: at the beginning of every prompt, the same for all.

    Raises:
        ConfigError: a number that cannot be.
    """

    num_prompts: int = 64
    prompt_tokens: int = 128
    new_tokens: int = 128
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_prompts", 1),
            ("prompt_tokens", 1),
            ("new_tokens", 1),
            ("shared_tokens", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
        if self.shared_tokens >= self.prompt_tokens:
            raise ConfigError(
                f"shared_tokens ({self.shared_tokens}) must be fewer than prompt_tokens "
                f"({self.prompt_tokens})"
            )

    def make(self, vocab_size: int, limit: int | None = None) -> Workload:
        """The requests for a vocabulary, the first `limit` of them; the same every time."""
        count = self.num_prompts if limit is None else min(limit, self.num_prompts)
        draw, first = random.Random(0), min(_FIRST_ID, vocab_size - 1)

        def ids(count: int) -> list[int]:
            return [draw.randrange(first, vocab_size) for _ in range(count)]

        shared = ids(self.shared_tokens)
        prompts = [shared + ids(self.prompt_tokens - len(shared)) for _ in range(count)]
        name = f"{counted(count, 'made-up prompt')} of {counted(self.prompt_tokens, 'token')}"
        if shared:
            name += f", {len(shared)} of them the same for all"
        name += f", {counted(self.new_tokens, 'token')} each"
        return Workload(name, prompts, [exact(self.new_tokens)] * count)


def exact(new_tokens: int) -> SamplingParams:
    """Greedy, so many tokens and no fewer."""
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=new_tokens, detokenize=False)


def from_file(path: Path, limit: int | None) -> Workload:
    """Requests of a file of lines {"prompt_token_ids": [...], "max_tokens": 128}; other keys are ignored.

    Raises:
        InputError: there is no such file, or a line of it is none of these; says which.
    """
    prompts: list[list[int]] = []
    params: list[SamplingParams] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(prompts) == limit:
                    break
                if line.strip():
                    ids, new_tokens = _request(line, f"{path}, line {number}")
                    prompts.append(ids)
                    params.append(exact(new_tokens))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not prompts:
        raise InputError(f"{path}: no requests in it")
    return Workload(f"{counted(len(prompts), 'request')} of {path.name}", prompts, params)


def _request(line: str, where: str) -> tuple[list[int], int]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    ids = row.get("prompt_token_ids") if isinstance(row, Mapping) else None
    new_tokens = row.get("max_tokens") if isinstance(row, Mapping) else None
    is_right = isinstance(ids, list) and ids and all(isinstance(each, int) for each in ids)
    if not is_right or not isinstance(new_tokens, int) or new_tokens < 1:
        raise InputError(
            f'{where}: write {{"prompt_token_ids": [1, 2, 3], "max_tokens": 128}}; got {line.strip():.80}'
        )
    assert isinstance(ids, list)
    return ids, new_tokens


class OfJob(NamedTuple):
    """What is measured of a job: the workload, its model and engine settings, and where these are written."""

    workload: Workload
    model: str
    engine_args: dict[str, Any]
    placing_errors: Callable[[str], AbstractContextManager[None]]


def of_job(job: Path, overrides: Sequence[str], limit: int) -> OfJob:
    """The first rows of a job that have a prompt.

    Raises:
        ConfigError, InputError: the job is wrong, or has no such row.
    """
    from batchgen.jobs.first_rows import first_prompts
    from batchgen.jobs.spec import load_spec

    spec = load_spec(job, overrides=overrides)
    found = first_prompts(spec, limit)
    prompts = found.prompts
    if not prompts:
        raise InputError(f"{job}: no prompt in the first {counted(limit, 'row')}")
    engine_args = found.config.to_engine_args()
    model = engine_args.pop("model")
    name = f"the first {counted(len(prompts), 'row')} of {job.name}"
    workload = Workload(name, prompts, [found.params] * len(prompts), found.adapters, found.adapter_folders)
    return OfJob(workload, model, engine_args, spec.placing_errors)
