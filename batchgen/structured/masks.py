"""GrammarMasks: forbids, in a batch of logits, what no grammar allows; and says where the grammars stand."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from batchgen.engine.scheduler_output import DrawRules, GrammarState, SamplingRow
from batchgen.errors import ConfigError
from batchgen.sampling_params import SamplingParams
from batchgen.structured.blocking import Blocker
from batchgen.structured.grammar import explain
from batchgen.structured.grammars import Grammars
from batchgen.structured.matcher import Ends, GrammarError, SlotMatcher, common_length
from batchgen.structured.vocabulary import Vocabulary


class GrammarMasks:
    """The grammars of the rows that have one; other rows are left alone.

    Args:
        tokenizer: the model's. Nothing is made of it before the first grammar.
        vocab_size: V, the width of the logits.
        eos_token_ids: every id that ends a text of the model.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Iterable[int]):
        self._vocabulary = Vocabulary(tokenizer, (index for index in eos_token_ids if index < vocab_size))
        self._grammars = Grammars(self._vocabulary)
        self._blocker = Blocker()
        self._slots: dict[int, SlotMatcher] = {}
        # Row -> the tokens before its draw, between `apply` and `advance`.
        self._texts: dict[int, array[int]] = {}

    def refusal(self, params: SamplingParams) -> str | None:
        """Why the grammar of these cannot be enforced; None if it can, or there is none."""
        grammar = params.structured_outputs
        return None if grammar is None else self._grammars.refusal(grammar)

    def apply(self, logits: Tensor, rows: Sequence[SamplingRow], newest: Mapping[int, int]) -> dict[int, str]:
        """Forbid what the rows' grammars do not allow next; of a drafted text that left its grammar, nothing.

        Args:
            logits: [R, V] float32, changed in place; of rows[i] is row i.
            rows: the draws.
            newest: slot -> the token of the step before, for a history that lacks it.

        Returns: row -> why nothing can be drawn for it.
        """
        failures: dict[int, str] = {}
        self._texts.clear()
        self._blocker.begin(logits)
        for index, row in enumerate(rows):
            grammar = row.params.structured_outputs
            if grammar is None:
                continue
            text = self._texts[index] = row.tokens_before(newest)[row.rules.num_prompt_tokens :]
            try:
                matcher = self._matcher(row, text)
                matcher.move(text)
                self._blocker.block(index, matcher.mask())
            except ConfigError as error:
                failures[index] = str(error)
            except GrammarError as error:
                failures[index] = explain(grammar, str(error))
                del self._slots[row.slot]
        self._blocker.finish(logits)
        return failures

    def advance(self, rows: Sequence[SamplingRow], tokens: Sequence[int | None]) -> dict[int, GrammarState]:
        """Where the grammars stand after the draw; a beam's (`num_candidates`) stands where it stood.

        Rows after a draft that was not drawn are left out, as are those without a token.
        """
        states: dict[int, GrammarState] = {}
        drawn: dict[int, tuple[int, ...]] = {}
        for index, text in self._texts.items():
            row, token = rows[index], tokens[index]
            matcher = self._slots.get(row.slot)
            if matcher is None or (token is None and not row.num_candidates):
                continue
            if row.drafts != drawn.get(row.slot, ()):
                continue
            if token is not None and not row.num_candidates:
                drawn[row.slot] = (*row.drafts, token)
                text.append(token)
            try:
                matcher.move(text)
                states[index] = matcher.state()
            except GrammarError:
                # The next row of this sample will say so.
                del self._slots[row.slot]
        return states

    def accepts(self, rules: DrawRules, tokens: Sequence[int]) -> bool:
        """Whether a sample with these drawn tokens, the whole of it, is a text of its grammar."""
        try:
            matcher = self._first(rules)
            matcher.move(array("i", tokens))
            return matcher.state().is_accepting
        except (ConfigError, GrammarError):
            return False

    def drop(self, slots: Iterable[int]) -> None:
        """Forget samples that have ended."""
        for slot in slots:
            self._slots.pop(slot, None)

    def _matcher(self, row: SamplingRow, text: "array[int]") -> SlotMatcher:
        found = self._slots.get(row.slot)
        if found is None or found.rules is not row.rules:
            # Of a fork, the other samples of its request stand closest.
            siblings = [each for each in self._slots.values() if each.rules is row.rules]
            if siblings:
                found = max(siblings, key=lambda each: common_length(each.tokens, text)).fork()
            else:
                found = self._first(row.rules)
            self._slots[row.slot] = found
        return found

    def _first(self, rules: DrawRules) -> SlotMatcher:
        grammar = rules.params.structured_outputs
        assert grammar is not None
        # A control token that the user ends texts with, too; text that does so is the grammar's own matter.
        vocabulary = self._vocabulary
        ids = vocabulary.end_ids | (rules.stop_ids & vocabulary.special_ids)
        ends = Ends(ids, vocabulary.bits(ids), ~vocabulary.bits(vocabulary.library_end_ids))
        return SlotMatcher(self._grammars.matcher(grammar), rules, ends)
