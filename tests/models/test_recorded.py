"""The decoder's recorded forward pass: when it is made, made again and not made; the same bits throughout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from batchgen.errors import KernelError
from batchgen.kernels.ops import Activation
from batchgen.layers.parallel import ParallelContext
from batchgen.models.decoder import Decoder
from batchgen.models.decoder_layer import Linear
from batchgen.tiny_models import random_ids, tiny_model, write_folder
from batchgen.worker.input_batch import BatchBuilder, InputBatch

QK_NORMS = ("Qwen3ForCausalLM", {"head_dim": 24})


def batch_of(model: Decoder, lengths: list[int]) -> InputBatch:
    """Whole prompts of so many tokens, each with blocks of its own."""
    blocks = iter(range(80))
    sequences = tuple(
        ScheduledSequence(
            index, random_ids(length, seed=index), 0, ([next(blocks) for _ in range(-(-length // 16))],)
        )
        for index, length in enumerate(lengths)
    )
    builder = BatchBuilder(block_size=16, num_groups=1, device=model.device)
    return builder.build(SchedulerOutput(0, sequences), {})


def run_both(model: Decoder, lengths: list[int], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Final hidden states of some tokens, recorded and eager."""
    batch, picked = batch_of(model, lengths), torch.tensor(rows, dtype=torch.int64)
    recorded = model.run(batch.token_ids, batch.positions, batch.metas, picked).clone()
    return recorded, model.forward(batch.token_ids, batch.positions, batch.metas, rows=picked).clone()


@pytest.fixture
def model(tmp_path: Path, decoder: Callable[..., Decoder]) -> Decoder:
    architecture, options = QK_NORMS
    return decoder(write_folder(tiny_model(architecture, **options), tmp_path), backend="cpu")


def test_a_larger_step_is_recorded_anew_a_smaller_one_is_not(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = type(model.kernels).record

    def record(kernels: Any, build: Callable[[], None], most: Any) -> Any:
        sizes.append(most)
        return original(kernels, build, most)

    monkeypatch.setattr(type(model.kernels), "record", record)
    for lengths, rows in (
        ([3], [2]), ([9, 5], [8, 13]), ([90, 7, 1], [96]), ([1], [0]), ([2] * 70, [3, 3, 0, 139]),
        ([93, 90], list(range(183))),
    ):  # fmt: skip
        recorded, eager = run_both(model, lengths, rows)
        assert model.recorded.is_recorded
        assert torch.equal(recorded, eager)
    # 64 of each to begin with, then powers of two, each of another size than the others.
    assert [most.tokens for most in sizes] == [64, 128, 256, 256]
    assert [most.rows - 1 for most in sizes] == [64, 64, 64, 256]
    assert [most.sequences - 2 for most in sizes] == [64, 64, 128, 128]


def test_a_step_without_wanted_rows_is_recorded_and_writes_its_keys(model: Decoder) -> None:
    recorded, eager = run_both(model, [5], [])
    assert model.recorded.is_recorded
    assert recorded.shape == eager.shape == (0, 72)
    eager_keys = [layer.kv.data[0].clone() for layer in model.layers if layer.kv is not None]
    for layer in model.layers:
        assert layer.kv is not None
        layer.kv.data[0].zero_()
    batch = batch_of(model, [5])
    model.run(batch.token_ids, batch.positions, batch.metas, batch.logit_rows)
    keys = [layer.kv.data[0] for layer in model.layers if layer.kv is not None]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(keys, eager_keys, strict=True))
    assert all(each.abs().sum() > 0 for each in keys)


def test_positions_in_several_rows_run_at_once(model: Decoder) -> None:
    batch, rows = batch_of(model, [5]), torch.tensor([4])
    several = batch.positions.expand(3, -1)
    assert torch.equal(
        model.run(batch.token_ids, several, batch.metas, rows).clone(), run_both(model, [5], [4])[1]
    )


def test_an_error_in_a_step_is_raised_and_the_next_step_runs(model: Decoder) -> None:
    batch, rows = batch_of(model, [9]), torch.tensor([8])
    with pytest.raises(KernelError, match="rotary: a position"):
        model.run(batch.token_ids, batch.positions + 10**6, batch.metas, rows)
    recorded, eager = run_both(model, [9], [8])
    assert torch.equal(recorded, eager)


def test_another_cache_is_recorded_anew(model: Decoder) -> None:
    before, _ = run_both(model, [9, 5], [13])
    old = [layer.kv for layer in model.layers]  # held: identities of gone ones return
    model.release()
    assert not model.recorded.is_recorded
    spec = model.kv_layout.spec
    caches = [model.kernels.allocate_kv(spec, 80, "cpu") for _ in range(model.kv_layout.num_places)]
    model.bind_kv(caches)
    recorded, eager = run_both(model, [9, 5], [13])
    assert torch.equal(recorded, before)
    assert torch.equal(recorded, eager)
    assert not any(layer.kv is gone for layer in model.layers for gone in old)
    for kv in caches:
        assert kv.data.abs().sum() > 0, "the new blocks were written"


class Doubled:
    """An adapter that computes with torch what is no kernel operation."""

    def __init__(self, layer: Linear):
        self.layer = layer

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        return self.layer(x, out).mul_(2)


def test_adapters_that_compute_with_torch_run_operation_by_operation(model: Decoder) -> None:
    plain, _ = run_both(model, [9, 5], [13])
    assert model.recorded.is_recorded
    model.wrap_linears(lambda name, layer: Doubled(layer) if name.endswith("down_proj") else layer)
    recorded, eager = run_both(model, [9, 5], [13])
    assert not model.recorded.is_recorded
    assert torch.equal(recorded, eager)
    assert not torch.equal(recorded, plain)


class Renamed:
    """An adapter that adds nothing, with kernel operations only."""

    def __init__(self, layer: Linear):
        self.layer = layer

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        return self.layer(x, out)


def test_adapters_of_kernel_operations_are_recorded(model: Decoder) -> None:
    plain, _ = run_both(model, [9, 5], [13])
    model.wrap_linears(lambda _, layer: Renamed(layer))
    recorded, _ = run_both(model, [9, 5], [13])
    assert model.recorded.is_recorded
    assert torch.equal(recorded, plain)


class Alone(ParallelContext):
    """One of two ranks, whose sums come from itself alone."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def test_ranks_that_exchange_results_are_not_recorded(model: Decoder) -> None:
    model.parallel = Alone(0, 2)
    recorded, eager = run_both(model, [9], [8])
    assert not model.recorded.is_recorded
    assert torch.equal(recorded, eager)


def test_the_reference_runs_operation_by_operation(tmp_path: Path, decoder: Callable[..., Decoder]) -> None:
    model = decoder(write_folder(tiny_model(), tmp_path), backend="reference")
    recorded, eager = run_both(model, [9, 5], [13, 2])
    assert not model.recorded.is_recorded
    assert torch.equal(recorded, eager)
