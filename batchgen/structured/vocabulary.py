"""Vocabulary: a model's tokens as bytes, for matching them with grammars. Made at the first use."""

import json
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

# A noncharacter, which no text for interchange holds; in the library's names of control tokens.
HIDING = "\ufdd0"


def hidden_name(control_token: str) -> str:
    """The name that the library knows a control token by."""
    return control_token[:1] + HIDING + control_token[1:]


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
            return LLTokenizer(_hide_names(self._backend.to_str()), n_vocab=self._size, eos_token=ends)
        except ValueError as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"structured_outputs: the model's tokenizer cannot serve ({reason})") from error

    def bits(self, ids: Iterable[int]) -> Bits:
        """Token ids as a mask: [ceil(V / 32)]."""
        chosen = np.zeros(-(-self._size // 32) * 32, dtype=np.uint8)
        chosen[[index for index in ids if index < self._size]] = 1
        return np.packbits(chosen, bitorder="little").view(np.int32)


def _hide_names(tokenizer: str) -> str:
    """A tokenizer's JSON with other names for its control tokens.

    Where a grammar leaves one way only, the library tokenizes the text ahead, and would take a control token
    for text that is spelled like it.
    """
    read = json.loads(tokenizer)
    model = read["model"]
    control = [token for token in read["added_tokens"] if token["special"]]
    hidden = {token["content"]: hidden_name(token["content"]) for token in control}
    for token in control:
        token["content"] = hidden[token["content"]]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {hidden.get(piece, piece): index for piece, index in vocabulary.items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    return json.dumps(read)
