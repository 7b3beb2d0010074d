"""SlotMatcher: where a sample's text stands in its grammar; a cache of a function of the tokens drawn."""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchgen.engine.scheduler_output import DrawRules, GrammarState
from batchgen.errors import BatchgenError
from batchgen.structured.vocabulary import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Tokens = array[int]


class GrammarError(BatchgenError):
    """A grammar that grew too complex on the way, or has no way on."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The ids that end a request's texts, as a set and as a mask.

    `not_library` is the complement of those that the library takes for ends, which are not always the same.
    """

    ids: frozenset[int]
    bits: Bits
    not_library: Bits


class SlotMatcher:
    """A matcher that can be moved to any text of its request.

    A fork, a preemption, a beam that goes on from another or a refused draft need no bookkeeping: the next
    text only differs further back.

    Args:
        matcher: of the library, standing after `tokens`.
        rules: of the request.
        ends: what ends a text.
        tokens: what the matcher has taken.
    """

    __slots__ = (
        "_bits",
        "_ends",
        "_has_bits",
        "_is_over",
        "_is_refused",
        "_matcher",
        "_num_refused",
        "rules",
        "tokens",
    )

    def __init__(
        self,
        matcher: "LLMatcher",
        rules: DrawRules,
        ends: "Ends",
        tokens: "Tokens | None" = None,
    ):
        self._matcher, self.rules, self._ends = matcher, rules, ends
        self.tokens = array("i") if tokens is None else tokens[:]
        self._bits = np.empty_like(ends.bits)
        self._has_bits = False
        self._settle()

    def fork(self) -> "SlotMatcher":
        """Another one at the same place; cheap, for what was computed of the grammar is shared."""
        return SlotMatcher(self._matcher.deep_copy(), self.rules, self._ends, self.tokens)

    def move(self, tokens: "Tokens") -> None:
        """Stand after these tokens: all that the sample has drawn.

        Raises:
            GrammarError: the library cannot follow.
        """
        kept = common_length(self.tokens, tokens)
        if kept == len(self.tokens) == len(tokens) and not self._num_refused:
            return
        self._has_bits = False
        if kept < len(self.tokens):
            self._matcher.rollback(len(self.tokens) - kept)
            del self.tokens[kept:]
        rest = tokens[kept:].tolist()
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self.tokens.extend(rest[:taken])
        self._settle(rest[taken:])
        self._check()

    def mask(self) -> Bits:
        """What may stand next: [ceil(V / 32)], good until the next move; all, if the text left the grammar.

        Raises:
            GrammarError: the grammar has no way on, or became too complex.
        """
        if not self._has_bits:
            self._fill()
        return self._bits

    def state(self) -> GrammarState:
        """Whether the text may end here, and whether it must."""
        if self._is_refused:
            return GrammarState(is_accepting=False, is_complete=False)
        if self._is_over:
            return GrammarState(is_accepting=True, is_complete=True)
        if not self._matcher.is_accepting():
            return GrammarState(is_accepting=False, is_complete=False)
        # The library may notice late that nothing can follow. The next step needs this mask anyway.
        can_go_on = bool((self.mask() & ~self._ends.bits).any())
        return GrammarState(is_accepting=True, is_complete=not can_go_on)

    def _settle(self, refused: "list[int] | tuple[()]" = ()) -> None:
        """Say what it means that the matcher stands here and did not take `refused`."""
        self._num_refused = len(refused)
        self._is_over = self._matcher.is_stopped()
        self._is_refused = False
        if refused:
            # After the end of the grammar only ends can stand.
            self._is_over = self._matcher.is_accepting() and self._ends.ids.issuperset(refused)
            self._is_refused = not self._is_over

    def _fill(self) -> None:
        if self._is_refused:
            self._bits.fill(-1)
        elif self._is_over:
            self._bits[:] = self._ends.bits
        else:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
            self._bits &= self._ends.not_library
            if self._matcher.is_accepting():
                self._bits |= self._ends.bits
        self._has_bits = True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())


def common_length(left: "Tokens", right: "Tokens") -> int:
    """How many tokens two texts have in common at their beginning."""
    count = min(len(left), len(right))
    if not count:
        return 0
    unequal = np.asarray(left)[:count] != np.asarray(right)[:count]
    first = int(unequal.argmax())
    return first if unequal[first] else count
