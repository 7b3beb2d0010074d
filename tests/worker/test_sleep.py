"""Sleep gives memory back to the machine, waking up takes it again, and texts stay the same."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import SchedulerOutput
from batchgen.errors import EngineError, WeightsError
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf
from batchgen.worker.model_memory import MovedWeights
from batchgen.worker.model_runner import ModelRunner

PROMPTS = [random_ids(count, seed=count, vocab_size=256) for count in (5, 17, 40)]
BACKENDS = ["reference", "cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def load_on(load: Callable[..., ModelRunner], folder: Path, backend: str) -> ModelRunner:
    device = "cuda" if backend == "gpu" else "cpu"
    return load(folder, kernel_backend=backend, device=device, dtype="float32", swap_space=0.001)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("levels", [(1,), (2,), (1, 2), (2, 1), (1, 1)])
def test_texts_after_waking_up_are_those_before(
    levels: tuple[int, ...], backend: str, folder: Path, load: Any, generate: Any
) -> None:
    runner = load_on(load, folder, backend)
    before = generate(runner, PROMPTS, 8)
    for level in levels:
        runner.sleep(level)
        with pytest.raises(EngineError, match="asleep"):
            runner.execute(SchedulerOutput(0, ()))
    runner.wake_up()
    runner.wake_up()
    assert generate(runner, PROMPTS, 8) == before
    runner.sleep(levels[0])
    runner.wake_up()
    assert generate(runner, PROMPTS, 8) == before


def test_a_gguf_file_is_read_again(tmp_path: Path, load: Any, generate: Any) -> None:
    runner = load(write_gguf(tiny_model(), tmp_path / "tiny.gguf"))
    before = generate(runner, PROMPTS, 5)
    runner.sleep(2)
    runner.wake_up()
    assert generate(runner, PROMPTS, 5) == before


def test_a_model_that_cannot_be_read_again_sleeps_on(tmp_path: Path, load: Any, generate: Any) -> None:
    runner = load(write_folder(tiny_model(), tmp_path))
    before = generate(runner, PROMPTS, 5)
    runner.sleep(2)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "away")
    with pytest.raises(WeightsError, match="no safetensors file"):
        runner.wake_up()
    with pytest.raises(EngineError, match="asleep"):
        runner.execute(SchedulerOutput(0, ()))
    (tmp_path / "away").rename(weights)
    runner.wake_up()
    assert generate(runner, PROMPTS, 5) == before


def test_sleep_has_two_levels_and_ends_with_shutdown(folder: Path, load: Any) -> None:
    runner = load(folder)
    with pytest.raises(EngineError, match="levels 1 and 2, not 3"):
        runner.sleep(3)
    runner.sleep(1)
    runner.shutdown()
    for call in (lambda: runner.sleep(1), runner.wake_up, lambda: runner.execute(SchedulerOutput(0, ()))):
        with pytest.raises(EngineError, match="shut down"):
            call()


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_weights_are_taken_from_under_the_model_and_put_back(
    options: dict[str, Any], tmp_path: Path, decoder_of: Any, generate: Any, load: Any
) -> None:
    """As on a GPU, where level 1 keeps weights in host memory; here both are the same memory."""
    # In another dtype than the file's, so that no weight is a view of the file.
    runner = load(write_folder(tiny_model(**options), tmp_path), kernel_backend="reference", dtype="bfloat16")
    before = generate(runner, PROMPTS, 5)
    model = decoder_of(runner)
    model.release()
    held = {id(each): each for each in tensors_in(model, set())}
    assert sum(each.nbytes for each in held.values()) > 100_000
    moved = MovedWeights(model.tensors())
    left = [each.shape for each in held.values() if each.untyped_storage().nbytes()]
    assert not left, f"tensors of the model that stayed: {left}"
    moved.move_back()
    model.bind_kv(runner._memory.blocks.caches)
    assert generate(runner, PROMPTS, 5) == before


@pytest.fixture
def decoder_of() -> Callable[[ModelRunner], Any]:
    return lambda runner: runner._memory.model


def tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached from a value through attributes and containers."""
    if id(value) in seen or isinstance(value, (str, bytes, type)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, dict):
        inside: Any = value.values()
    elif isinstance(value, (list, tuple, set)):
        inside = value
    elif type(value).__module__.startswith("batchgen"):
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        inside = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    else:
        return
    for each in inside:
        yield from tensors_in(each, seen)


MEASURE = """
import json, sys
from batchgen.config import EngineConfig
from batchgen.worker.load import load_executor

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

runner = load_executor(EngineConfig.from_engine_args(
    model=sys.argv[1], kernel_backend=sys.argv[2], num_gpu_blocks_override=2000, swap_space=0.02))
blocks = runner._memory.blocks

def fill():
    for kv in [*blocks.caches, *blocks.host]:
        kv.data.fill_(1.0)

fill()
sizes = {
    "kv": sum(kv.data.nbytes for kv in [*blocks.caches, *blocks.host]),
    "weights": sum(tensor.nbytes for tensor in runner._memory.model.tensors()),
    "awake": resident(),
}
for level in (1, 2):
    runner.sleep(level)
    sizes[f"level {level}"] = resident()
    runner.wake_up()
    fill()
    sizes[f"after {level}"] = resident()
runner.shutdown()
sizes["end"] = resident()
print(json.dumps(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
def test_memory_goes_back_to_the_machine(backend: str, large_folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large_folder), backend],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    sizes = json.loads(result.stdout)
    kv, weights, awake = sizes["kv"], sizes["weights"], sizes["awake"]
    assert min(kv, weights) > 30_000_000
    assert awake - sizes["level 1"] > 0.95 * kv
    assert awake - sizes["level 2"] > 0.95 * kv + 0.95 * weights
    assert awake - sizes["end"] > 0.95 * kv + 0.95 * weights
    for level in (1, 2):
        assert abs(sizes[f"after {level}"] - awake) < 0.2 * (kv + weights), (
            "waking up takes no more than before"
        )


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=3, head_dim=64, num_attention_heads=8
    )
    return write_folder(model, tmp_path_factory.mktemp("large"))


@pytest.mark.gpu
def test_memory_of_a_gpu_goes_back(large_folder: Path, load: Any) -> None:
    runner = load(large_folder, device="cuda", dtype="bfloat16", num_gpu_blocks_override=2000)
    awake = torch.cuda.memory_reserved()
    weights = sum(each.nbytes for each in runner._memory.model.tensors())
    for level in (1, 2):
        runner.sleep(level)
        assert torch.cuda.memory_reserved() < awake - 0.9 * weights
        assert torch.cuda.memory_allocated() < 4 << 20
        runner.wake_up()
