"""SchedulerOutput: the record that the scheduler hands to the executor for one step. No torch."""

from dataclasses import dataclass, field

from batchgen.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

    Args:
        seq_id: number of the sequence, unique in the engine's life.
        token_ids: the tokens to compute, `num_computed_tokens` onward. -1 stands for a token that the step
            before this one samples and that is not known yet (see `SamplingRow.slot`).
        num_computed_tokens: tokens of the sequence already in the cache = position of token_ids[0].
        block_ids: per KV group, all blocks of the sequence in order, with room for token_ids.
        samples: the draws from the logits of the last token; empty while a prompt is not wholly computed.
        adapter: name of the LoRA adapter, or None.
    """

    seq_id: int
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    samples: tuple["SamplingRow", ...] = ()
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One draw from one row of logits.

    `key` = (seed, sample index, position): the counter of the random stream; position is that of the new
    token. `num_generated` is how many tokens the sample has already (for min_tokens). `slot` names the
    sequence that the token will belong to.
    """

    slot: int
    params: SamplingParams
    key: tuple[int, int, int]
    num_generated: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Who runs in this step, and what happens to the blocks before it.

    Order in a step: `swap_out`, `swap_in`, `block_copies` (source, target), then KV writes and the forward
        pass.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    num_common_blocks: int = 0
    finished_seq_ids: tuple[int, ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew: `token_ids[i]` belongs to the i-th SamplingRow of all sequences in order.

    None stands where there was nothing to draw from: the model's numbers have overflowed.
    """

    step: int
    token_ids: list[int | None]
