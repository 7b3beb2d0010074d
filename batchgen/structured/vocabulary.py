"""Vocabulary: a model's tokens as bytes, for matching them with grammars. Made at the first use."""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# A set of token ids: bit i % 32 of word i // 32 stands for token i.
Bits = npt.NDArray[np.int32]


class Vocabulary:
    """What grammars need of a tokenizer.

    Args:
        tokenizer: `batchgen.tokenizer.Tokenizer`, or one without a `backend`, which serves for checks only.
        end_ids: ids that end a text.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()):
        self._backend = getattr(tokenizer, "backend", None)
        self._size = int(tokenizer.vocab_size)
        self.end_ids = frozenset(index for index in end_ids if 0 <= index < self._size)
        self.special_ids = frozenset(tokenizer.special_tokens.values())
        # The library wants an end in any case; where the model has none, masks leave this one out again.
        self.library_end_ids = self.end_ids or frozenset({min(self.special_ids, default=0)})

    @cached_property
    def table(self) -> "LLTokenizer | None":
        """The library's form of it; None where there is no backend.

        Raises:
            ConfigError: a kind of tokenizer whose tokens have no fixed bytes.
        """
        from llguidance import LLTokenizer

        if self._backend is None:
            return None
        ends = sorted(self.library_end_ids)
        try:
            return LLTokenizer(self._backend.to_str(), n_vocab=self._size, eos_token=ends)
        except ValueError as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"structured_outputs: the model's tokenizer cannot serve ({reason})") from error

    def bits(self, ids: Iterable[int]) -> Bits:
        """Token ids as a mask: [ceil(V / 32)]."""
        chosen = np.zeros(-(-self._size // 32) * 32, dtype=np.uint8)
        chosen[[index for index in ids if index < self._size]] = 1
        return np.packbits(chosen, bitorder="little").view(np.int32)
