"""ModelRunner: runs one step on this rank: swaps and copies, forward pass, logits of some rows, draws."""

from collections.abc import Sequence

import torch

from batchgen.engine.scheduler_output import DrawRules, SchedulerOutput, StepResult
from batchgen.models.decoder import Decoder
from batchgen.sampling_params import SamplingParams
from batchgen.worker.draw_limits import DrawLimits
from batchgen.worker.executor import ExecutorInfo
from batchgen.worker.input_batch import InputBatch, build_batch
from batchgen.worker.model_memory import ModelMemory
from batchgen.worker.prompt_scores import PromptScorer
from batchgen.worker.sampler import Drawn, Sampler


class ModelRunner:
    """The executor of one rank, in this process.

    Args:
        memory: the model and its blocks.
        sampler: draws from logits.
        limits: what can be drawn at all.
        info: what the engine core is told.
        block_size: tokens in a block.
    """

    def __init__(
        self, memory: ModelMemory, sampler: Sampler, limits: DrawLimits, info: ExecutorInfo, block_size: int
    ):
        self.info = info
        self._memory = memory
        self._sampler = sampler
        self._scorer = PromptScorer(sampler.reader)
        self._limits = limits
        self._block_size = block_size
        # Tokens of the last step by the sequence they belong to: a scheduler that runs ahead does not know
        # them.
        self._newest: dict[int, int] = {}

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepResult:
        """Swap and copy blocks, write KV, run the model, draw.

        Raises:
            EngineError: after `shutdown`, or asleep.
        """
        model = self._memory.model
        swap_s = self._memory.blocks.apply(step)
        self._sampler.forget(step.finished_seq_ids)
        if not step.sequences:
            return StepResult(step.step, [], swap_s=swap_s)
        batch = build_batch(
            step,
            block_size=self._block_size,
            num_groups=self.info.num_groups,
            device=model.device,
            newest=self._newest,
        )
        hidden = model.forward(batch.token_ids, batch.positions, batch.metas, rows=batch.logit_rows)
        num_drawn_rows = hidden.shape[0] - batch.num_score_rows
        drawn = self._draw(model, hidden[:num_drawn_rows], batch)
        self._newest = {
            row.slot: token or 0 for row, token in zip(batch.samples, drawn.token_ids, strict=True)
        }
        # After the draws: the logits of a chunk take the place of theirs.
        scores = self._scorer.score(model, hidden[num_drawn_rows:], batch.scores) if batch.scores else {}
        return StepResult(
            step.step,
            drawn.token_ids,
            logprobs=drawn.logprobs,
            candidates=drawn.candidates,
            grammar=drawn.grammar,
            prompt_logprobs=scores,
            failures=drawn.failures,
            swap_s=swap_s,
        )

    def refusal(self, params: SamplingParams) -> str | None:
        """Why this model cannot draw so; None if it can."""
        return self._limits.refusal(params, self.info)

    def accepts(self, rules: DrawRules, token_ids: Sequence[int]) -> bool:
        """Whether a grammar's sample may end after these tokens."""
        return self._sampler.accepts(rules, token_ids)

    def sleep(self, level: int) -> None:
        """Give memory back."""
        self._memory.sleep(level)
        self._newest.clear()

    def wake_up(self) -> None:
        """Be ready again."""
        self._memory.wake_up()

    def shutdown(self) -> None:
        """Free weights and blocks. May be called twice."""
        self._memory.free()
        self._newest.clear()

    def _draw(self, model: Decoder, hidden: torch.Tensor, batch: InputBatch) -> Drawn:
        if not batch.samples:
            return Drawn([])
        logits = model.logits(hidden)
        if len(batch.samples) != logits.shape[0]:
            # Several samples of one prompt begin from the same logits; each may change its own copy.
            logits = logits[batch.sample_rows]
        return self._sampler.draw(logits, batch.samples, self._newest)
