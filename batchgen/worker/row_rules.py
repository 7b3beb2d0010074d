"""RowRules: how a request draws, as arrays, made once and used at every of its draws."""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from batchgen.engine.scheduler_output import DrawRules, SamplingRow

Ids = npt.NDArray[np.int64]

_NONE: Ids = np.empty(0, dtype=np.int64)
# Rules of requests that are gone are forgotten when there are this many.
_MOST_KNOWN = 4096


class RowRules:
    """One request's rules for a vocabulary of V ids; ids from V on have no token and are left out.

    Attributes:
        way: temperature, top_k, top_p and min_p.
        allowed: the only ids that may be drawn, or None.
        bias_ids, bias_values: what is added to which logits.
        penalties: repetition, frequency and presence, or None where they change nothing.
        num_logprobs: how many of the likeliest are told beside the drawn token; None for nothing at all.
        is_edited: whether logits are changed before a draw, apart from `min_tokens`.
    """

    __slots__ = (
        "_stop_ids",
        "_words",
        "allowed",
        "bias_ids",
        "bias_values",
        "has_grammar",
        "is_edited",
        "logprob_ids",
        "min_tokens",
        "num_logprobs",
        "penalties",
        "rules",
        "thinking_budget",
        "way",
    )

    def __init__(self, rules: DrawRules, vocab_size: int):
        params = rules.params
        self.rules = rules
        self.way = (
            0.0 if params.is_greedy else params.temperature,
            min(params.top_k, vocab_size),
            params.top_p,
            params.min_p,
        )
        bias = {token: value for token, value in (params.logit_bias or {}).items() if token < vocab_size}
        self.bias_ids = _ids(bias)
        self.bias_values = np.array(list(bias.values()), dtype=np.float32)
        self.allowed = None if params.allowed_token_ids is None else _below(
            set(params.allowed_token_ids), vocab_size
        )  # fmt: skip
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.penalties = None if penalties == (1.0, 0.0, 0.0) else penalties
        self.min_tokens = params.min_tokens
        self._stop_ids = _below(rules.stop_ids, vocab_size)
        self._words = _BadWords(rules.bad_words, vocab_size) if rules.bad_words else None
        self.thinking_budget = params.thinking_token_budget
        self.has_grammar = params.structured_outputs is not None
        self.num_logprobs = params.logprobs
        self.logprob_ids = params.logprob_token_ids or ()
        if self.num_logprobs is None and (self.logprob_ids or params.num_samples > params.n):
            # Samples are ranked by how likely their tokens were.
            self.num_logprobs = 0
        self.is_edited = bool(
            bias
            or self.allowed is not None
            or self.penalties is not None
            or self._words is not None
            or self.thinking_budget is not None
            or self.has_grammar
        )

    @property
    def holds_back_ends(self) -> bool:
        """Whether its first `min_tokens` draws must not end it."""
        return self.min_tokens > 0 and self._stop_ids.size > 0

    def edits(self, row: SamplingRow) -> bool:
        """Whether the logits of a draw are changed before it."""
        return self.is_edited or (row.num_generated < self.min_tokens and self._stop_ids.size > 0)

    def held_back(self, row: SamplingRow, history: "array[int] | None") -> Ids:
        """The ids that must not come next: the last of bad words, and what would end the sample too soon."""
        held = _NONE
        if self._words is not None and history is not None:
            held = self._words.held_back(history)
        if row.num_generated < self.min_tokens and self._stop_ids.size:
            held = np.concatenate([held, self._stop_ids]) if held.size else self._stop_ids
        return held


class KnownRules:
    """The RowRules of the requests that draw, each made at its first draw."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        # By identity: a request hands in the same object at every step, and RowRules keep it alive.
        self._known: dict[int, RowRules] = {}

    def of(self, rows: Iterable[SamplingRow]) -> list[RowRules]:
        """The rules of each row."""
        known = self._known
        found = []
        for row in rows:
            each = known.get(id(row.rules))
            if each is None:
                each = known[id(row.rules)] = RowRules(row.rules, self._vocab_size)
            found.append(each)
        if len(known) > _MOST_KNOWN:
            self._known = {id(each.rules): each for each in found}
        return found


class _BadWords:
    """Token sequences whose last id is held back where the others stand before it."""

    def __init__(self, words: Iterable[tuple[int, ...]], vocab_size: int):
        self._single = _below((word[0] for word in words if len(word) == 1), vocab_size)
        # By the id before the last one: (all before the last, the last).
        self._by_end: dict[int, list[tuple[array[int], int]]] = {}
        for word in words:
            if len(word) > 1 and word[-1] < vocab_size:
                self._by_end.setdefault(word[-2], []).append((array("i", word[:-1]), word[-1]))

    def held_back(self, history: "array[int]") -> Ids:
        ends = self._by_end.get(history[-1], ()) if history else ()
        found = [last for begin, last in ends if history[-len(begin) :] == begin]
        return np.concatenate([self._single, _ids(found)]) if found else self._single


def _ids(ids: Iterable[int]) -> Ids:
    return np.array(list(ids), dtype=np.int64)


def _below(ids: Iterable[int], vocab_size: int) -> Ids:
    return _ids(sorted(index for index in ids if 0 <= index < vocab_size))
