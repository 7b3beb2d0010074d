"""ModelRunner: runs one step on this rank: block copies, forward pass, logits of some rows, draws."""

from collections.abc import Sequence

import numpy as np
import torch

from batchgen.engine.scheduler_output import SchedulerOutput, StepResult
from batchgen.errors import EngineError
from batchgen.kernels.kv import LayerKV
from batchgen.models.decoder import Decoder
from batchgen.sampling_params import SamplingParams
from batchgen.worker.executor import ExecutorInfo
from batchgen.worker.input_batch import InputBatch, build_batch
from batchgen.worker.sampler import Sampler


class ModelRunner:
    """The executor of one rank, in this process.

    Args:
        model: with its weights.
        caches: the blocks of every layer.
        sampler: draws from logits.
        info: what the engine core is told.
        block_size: tokens in a block.
    """

    def __init__(
        self, model: Decoder, caches: Sequence[LayerKV], sampler: Sampler, info: ExecutorInfo, block_size: int
    ):
        self.info = info
        self._model: Decoder | None = model
        self._caches = list(caches)
        self._sampler = sampler
        self._block_size = block_size
        # Tokens of the last step by the sequence they belong to: a scheduler that runs ahead does not know
        # them.
        self._newest: dict[int, int] = {}
        model.bind_kv(caches)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepResult:
        """Copy blocks, write KV, run the model, draw.

        Raises:
            EngineError: after `shutdown`, or for what is not built.
        """
        model = self._model
        if model is None:
            raise EngineError("the executor is shut down")
        if step.swap_in or step.swap_out:
            raise EngineError("swapping blocks to host memory is not built")
        if step.block_copies:
            self._copy_blocks(step.block_copies)
        if not step.sequences:
            return StepResult(step.step, [])
        batch = build_batch(
            step,
            block_size=self._block_size,
            num_groups=self.info.num_groups,
            device=model.device,
            newest=self._newest,
        )
        hidden = model.forward(batch.token_ids, batch.positions, batch.metas, rows=batch.logit_rows)
        tokens = self._draw(model, hidden, batch)
        self._newest = {row.slot: token or 0 for row, token in zip(batch.samples, tokens, strict=True)}
        return StepResult(step.step, tokens)

    def refusal(self, params: SamplingParams) -> str | None:
        """Why this model cannot draw so; None if it can."""
        return None

    def sleep(self, level: int) -> None:
        """Give memory back."""
        raise EngineError("sleep is not built")

    def wake_up(self) -> None:
        """Be ready again."""
        raise EngineError("wake_up is not built")

    def shutdown(self) -> None:
        """Free weights and blocks. May be called twice."""
        self._model = None
        self._caches.clear()
        self._newest.clear()

    def _draw(self, model: Decoder, hidden: torch.Tensor, batch: InputBatch) -> list[int | None]:
        if not batch.samples:
            return []
        logits = model.logits(hidden)
        if len(batch.samples) != logits.shape[0]:
            # Several samples of one prompt begin from the same logits; each may change its own copy.
            logits = logits[batch.sample_rows]
        return self._sampler.draw(logits, batch.samples)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._model is not None
        pairs = torch.from_numpy(np.array(copies, dtype=np.int64)).to(self._model.device)
        for kv in self._caches:
            self._model.kernels.copy_blocks(kv, pairs)
