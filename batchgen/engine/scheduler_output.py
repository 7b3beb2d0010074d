"""SchedulerOutput: the record that the scheduler hands to the executor for one step. No torch."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchgen.errors import EngineError
from batchgen.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawRules:
    """How a request draws, the same for all its samples and steps.

    Args:
        params: as the user gave them.
        stop_ids: ids that may end a sample; held back before `min_tokens`.
        bad_words: token id sequences that must not come; of one with several ids only the last is held back,
            where the others stand before it.
        num_prompt_tokens: the beginning of a history that was not drawn.
        needs_history: whether a draw depends on the tokens before it (penalties, bad words, a grammar, a
            thinking budget).
    """

    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt_tokens: int = 0
    needs_history: bool = False


@dataclass(slots=True)  # written once; freezing would double the time to make one
class ScheduledSequence:
    """One sequence's part of a step.

    Args:
        seq_id: number of the sequence, unique in the engine's life.
        token_ids: the tokens to compute, `num_computed_tokens` onward. -1 stands for a token that the step
            before this one samples and that is not known yet (see `SamplingRow.slot`). Drafted tokens stand
            at the end.
        num_computed_tokens: tokens of the sequence already in the cache = position of token_ids[0].
        block_ids: per KV group, all blocks of the sequence in order, with room for token_ids. -1 stands where
            a block behind a sliding window was given back.
        samples: the draws from the logits of its tokens; empty while a prompt is not wholly computed.
        adapter: name of the LoRA adapter, or None.
        scores: the prompt tokens to be scored in this step, or None.
    """

    seq_id: int
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    samples: tuple["SamplingRow", ...] = ()
    adapter: str | None = None
    scores: "PromptScores | None" = None


@dataclass(slots=True)  # written once; freezing would double the time to make one
class SamplingRow:
    """One draw from one row of logits.

    Args:
        slot: the sequence that the token will belong to.
        rules: of its request.
        key: (seed, sample index, position), the counter of the random stream; position is that of the new
            token.
        num_generated: how many tokens the sample has before it (for min_tokens), drafts included.
        token_index: which of the sequence's scheduled tokens gives the logits; -1 is the last.
        history: the prompt and the tokens drawn before, given only when `rules.needs_history`. It is the
            sequence's own and may grow: what counts are its first `key[2] - len(drafts)` tokens. Is it
            shorter, the token that the step before drew for `slot` follows.
        drafts: tokens not accepted yet that stand between `history` and this draw.
        num_candidates: above 0 nothing is drawn: a beam wants this many of the likeliest tokens.
    """

    slot: int
    rules: DrawRules
    key: tuple[int, int, int]
    num_generated: int
    token_index: int = -1
    history: "array[int] | None" = None
    drafts: tuple[int, ...] = ()
    num_candidates: int = 0

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.rules.params

    @property
    def stop_ids(self) -> frozenset[int]:
        """The request's stop ids."""
        return self.rules.stop_ids

    def tokens_before(self, newest: Mapping[int, int]) -> "array[int]":
        """Prompt, drawn tokens and drafts before the draw, `key[2]` of them; may be the sequence's own array.

        Args:
            newest: slot -> the token drawn by the step before, for a history that lacks it.

        Raises:
            EngineError: the scheduler gave too little.
        """
        history, count = self.history, self.key[2] - len(self.drafts)
        if history is None or len(history) < count - 1:
            known = None if history is None else len(history)
            raise EngineError(
                f"sequence {self.slot}: a draw at position {self.key[2]} comes with {known} tokens"
            )
        if len(history) == count and not self.drafts:
            return history
        tokens = history[:count]
        if len(tokens) < count:
            tokens.append(newest[self.slot])
        tokens.extend(self.drafts)
        return tokens


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt tokens whose log probability is wanted: positions `start` up to `start + len(targets)`.

    The token at position p is scored by the logits of position p - 1, so those are computed in this step:
    start - 1 >= num_computed_tokens, and start + len(targets) - 2 is the last scheduled position or before.

    Args:
        start: position of targets[0], 1 or more.
        targets: the tokens that stand there.
        params: `prompt_logprobs` and `prompt_logprob_token_ids` say how many others are told.
    """

    start: int
    targets: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Continued:
    """Sequences that go on from the step before: each computes the token that it drew there, and draws again.

    The rules are the same, the token is the last of its position, and nothing else is to be done for it. So
    a long run of steps is told by what changes in it.

    Args:
        step: number of the step before.
        rows: their rows among all draws of that step. There each had a part with one draw, from its last
            token, or went on too.
        tables: place among `rows` -> per KV group all blocks, of those that have others than before.
    """

    step: int
    rows: list[int]
    tables: dict[int, tuple[list[int], ...]]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Who runs in this step, and what happens to the blocks before it.

    Order in a step: `swap_out` (block, host block), `swap_in` (host block, block), `block_copies` (source,
    target), then KV writes and the forward pass. A step without sequences may still have the first three.

    `continued` sequences come before `sequences`; only an executor that `continues` gets any.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    finished_seq_ids: tuple[int, ...] = field(default=())
    continued: Continued | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to execute."""
        return not (self.num_sequences or self.swap_out or self.swap_in)

    @property
    def num_sequences(self) -> int:
        """Sequences that compute in this step."""
        return len(self.sequences) + (0 if self.continued is None else len(self.continued.rows))

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        num_continued = 0 if self.continued is None else len(self.continued.rows)
        return num_continued + sum([len(sequence.token_ids) for sequence in self.sequences])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position.

    The first entry is the token that stands there (drawn, or of the prompt); then the likeliest ones asked
    for, in order, the first one again if it is among them; then those asked for by id.

    Args:
        ids: token ids.
        values: natural logarithms (or logits, see `logprobs_mode`).
        ranks: 1 is the likeliest.
    """

    ids: tuple[int, ...]
    values: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrammarState:
    """Where a sample's grammar stands after a draw: may it end here, must it."""

    is_accepting: bool
    is_complete: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew: `token_ids[i]` belongs to the i-th SamplingRow of all sequences in order.

    Args:
        step: which.
        token_ids: None stands where there was nothing to draw from: `failures` says why, or the model's
            numbers have overflowed.
        logprobs: row -> what it asked for.
        candidates: row -> the likeliest tokens of a row with `num_candidates`, best first: ids and log
            probabilities of the processed logits.
        grammar: row -> where its grammar stands after the token.
        prompt_logprobs: seq_id -> one entry for each of its `scores.targets`.
        failures: row -> why its sampling parameters leave it no token.
        swap_s: seconds spent in copying swapped blocks; 0 when nobody measured.
    """

    step: int
    token_ids: list[int | None]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    candidates: Mapping[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    grammar: Mapping[int, GrammarState] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    swap_s: float = 0.0
