"""What the caller's side makes of a request before the core gets it: a cut prompt, bad words as tokens."""

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from batchgen.engine.messages import EngineRequest
from batchgen.errors import ConfigError

_ID_BYTES = 4  # of a token id, as `pack_ids` packs it


class Encoder(Protocol):
    """The part of a tokenizer that makes tokens of text."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of a text."""


def truncated(request: EngineRequest, max_model_len: int) -> EngineRequest:
    """The request with the last `truncate_prompt_tokens` tokens of its prompt; -1: all but one that fit."""
    wanted = request.params.truncate_prompt_tokens
    if wanted is None:
        return request
    most = max_model_len - 1 if wanted == -1 else wanted
    if len(request.prompt_token_ids) <= most * _ID_BYTES:
        return request
    return replace(request, prompt_token_ids=request.prompt_token_ids[-most * _ID_BYTES :])


class BadWords:
    """`SamplingParams.bad_words` as token ids; a list of words is encoded once while it is in use."""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        # A job's rows have one list; those of a server are forgotten again.
        self._known = lru_cache(maxsize=256)(self._encode)

    def ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Every word as it is spelled at the beginning of a text and behind a space.

        A word may be spelled by other tokens than the tokenizer's own choice; those are not kept out.

        Raises:
            ConfigError: a word that has no tokens.
        """
        return self._known(words)

    def _encode(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                ids = tuple(self._encoder.encode(text, add_special_tokens=False, allow_special_tokens=False))
                if not ids:
                    raise ConfigError(
                        f"sampling parameter 'bad_words': {word!r} has no tokens in this model's vocabulary"
                    )
                found[ids] = None
        return tuple(found)
