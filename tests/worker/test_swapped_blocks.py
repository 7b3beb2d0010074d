"""Blocks that go to host memory and come back: contents survive, and a step keeps its order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.scheduler_output import DrawRules, SamplingRow, ScheduledSequence, SchedulerOutput
from batchgen.errors import KernelError
from batchgen.sampling_params import SamplingParams
from batchgen.tiny_models import random_ids, tiny_model, write_folder
from batchgen.worker.model_runner import ModelRunner

RULES = DrawRules(SamplingParams(temperature=0))
PROMPT = random_ids(40, seed=1, vocab_size=256)
OTHER = random_ids(48, seed=2, vocab_size=256)
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}


def step(number: int, *sequences: ScheduledSequence, **moves: Any) -> SchedulerOutput:
    return SchedulerOutput(number, sequences, **moves)


def sequence(number: int, ids: list[int], computed: int, *tables: list[int]) -> ScheduledSequence:
    row = SamplingRow(number, RULES, (0, 0, computed + len(ids)), 0)
    return ScheduledSequence(number, ids, computed, tables, (row,))


@pytest.fixture(params=["reference", "cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def runner(request: pytest.FixtureRequest, folder: Path, load: Callable[..., ModelRunner]) -> ModelRunner:
    device = "cuda" if request.param == "gpu" else "cpu"
    return load(
        folder, kernel_backend=request.param, device=device, dtype="float32",
        num_gpu_blocks_override=8, swap_space=0.001,
    )  # fmt: skip


def continuation(runner: ModelRunner) -> list[int]:
    """Two tokens of the prompt, undisturbed."""
    (first,) = runner.execute(step(0, sequence(0, PROMPT, 0, [0, 1, 2]))).token_ids
    assert first is not None
    (second,) = runner.execute(step(1, sequence(0, [first], 40, [0, 1, 2]))).token_ids
    assert second is not None
    return [first, second]


def test_a_sequence_goes_on_in_other_blocks(runner: ModelRunner) -> None:
    first, second = continuation(runner)
    runner.execute(step(2, sequence(1, PROMPT, 0, [0, 1, 2])))
    # The same step that swaps out writes others' tokens into the blocks: out comes before the writing.
    runner.execute(step(3, sequence(2, OTHER, 0, [0, 1, 2]), swap_out=((0, 5), (1, 6), (2, 3))))
    # Back, and the last block copied from where it came back to: in comes before the copies.
    moves = {"swap_in": ((5, 7), (6, 0), (3, 4)), "block_copies": ((4, 6),)}
    result = runner.execute(step(4, sequence(1, [first], 40, [7, 0, 6]), **moves))
    assert result.token_ids == [second]


def test_a_step_may_only_move_blocks(runner: ModelRunner) -> None:
    first, second = continuation(runner)
    runner.execute(step(2, sequence(1, PROMPT, 0, [3, 4, 5])))
    result = runner.execute(step(3, swap_out=((3, 0), (4, 1), (5, 2))))
    assert result.token_ids == []
    assert 0 < result.swap_s < 5
    runner.execute(step(4, sequence(2, OTHER, 0, [3, 4, 5])))
    # Out goes first: what it writes to host memory may come in again in the same step.
    runner.execute(step(5, swap_out=((4, 4),), swap_in=((0, 1), (1, 2), (2, 3), (4, 6))))
    assert runner.execute(step(6, sequence(1, [first], 40, [1, 2, 3]))).token_ids == [second]
    for kv in runner._memory.blocks.caches:
        assert torch.equal(kv.data[6], kv.data[4])


def test_blocks_that_are_not_there(runner: ModelRunner) -> None:
    with pytest.raises(KernelError, match="outside of pools"):
        runner.execute(step(0, swap_out=((8, 0),)))
    with pytest.raises(KernelError, match="outside of pools"):
        runner.execute(step(0, swap_in=((runner.info.num_cpu_blocks, 0),)))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_blocks_of_every_group_of_layers_are_swapped(
    backend: str, tmp_path: Path, load: Callable[..., ModelRunner]
) -> None:
    model = write_folder(tiny_model("Qwen2ForCausalLM", **QWEN_WINDOW), tmp_path)
    runner = load(model, kernel_backend=backend, num_gpu_blocks_override=12, swap_space=0.001)
    assert runner.info.num_groups == 2
    (first,) = runner.execute(step(0, sequence(0, PROMPT, 0, [0, 1, 2], [3, 4, 5]))).token_ids
    assert first is not None
    expected = runner.execute(step(1, sequence(0, [first], 40, [0, 1, 2], [-1, 4, 5]))).token_ids
    runner.execute(step(2, sequence(1, PROMPT, 0, [0, 1, 2], [3, 4, 5])))
    # Block 3 is behind the window by now and stays.
    moves = ((0, 0), (1, 1), (2, 2), (4, 3), (5, 4))
    runner.execute(step(3, sequence(2, OTHER, 0, [2, 1, 0], [5, 4, 3]), swap_out=moves))
    moves = ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10))
    result = runner.execute(step(4, sequence(1, [first], 40, [6, 7, 8], [-1, 9, 10]), swap_in=moves))
    assert result.token_ids == expected
