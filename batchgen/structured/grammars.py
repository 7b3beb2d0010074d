"""Grammars: StructuredOutputsParams -> matchers; each grammar is compiled once."""

import pickle
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING

from batchgen.errors import ConfigError
from batchgen.sampling_parts import StructuredOutputsParams
from batchgen.structured.grammar import explain, grammar_text
from batchgen.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Grammars kept. A row may bring its own; those of rows in flight must be among them, or are compiled again.
_NUM_KEPT = 256


class Grammars:
    """The grammars of one vocabulary.

    Args:
        vocabulary: of the model. Without a backend, grammars are only checked.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[str, LLMatcher | None] = OrderedDict()

    def refusal(self, params: StructuredOutputsParams) -> str | None:
        """Why these cannot be enforced, beginning with the key; None if they can."""
        try:
            if params.whitespace_pattern:
                self._check_whitespace(params.whitespace_pattern)
            self._prototype(params)
        except ConfigError as refused:
            return str(refused)
        return None

    def matcher(self, params: StructuredOutputsParams) -> "LLMatcher":
        """A new matcher at the beginning of the grammar.

        Raises:
            ConfigError: it cannot be enforced.
        """
        prototype = self._prototype(params)
        assert prototype is not None, "a matcher needs a tokenizer"
        return prototype.deep_copy()

    def _prototype(self, params: StructuredOutputsParams) -> "LLMatcher | None":
        text = _written(pickle.dumps(params))
        if text in self._compiled:
            self._compiled.move_to_end(text)
            return self._compiled[text]
        prototype, error = self._compile(text)
        if error:
            raise ConfigError(explain(params, error))
        self._compiled[text] = prototype
        if len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return prototype

    def _compile(self, text: str) -> "tuple[LLMatcher | None, str]":
        """A matcher, and the library's words where the grammar cannot be enforced."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        table = self._vocabulary.table
        if table is None:
            is_error, said = LLMatcher.validate_grammar_with_warnings(text, None, limits=limits)
            return None, said[0] if is_error else ""
        matcher = LLMatcher(table, text, log_level=0, limits=limits)
        if not matcher.is_error():
            # A grammar without any text is found out only here. It also is the slow mask of a grammar.
            matcher.compute_bitmask()
        return matcher, matcher.get_error()

    def _check_whitespace(self, pattern: str) -> None:
        alone = StructuredOutputsParams(regex=pattern)
        try:
            self._prototype(alone)
        except ConfigError as refused:
            raise ConfigError(str(refused).replace(".regex", ".whitespace_pattern", 1)) from None


@lru_cache(maxsize=_NUM_KEPT)
def _written(packed: bytes) -> str:
    """The text of a grammar. Rows bring equal ones by the million, as objects of their own.

    Packing one takes a small part of the time of writing its text, and keeps the order of its keys.
    """
    return grammar_text(pickle.loads(packed))
