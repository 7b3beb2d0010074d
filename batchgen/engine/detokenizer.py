"""Detokenizer: the text of a growing list of token ids, never half a character; and stop strings in it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

# What a decoder writes for bytes that are no character (yet). An unfinished one has up to three bytes.
_REPLACEMENT = "\ufffd"
_MOST_UNFINISHED = 3
# After so many tokens without an end of character the bytes are taken for what they are: garbage.
_LONGEST_WINDOW = 64


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of token ids."""


class Detokenizer:
    """Text of one sample.

    `text` grows as ids are appended and never ends inside a character. `finish` gives the decoder's text of
    all ids, which begins with `text` except for decoders that rewrite what they have written.

    Only a window of the last ids is decoded anew for each one: those since the last whole character, and
    before them those that made that one, because some decoders treat the first id differently.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self.ids: list[int] = []
        self.text = ""
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._spaces_between_special_tokens = spaces_between_special_tokens
        self._window_start = 0
        self._whole = 0  # ids before this one end with a whole character
        self._num_shown = 0  # characters of the window's text that `text` has

    def append(self, token_id: int) -> None:
        """Take in one id; `text` grows by the characters that it completes."""
        self.ids.append(token_id)
        window = self._decode(self.ids[self._window_start :])
        unfinished = len(window) - len(window.rstrip(_REPLACEMENT))
        is_garbage = len(self.ids) - self._whole > _LONGEST_WINDOW
        shown = len(window) - (0 if is_garbage else min(unfinished, _MOST_UNFINISHED))
        if shown > self._num_shown:
            self.text += window[self._num_shown : shown]
            self._num_shown = shown
        if shown == len(window):
            context = self._decode(self.ids[self._whole :])
            # A context of nothing but skipped tokens would not shield the next id from being first.
            if context or len(self.ids) - self._window_start > _LONGEST_WINDOW:
                self._window_start = self._whole
                self._num_shown = len(context)
            self._whole = len(self.ids)

    def finish(self) -> str:
        """The decoder's text of all ids."""
        self.text = self._decode(self.ids)
        return self.text

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(
            ids,
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces_between_special_tokens,
        )


class StopMatch(NamedTuple):
    """A stop string in a text, and where."""

    stop: str
    start: int
    end: int


class StopStrings:
    """Looks for stop strings in a text that grows at its end.

    Of several that occur, the one that is complete first wins, and of those the longest: as if characters
    came one by one, so that the cut does not depend on how the model spells the text in tokens.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = sorted(set(stops), key=len, reverse=True)

    def find(self, text: str, num_known: int) -> StopMatch | None:
        """The first match that ends after the first `num_known` characters."""
        best: StopMatch | None = None
        for stop in self._stops:
            start = text.find(stop, max(num_known - len(stop) + 1, 0))
            if start >= 0 and (best is None or start + len(stop) < best.end):
                best = StopMatch(stop, start, start + len(stop))
        return best

    def num_held_back(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
