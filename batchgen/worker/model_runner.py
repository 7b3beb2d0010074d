"""ModelRunner: runs one step on this rank: swaps and copies, forward pass, logits of some rows, draws."""

import time
from collections.abc import Mapping, Sequence

import torch

from batchgen.engine.scheduler_output import DrawRules, SchedulerOutput, StepResult
from batchgen.errors import EngineError
from batchgen.models.adapter_lane import StepAdapters
from batchgen.models.decoder import Decoder
from batchgen.sampling_params import SamplingParams
from batchgen.worker.adapters import WorkerAdapters
from batchgen.worker.draw_limits import DrawLimits
from batchgen.worker.draw_rows import DrawRows, NewestTokens
from batchgen.worker.executor import ExecutorInfo, ExecutorProfile
from batchgen.worker.input_batch import BatchBuilder, InputBatch
from batchgen.worker.model_memory import ModelMemory
from batchgen.worker.prompt_scores import PromptScorer
from batchgen.worker.sampler import Drawn, Sampler, drawn_tokens
from batchgen.worker.step_head import StepHead
from batchgen.worker.step_profile import StepProfile


class ModelRunner:
    """The executor of one rank, in this process.

    Args:
        memory: the model and its blocks.
        sampler: draws from logits.
        limits: what can be drawn at all.
        info: what the engine core is told.
        block_size: tokens in a block.
        adapters: those that rows may be computed with.
    """

    def __init__(
        self,
        memory: ModelMemory,
        sampler: Sampler,
        limits: DrawLimits,
        info: ExecutorInfo,
        block_size: int,
        adapters: WorkerAdapters | None = None,
    ):
        self.info = info
        self.adapters = adapters
        self._memory = memory
        self._sampler = sampler
        self._scorer = PromptScorer(sampler.reader)
        self._limits = limits
        self._block_size = block_size
        self._batches = BatchBuilder(
            block_size=block_size,
            num_groups=info.num_groups,
            device=memory.model.device,
            num_slots=0 if adapters is None else adapters.slots.num_slots,
        )
        # Draws of the last step and their tokens: those that go on begin with them, and a scheduler that runs
        # ahead does not know them.
        self._draws: DrawRows = sampler.rows(())
        self._drawn: list[int | None] = []
        self._newest = NewestTokens()
        self._profile: StepProfile | None = None

    @property
    def model(self) -> Decoder:
        """The model, for who looks at it outside of steps.

        Raises:
            EngineError: after `shutdown`, or asleep.
        """
        return self._memory.model

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepResult:
        """Swap and copy blocks, write KV, run the model, draw.

        Raises:
            EngineError: after `shutdown`, or asleep.
        """
        model = self._memory.model
        swap_s = self._memory.blocks.apply(step)
        self._sampler.forget(step.finished_seq_ids)
        if not step.num_sequences:
            return StepResult(step.step, [], swap_s=swap_s)
        batch = self._batches.build(step, self._newest, self._drawn, self._slots_of(step))
        used = self._adapters_of(batch)
        draws = self._draws_of(step, batch)
        started = time.perf_counter()
        hidden = model.run(batch.token_ids, batch.positions, batch.metas, batch.logit_rows, used)
        if self._profile is not None:
            self._profile.forward(batch, started)
        num_drawn_rows = hidden.shape[0] - batch.num_score_rows
        head = self._head_of(model, batch, used)
        drawn = self._draw(model, hidden[:num_drawn_rows], draws, batch.sample_rows, head)
        self._draws, self._drawn = draws, drawn.token_ids
        self._newest = NewestTokens(draws, drawn.token_ids)
        # After the draws: the logits of a chunk take the place of theirs.
        scores = {}
        if batch.scores:
            scores = self._scorer.score(head, hidden[num_drawn_rows:], batch.scores, first=num_drawn_rows)
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

    def begin_profile(self) -> None:
        """Keep time from the next step on."""
        self._profile = StepProfile(self._memory.model)

    def end_profile(self) -> ExecutorProfile:
        """What was kept.

        Raises:
            EngineError: nothing was.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            raise EngineError("end_profile comes after begin_profile")
        return profile.end()

    def sleep(self, level: int) -> None:
        """Give memory back."""
        self._memory.sleep(level)
        if level == 2 and self.adapters is not None:
            self.adapters.release()
        self._newest = NewestTokens()

    def wake_up(self) -> None:
        """Be ready again."""
        self._memory.wake_up()

    def shutdown(self) -> None:
        """Free weights and blocks. May be called twice."""
        self._memory.free()
        if self.adapters is not None:
            self.adapters.close()
        self._newest = NewestTokens()

    def _slots_of(self, step: SchedulerOutput) -> Mapping[str, int]:
        """Adapter -> slot, of the sequences that do not merely go on."""
        if self.adapters is None or not step.sequences:
            return {}
        named = dict.fromkeys(each.adapter for each in step.sequences if each.adapter is not None)
        return self.adapters.place(named, lambda: self._batches.slots_going_on(step)) if named else {}

    def _adapters_of(self, batch: InputBatch) -> StepAdapters | None:
        """Which rows of a step have adapters; None: none has, and the step is one of the base model."""
        if self.adapters is None or batch.slots is None:
            return None
        whole = self.adapters.slots.whole_slots(batch.slots.used)
        return StepAdapters(batch.slots.tokens, batch.slots.rows, whole)

    def _head_of(self, model: Decoder, batch: InputBatch, used: StepAdapters | None) -> StepHead:
        """What gives the logits of a step."""
        if self.adapters is None or batch.slots is None or used is None:
            return StepHead(model)
        if not self.adapters.slots.change_head(batch.slots.used):
            return StepHead(model)
        return StepHead(model, batch.slots, used.whole_slots)

    def _draws_of(self, step: SchedulerOutput, batch: InputBatch) -> DrawRows:
        """The draws of a step: of those that go on, then all others."""
        if step.continued is None:
            return self._sampler.rows(batch.samples)
        going_on = self._draws.moved(step.continued.rows)
        return going_on.followed_by(self._sampler.rows(batch.samples)) if batch.samples else going_on

    def _draw(
        self,
        model: Decoder,
        hidden: torch.Tensor,
        draws: DrawRows,
        sample_rows: Sequence[int],
        head: StepHead,
    ) -> Drawn:
        if not len(draws):
            return Drawn([])
        profile, started = self._profile, time.perf_counter()
        is_plain = draws.is_plain and draws.is_by_temperature and head.is_plain
        if is_plain and len(draws) == hidden.shape[0]:
            found = self._draw_at_once(model, hidden, draws)
            if found is not None:
                if profile is not None:
                    profile.head(started)
                return Drawn(drawn_tokens(found))
        logits = head.logits(hidden, 0)
        if profile is not None:
            started = profile.head(started)
        if len(draws) != logits.shape[0]:
            # Several samples of one prompt begin from the same logits; each may change its own copy.
            logits = logits[sample_rows]
        drawn = self._sampler.draw(logits, draws, self._newest)
        if profile is not None:
            profile.drawn(started)
        return drawn

    def _draw_at_once(self, model: Decoder, hidden: torch.Tensor, draws: DrawRows) -> torch.Tensor | None:
        """Tokens straight from the head; None if it cannot."""
        vocab_size = self._sampler.vocab_size
        if draws.is_greedy:
            return model.drawn(hidden, vocab_size)
        ways = draws.draws()
        return model.drawn(hidden, vocab_size, ways.temperature, ways.uniform)
