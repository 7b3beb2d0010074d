"""Sampler: rows of logits -> tokens and what is told of them, each row by its own rules and random stream.

A row's token is a function of its logits, rules, history and key alone, computed in an order that the row
fixes. So neighbours, batch size and thread count cannot change a draw.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import DrawRules, GrammarState, SamplingRow, TokenLogprobs
from batchgen.kernels.ops import Kernels
from batchgen.kernels.sampling import Draws
from batchgen.structured import DEAD_END
from batchgen.structured.masks import GrammarMasks
from batchgen.worker.draw_rows import DrawRows
from batchgen.worker.logits import edit_logits
from batchgen.worker.logprobs import LogprobReader
from batchgen.worker.row_rules import KnownRules, RowRules
from batchgen.worker.thinking import ThinkingMarks

ALL_HELD_BACK = "allowed_token_ids, bad_words and min_tokens together hold back every token"


@dataclass(slots=True)
class Drawn:
    """What was drawn from a batch of rows; the fields are those of StepResult."""

    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    grammar: dict[int, GrammarState] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Draws tokens.

    Args:
        kernels: of the model.
        vocab_size: ids from here on have no token and are never drawn.
        logprobs_mode: what `logprobs` tells.
        marks: of thinking sections; None where a budget is refused.
        grammar: masks of structured outputs; None where those are refused.
    """

    def __init__(
        self,
        kernels: Kernels,
        vocab_size: int,
        *,
        logprobs_mode: str = "raw_logprobs",
        marks: ThinkingMarks | None = None,
        grammar: GrammarMasks | None = None,
    ):
        self.vocab_size = vocab_size
        self.grammar = grammar
        self.reader = LogprobReader(kernels, logprobs_mode)
        self._kernels = kernels
        self._known = KnownRules(vocab_size)
        self._marks = marks
        self._copies = torch.empty(0)

    def rows(self, rows: Sequence[SamplingRow]) -> DrawRows:
        """Draws in the form in which `draw` takes them without looking at each."""
        return DrawRows.of(rows, self._known.of(rows))

    def draw(
        self, logits: Tensor, rows: Sequence[SamplingRow] | DrawRows, newest: Mapping[int, int]
    ) -> Drawn:
        """One token per row; of equal logits the lowest id is taken by a greedy row.

        None for a row that holds a NaN, or whose largest logit is infinite: there is nothing to draw from;
        `failures` says why if it is for what the row's rules hold back.

        Args:
            logits: [R, W] on the CPU or a device, W at least the vocabulary; may be changed in place.
            rows: the draw of each row.
            newest: slot -> the token drawn by the step before, for histories that lack it.
        """
        logits = logits.to(torch.float32).contiguous()
        draws = rows if isinstance(rows, DrawRows) else self.rows(rows)
        if draws.is_plain:
            return Drawn(self._tokens(logits[:, : self.vocab_size], draws.draws()))
        return self._draw_specially(logits, draws, newest)

    def _draw_specially(self, logits: Tensor, draws: DrawRows, newest: Mapping[int, int]) -> Drawn:
        """As `draw`, when there is more to do for some rows than to draw."""
        rows, known = draws.rows, draws.known
        edited = [index for index, rules in enumerate(known) if rules.edits(rows[index])]
        beams = [index for index, row in enumerate(rows) if row.num_candidates]
        told = [
            index
            for index, rules in enumerate(known)
            if rules.num_logprobs is not None and not rows[index].num_candidates
        ]
        raw_rows = [] if self.reader.is_processed else _both(told, edited)
        raw = self._copy(logits, raw_rows)
        # As in transformers' search, a beam's log probabilities are taken before anything is changed.
        totals = self._normalise(logits, beams, edited, known)
        failures: dict[int, str] = {}
        view = logits[:, : self.vocab_size]
        has_grammar = False
        if edited:
            edit_logits(logits, rows, known, newest, self._kernels, self._marks)
            has_grammar = self.grammar is not None and any(rules.has_grammar for rules in known)
            if has_grammar and self.grammar is not None:
                failures = self.grammar.apply(view, rows, newest)
        tokens: list[int | None] = [None] * len(rows)
        if len(beams) < len(rows):
            tokens = self._tokens(view, draws.draws(self._replaced(len(rows), told)))
        drawn = Drawn(tokens, failures=failures)
        self._find_candidates(view, rows, beams, totals, drawn)
        self._find_failures(view, known, edited, drawn)
        if has_grammar and self.grammar is not None:
            drawn.grammar = self.grammar.advance(rows, tokens)
        if raw_rows:
            self._tell(raw, raw_rows, known, drawn)
            raw_ones = set(raw_rows)
            told = [index for index in told if index not in raw_ones]
        self._tell(logits if len(told) == len(rows) else logits[told], told, known, drawn)
        return drawn

    def accepts(self, rules: DrawRules, token_ids: Sequence[int]) -> bool:
        """Whether a grammar's sample may end after these tokens."""
        return self.grammar is not None and self.grammar.accepts(rules, token_ids)

    def forget(self, slots: Iterable[int]) -> None:
        """Samples that have ended."""
        if self.grammar is not None:
            self.grammar.drop(slots)

    def _tokens(self, logits: Tensor, draws: Draws) -> list[int | None]:
        return drawn_tokens(self._kernels.sample(logits, draws))

    def _replaced(self, num_rows: int, told: Sequence[int]) -> Tensor | None:
        """Which rows of logits become what was drawn from."""
        if not self.reader.is_processed or not told:
            return None
        is_replaced = torch.zeros(num_rows, dtype=torch.bool)
        is_replaced[list(told)] = True
        return is_replaced

    def _normalise(
        self, logits: Tensor, beams: Sequence[int], edited: Sequence[int], known: Sequence[RowRules]
    ) -> dict[int, float]:
        """Row of a beam -> what is to be taken from its logits, for those that are about to be changed.

        From a row with a penalty that multiplies it is taken now.
        """
        changed = beams if logits.shape[1] > self.vocab_size else _both(beams, edited)
        if not changed:
            return {}
        part = logits if len(changed) == len(logits) else logits[changed]
        log_total = self._kernels.score_tokens(part, *_no_tokens(len(changed))).log_total
        totals = dict(zip(changed, log_total.tolist(), strict=True))
        for index in changed:
            penalties = known[index].penalties
            if penalties is not None and penalties[0] != 1.0:
                logits[index] -= totals[index]
                totals[index] = 0.0
        return totals

    def _find_candidates(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        beams: Sequence[int],
        totals: Mapping[int, float],
        drawn: Drawn,
    ) -> None:
        """The likeliest tokens of every beam; the best is its token, and there is none if it overflowed."""
        if not beams:
            return
        part = logits if len(beams) == len(logits) else logits[beams]
        numbers = [min(rows[index].num_candidates, self.vocab_size) for index in beams]
        nothing, _ = _no_tokens(len(beams))
        scores = self._kernels.score_tokens(part, nothing, torch.tensor(numbers))
        own = scores.log_total.tolist()
        taken = np.array([totals.get(index, own[place]) for place, index in enumerate(beams)])
        values = (scores.top_values.numpy() - taken[:, None]).tolist()
        ids = scores.top_ids.tolist()
        for place, index in enumerate(beams):
            drawn.token_ids[index] = None
            if not np.isfinite(values[place][0]):
                continue
            count = sum(1 for value in values[place][: numbers[place]] if value > float("-inf"))
            drawn.candidates[index] = (ids[place][:count], values[place][:count])
            drawn.token_ids[index] = ids[place][0]

    def _find_failures(
        self, logits: Tensor, known: Sequence[RowRules], edited: Sequence[int], drawn: Drawn
    ) -> None:
        """Say of rows without a token whether their rules left none."""
        for index in drawn.failures:
            drawn.token_ids[index] = None
            drawn.candidates.pop(index, None)
        for index in edited:
            is_missing = drawn.token_ids[index] is None and index not in drawn.failures
            if is_missing and bool((logits[index] == float("-inf")).all()):
                drawn.failures[index] = DEAD_END if known[index].has_grammar else ALL_HELD_BACK

    def _copy(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of logits, in memory that the next call uses again."""
        size = len(rows) * logits.shape[1]
        if self._copies.numel() < size or self._copies.device != logits.device:
            self._copies = torch.empty(size, device=logits.device)
        copies = self._copies[:size].view(len(rows), logits.shape[1])
        if rows:
            torch.index_select(logits, 0, torch.tensor(rows, device=logits.device), out=copies)
        return copies

    def _tell(self, logits: Tensor, rows: Sequence[int], known: Sequence[RowRules], drawn: Drawn) -> None:
        """Log probabilities of some rows: logits [S, W]; those without a token are left out."""
        places = [place for place, index in enumerate(rows) if drawn.token_ids[index] is not None]
        if not places:
            return
        if len(places) < len(rows):
            logits, rows = logits[places], [rows[place] for place in places]
        entries = self.reader.read(
            logits[:, : self.vocab_size] if self.reader.is_processed else logits,
            [drawn.token_ids[index] or 0 for index in rows],
            [known[index].num_logprobs or 0 for index in rows],
            [known[index].logprob_ids for index in rows],
        )
        drawn.logprobs.update(zip(rows, entries, strict=True))


def drawn_tokens(found: Tensor) -> list[int | None]:
    """What a kernel drew; it says -1 where there was nothing to draw from."""
    tokens = found.tolist()
    # Nearly always there is something, and to look for the least is quicker than to look at each.
    return tokens if min(tokens, default=0) >= 0 else [None if token < 0 else token for token in tokens]


def _no_tokens(rows: int) -> tuple[Tensor, Tensor]:
    """No tokens, and no likeliest ones, for `Kernels.score_tokens`."""
    return torch.zeros((rows, 0), dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)


def _both(some: Sequence[int], others: Iterable[int]) -> list[int]:
    among = set(others)
    return [index for index in some if index in among]
