"""What tests of adapters share: tiny models with slots, logits of mixed batches, and peft's own answers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.config import LoRAConfig
from batchgen.engine.scheduler_output import PromptScores, ScheduledSequence, SchedulerOutput
from batchgen.kernels.ops import choose
from batchgen.models.adapter_lane import StepAdapters
from batchgen.sampling_params import SamplingParams
from batchgen.tiny_models import tiny_model, write_folder
from batchgen.worker.adapters import WorkerAdapters
from batchgen.worker.base_tensors import BaseTensors
from batchgen.worker.input_batch import BatchBuilder
from batchgen.worker.model_files import ModelFiles
from batchgen.worker.step_head import StepHead

BLOCK_SIZE = 16


class Adapted:
    """A model with slots.

    Args:
        folder: of the model.
        backend: of the kernels.
        quantization: how its weights are rounded.
        num_slots: for adapters.
        max_rank: `max_lora_rank`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        backend: str = "cpu",
        quantization: str | None = None,
        num_slots: int = 4,
        max_rank: int | None = None,
    ):
        files = ModelFiles(str(folder))
        kernels = choose("cpu", "float32", backend=backend, head_dim=files.shape.head_dim)
        settings = LoRAConfig(enable_lora=True, max_loras=num_slots, max_lora_rank=max_rank)
        self.adapters = WorkerAdapters(settings, files.shape, BaseTensors(files), kernels)
        self.adapters.take_memory(1 << 30)
        self.model = self.adapters.attach(
            files.build(
                kernels, dtype="float32", quantization=quantization, kv_dtype="float32",
                device=torch.device("cpu"), max_len=128, block_size=BLOCK_SIZE,
            )
        )  # fmt: skip
        layout = self.model.kv_layout
        self.model.bind_kv([kernels.allocate_kv(layout.spec, 64, "cpu") for _ in range(layout.num_places)])
        self._num_slots, self._step = num_slots, 0

    def load(self, path: Path, name: str = "it") -> str:
        """Check an adapter and bring it into memory; gives its content hash."""
        content = self.adapters.load(name, str(path)).content_hash
        self.adapters.begin_step([])
        while (found := self.adapters.want(content)) is False:
            self.adapters.wait(10.0)
        assert found is True, found
        return content

    @torch.inference_mode()
    def logits(self, prompts: Sequence[list[int]], adapters: Sequence[str | None]) -> list[Tensor]:
        """Logits of every position of prompts, in one step, recorded and not, each with its adapter."""
        sequences, blocks = [], iter(range(64))
        for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            table = [next(blocks) for _ in range(-(-len(prompt) // BLOCK_SIZE))]
            # The logits of all positions but the last score the token behind; the last is asked for too.
            scores = PromptScores(1, [*prompt[1:], 0], SamplingParams(prompt_logprobs=0))
            tables = tuple(table for _ in self.model.kv_layout.windows)
            sequences.append(ScheduledSequence(number, prompt, 0, tables, adapter=adapter, scores=scores))
        step = SchedulerOutput(self._step, tuple(sequences))
        self._step += 1
        builder = BatchBuilder(
            block_size=BLOCK_SIZE, num_groups=len(self.model.kv_layout.windows),
            device=torch.device("cpu"), num_slots=self._num_slots,
        )  # fmt: skip
        named = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        slots = self.adapters.place(named, set)
        batch = builder.build(step, {}, (), slots)
        whole = () if batch.slots is None else self.adapters.slots.whole_slots(batch.slots.used)
        used = None if batch.slots is None else StepAdapters(batch.slots.tokens, batch.slots.rows, whole)
        arguments = (batch.token_ids, batch.positions, batch.metas)
        eager = self.model.forward(*arguments, rows=batch.logit_rows, adapters=used).clone()
        hidden = self.model.run(*arguments, batch.logit_rows, used).clone()
        assert torch.equal(hidden, eager), "a recorded step gives the same bits"
        head = StepHead(self.model)
        if batch.slots is not None and self.adapters.slots.change_head(batch.slots.used):
            head = StepHead(self.model, batch.slots, whole)
        found = head.logits(hidden, 0).clone()
        return list(found.split([len(prompt) for prompt in prompts]))


@pytest.fixture(scope="session")
def adapted() -> type[Adapted]:
    return Adapted


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model's folder, made once for each kind."""
    made: dict[str, Path] = {}

    def make(architecture: str = "LlamaForCausalLM", **config: Any) -> Path:
        key = repr((architecture, sorted(config.items())))
        if key not in made:
            made[key] = write_folder(tiny_model(architecture, **config), tmp_path_factory.mktemp("tiny"))
        return made[key]

    return make


@pytest.fixture(scope="session")
def expected() -> Callable[..., Tensor]:
    """Logits of every position of a prompt as peft computes them, merged or beside the weights."""
    peft = pytest.importorskip("peft")

    @torch.no_grad()
    def logits(folder: Path, adapter: Path, prompt: list[int], *, merged: bool = True) -> Tensor:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wrapped = peft.PeftModel.from_pretrained(model, adapter).eval()
        if merged:
            wrapped = wrapped.merge_and_unload().eval()
        found: Tensor = wrapped(torch.tensor([prompt])).logits[0]
        return found

    return logits
