"""ControlTextGuard: keeps control-token text that stands inside data plain text.

A rendered prompt mixes the template's own control tokens, which must become single ids, with the user's
data, in which the same characters are only characters. Data is marked before it is rendered; afterwards an
occurrence of a control token that touches marked data is text, any other is the token.

The marks are Unicode noncharacters, which no text for interchange holds; where data has them all the same,
they are escaped, so nothing is lost.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

OPEN, CLOSE, ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2"
_SHIFT = 0x10  # an escaped mark is ESCAPE and the noncharacter 16 further on

_RESERVED = re.compile(f"[{OPEN}{CLOSE}{ESCAPE}]")
_MARKUP = re.compile(f"{OPEN}|{CLOSE}|{ESCAPE}([\ufde0-\ufde2])")


class ControlTextGuard:
    """Marks control-token text in data, and tells it apart after rendering.

    Args:
        control_tokens: the texts of the special tokens.
    """

    def __init__(self, control_tokens: Iterable[str]):
        tokens = sorted({token for token in control_tokens if token}, key=len, reverse=True)
        # Longest first: at one place the longest token wins, as in the tokenizer.
        self._tokens = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        # Data may also hold a piece of a token whose rest is in the next column or in the template.
        self._heads = tuple(sorted({token[:n] for token in tokens for n in range(1, len(token))}))
        self._tails = tuple(sorted({token[-n:] for token in tokens for n in range(1, len(token))}))

    def guard(self, value: str) -> str:
        """`value` with its control-token text marked; `value` itself, the same object, when there is none."""
        if self._tokens is None:
            return _escape(value)
        begins_inside, ends_inside = value.startswith(self._tails), value.endswith(self._heads)
        if not begins_inside and not ends_inside and self._tokens.search(value) is None:
            return _escape(value)
        spans = [match.span() for match in self._tokens.finditer(value)]
        if begins_inside:
            spans.append((0, max(len(tail) for tail in self._tails if value.startswith(tail))))
        if ends_inside:
            spans.append(
                (len(value) - max(len(head) for head in self._heads if value.endswith(head)), len(value))
            )
        pieces, at = [], 0
        for begin, end in _joined(spans):
            pieces += [_escape(value[at:begin]), OPEN, _escape(value[begin:end]), CLOSE]
            at = end
        pieces.append(_escape(value[at:]))
        return "".join(pieces)

    def tell_apart(self, text: str, prefix: str) -> str:
        """Rendered text -> the same without marks, and `prefix` before each genuine control token."""
        plain, guarded = _read_marks(text)
        if self._tokens is None:
            return plain
        pieces, at, start = [], 0, 0
        while match := self._tokens.search(plain, start):
            begin, end = match.span()
            if any(first < end and begin < last for first, last in guarded):
                # Not a token; but one may begin inside it.
                start = begin + 1
                continue
            pieces += [plain[at:begin], prefix, match.group()]
            at = start = end
        pieces.append(plain[at:])
        return "".join(pieces)


def guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """A conversation, say, whose texts are all marked as data by `guard`."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {key: guarded(each, guard) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [guarded(each, guard) for each in value]
    return value


def has_marks(text: str) -> bool:
    """Whether rendered text holds marked (or escaped) data."""
    return _RESERVED.search(text) is not None


def unguard(text: str) -> str:
    """Rendered text as a reader should see it: without marks."""
    return _read_marks(text)[0] if has_marks(text) else text


def _escape(value: str) -> str:
    if _RESERVED.search(value) is None:
        return value
    return _RESERVED.sub(lambda match: ESCAPE + chr(ord(match.group()) + _SHIFT), value)


def _read_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the spans of it that were marked."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    at = length = depth = begin = 0
    for match in _MARKUP.finditer(text):
        pieces.append(text[at : match.start()])
        length += len(pieces[-1])
        at = match.end()
        if match.group() == OPEN:
            begin, depth = (length if depth == 0 else begin), depth + 1
        elif match.group() == CLOSE:
            depth = max(0, depth - 1)
            if depth == 0:
                spans.append((begin, length))
        else:
            pieces.append(chr(ord(match.group(1)) - _SHIFT))
            length += 1
    pieces.append(text[at:])
    if depth:
        # A template cut the closing mark off: all that follows counts as data.
        spans.append((begin, length + len(pieces[-1])))
    return "".join(pieces), spans


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
