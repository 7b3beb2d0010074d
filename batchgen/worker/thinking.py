"""Thinking budget: where a thinking section stands, and which token ends it once it is too long."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.errors import ConfigError, UnknownNameError
from batchgen.token_search import last_place
from batchgen.tokenizer import Tokenizer

DEFAULT_MARKS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The token ids that begin and end a thinking section; neither is empty."""

    start: "array[int]"
    end: "array[int]"

    def forced_token(self, history: "array[int]", budget: int) -> int | None:
        """The only token that may follow, or None if any may.

        A function of the history alone: inside an open section of `budget` tokens or more, the end marks are
        forced one after the other; a beginning of them that stands there already is gone on with.
        """
        begin = _last_end_of(self.start, history)
        if begin is None or len(history) - begin < budget:
            return None
        closed = _last_end_of(self.end, history)
        if closed is not None and closed > begin:
            return None
        for length in range(min(len(self.end) - 1, len(history) - begin), 0, -1):
            if history[-length:] == self.end[:length]:
                return self.end[length]
        return self.end[0]


def find_marks(
    tokenizer: Tokenizer, vocab_size: int, reasoning_config: Mapping[str, str] | None
) -> ThinkingMarks | str:
    """The marks of a model, or why it has none.

    Args:
        tokenizer: the model's.
        vocab_size: ids from here on cannot be drawn.
        reasoning_config: `reasoning_start_str` and `reasoning_end_str`; marks given so may be several tokens.
            Without it they are <think> and </think>, which must be tokens of the model's own.

    Raises:
        ConfigError: a `reasoning_config` of another form.
    """
    for name, text in (reasoning_config or {}).items():
        if name not in DEFAULT_MARKS:
            raise UnknownNameError("setting", name, DEFAULT_MARKS, "engine.reasoning_config")
        if not isinstance(text, str) or not text:
            raise ConfigError(f"engine setting reasoning_config.{name} must be a text; got {text!r}")
    texts = {**DEFAULT_MARKS, **(reasoning_config or {})}
    found = []
    for name in DEFAULT_MARKS:
        text = texts[name]
        ids = array("i", tokenizer.encode(text, add_special_tokens=False))
        if not ids or max(ids) >= vocab_size or (reasoning_config is None and len(ids) > 1):
            return (
                f"the model's vocabulary has no token {text!r}; say how its thinking begins and ends "
                f"(reasoning_config: {{reasoning_start_str, reasoning_end_str}}), or leave "
                f"thinking_token_budget out"
            )
        found.append(ids)
    return ThinkingMarks(*found)


def _last_end_of(mark: "array[int]", history: "array[int]") -> int | None:
    """The place behind the last occurrence of a mark."""
    place = last_place(mark.tobytes(), history.tobytes(), len(history))
    return None if place is None else place + len(mark)
