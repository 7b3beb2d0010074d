"""Fixtures for model tests: build our decoder from files, and run it over a plan of mixed batches."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from batchgen.kernels.kv import torch_dtype
from batchgen.kernels.ops import choose
from batchgen.models.decoder import Decoder
from batchgen.models.gguf_config import config_from_gguf
from batchgen.models.gguf_file import GGUFFile
from batchgen.models.gguf_weights import GGUFSource
from batchgen.models.hf_config import config_from_hf
from batchgen.models.location import resolve_model
from batchgen.models.weight_source import SafetensorsSource
from batchgen.models.weights import load_weights
from batchgen.quantization.base import method_for
from batchgen.quantization.rotation import Rotation
from batchgen.worker.input_batch import BatchBuilder

BLOCK_SIZE = 16
NUM_BLOCKS = 80


def build_decoder(
    path: Path,
    *,
    backend: str = "reference",
    quantization: str | None = None,
    rotates: bool = False,
    kv_dtype: str = "float32",
) -> Decoder:
    location = resolve_model(str(path))
    if location.kind == "gguf":
        file = GGUFFile(location.path)
        config = config_from_gguf(file)
        source: Any = GGUFSource(file, config, keeps_blocks=quantization == "gguf")
        stored: Any = {"modules": source.kept_modules}
    else:
        config = config_from_hf(location.read_json("config.json") or {})
        source, stored = SafetensorsSource(location.path), config.quantization
    kernels = choose(
        "cpu", "float32", backend=backend, head_dim=config.head_dim, block_size=BLOCK_SIZE, kv_dtype=kv_dtype
    )
    device = torch.device("cpu")
    model = Decoder(
        config,
        kernels,
        method_for(config.quantization, str(path), quantization)(
            kernels, torch_dtype("float32"), device, stored, str(path)
        ),
        kv_dtype=kv_dtype,
        device=device,
        max_len=config.max_len,
        block_size=BLOCK_SIZE,
        rope_divisors=source.rope_divisors() if location.kind == "gguf" else None,
        rotation=Rotation(config.hidden_size, kernels) if rotates else None,
    )
    load_weights(model, source)
    layout = model.kv_layout
    model.bind_kv([kernels.allocate_kv(layout.spec, NUM_BLOCKS, device) for _ in range(layout.num_places)])
    return model


def run_plan(
    model: Decoder, prompts: Sequence[list[int]], plan: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits of every position of every prompt; plan[i][s] tokens of prompt s are computed in step i.

    All groups of layers take blocks from one pool when they need them, and give those behind their window
    back, which are poisoned until somebody takes them.
    """
    windows = model.kv_layout.windows
    # Blocks of each sequence are scattered, so that a wrong table is seen.
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    tables: list[tuple[list[int], ...]] = [tuple([] for _ in windows) for _ in prompts]
    done = [0] * len(prompts)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for number, counts in enumerate(plan):
        scheduled = []
        for index, count in enumerate(counts):
            if count:
                for table, window in zip(tables[index], windows, strict=True):
                    free += _give_back(model, table, done[index], window)
                    while len(table) * BLOCK_SIZE < done[index] + count:
                        table.append(free.pop(0))
                ids = prompts[index][done[index] : done[index] + count]
                scheduled.append(ScheduledSequence(index, ids, done[index], tables[index]))
                done[index] += count
        step = SchedulerOutput(number, tuple(scheduled))
        builder = BatchBuilder(block_size=BLOCK_SIZE, num_groups=len(windows), device=model.device)
        batch = builder.build(step, {})
        hidden = model.forward(batch.token_ids, batch.positions, batch.metas).clone()
        every_row = torch.arange(len(hidden))
        recorded = model.run(batch.token_ids, batch.positions, batch.metas, every_row)
        assert torch.equal(recorded, hidden), "a recorded step gives the same bits"
        logits = model.logits(hidden).clone()
        parts = logits.split([len(sequence.token_ids) for sequence in scheduled])
        for sequence, part in zip(scheduled, parts, strict=True):
            found[sequence.seq_id].append(part)
    assert done == [len(prompt) for prompt in prompts], "the plan must cover the prompts"
    return [torch.cat(parts) for parts in found]


def _give_back(model: Decoder, table: list[int], num_computed: int, window: int | None) -> list[int]:
    """Take blocks wholly behind the window of the next query out of a table; they hold NaN then."""
    gone = []
    for at in range(max(num_computed - window + 1, 0) // BLOCK_SIZE if window is not None else 0):
        if table[at] >= 0:
            gone.append(table[at])
            table[at] = -1
    for layer in model.layers:
        assert layer.kv is not None
        data = layer.kv.data
        # All bits set are a NaN too, where integers hold scales.
        data[gone] = float("nan") if data.is_floating_point() else -1
    return gone


@pytest.fixture(scope="session")
def decoder() -> Callable[..., Decoder]:
    return build_decoder


@pytest.fixture(scope="session")
def run() -> Callable[..., list[torch.Tensor]]:
    return run_plan


@pytest.fixture(scope="session")
def truth() -> Callable[[Any, Sequence[list[int]]], list[torch.Tensor]]:
    """transformers' logits of every position, each prompt alone and whole."""

    @torch.no_grad()
    def logits(model: Any, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]

    return logits
