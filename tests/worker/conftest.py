"""Fixtures of the worker's tests: a tiny model in a folder, loaded, and driven without a scheduler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.config import EngineConfig
from batchgen.engine.scheduler_output import DrawRules, SamplingRow, ScheduledSequence, SchedulerOutput
from batchgen.sampling_params import SamplingParams
from batchgen.tiny_models import tiny_model, write_folder
from batchgen.worker.load import load_executor
from batchgen.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tiny_model(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def load() -> Callable[..., ModelRunner]:
    def load(model: Path | str, **engine_args: Any) -> ModelRunner:
        executor = load_executor(EngineConfig.from_engine_args(model=str(model), **engine_args))
        assert isinstance(executor, ModelRunner)
        return executor

    return load


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[list[int]]]:
    """Generates `count` tokens for every prompt, all in one batch, each sequence in blocks of its own."""

    def generate(
        executor: ModelRunner,
        prompts: list[list[int]],
        count: int,
        params: SamplingParams = GREEDY,
        first_block: int = 0,
    ) -> list[list[int]]:
        blocks = [[first_block + 8 * index + number for number in range(8)] for index in range(len(prompts))]
        texts = [list(prompt) for prompt in prompts]
        computed = [0] * len(prompts)
        for number in range(count):
            scheduled = []
            for index, text in enumerate(texts):
                draw = SamplingRow(index, DrawRules(params), (7, 0, len(text)), number)
                scheduled.append(
                    ScheduledSequence(
                        index, text[computed[index] :], computed[index], (blocks[index],), (draw,)
                    )
                )
                computed[index] = len(text)
            for text, token in zip(
                texts, executor.execute(SchedulerOutput(number, tuple(scheduled))).token_ids, strict=True
            ):
                text.append(token)
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    return generate


@pytest.fixture(scope="session")
def generates_the_same(generate: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
    """Wants of an executor the same tokens for prompts together, alone, and after sleep; returns them."""

    def check(executor: ModelRunner, prompts: list[list[int]], count: int) -> list[list[int]]:
        together = generate(executor, prompts, count)
        for prompt, tokens in zip(prompts, together, strict=True):
            assert generate(executor, [prompt], count, first_block=30)[0] == tokens
        for level in (1, 2):
            executor.sleep(level)
            executor.wake_up()
            assert generate(executor, prompts, count) == together
        return together

    return check
