"""Arrow types by their names, as `input.schema` writes them: "int64", "list<string>", "struct<a: int64>"."""

import re
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError, nearest

_PLAIN = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "date32": pa.date32(),
}
_NESTED = ("list", "large_list", "struct")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,\s*tz=([\w/+:-]+))?\]")
_DECIMAL = re.compile(r"decimal(128|256)\((\d+),\s*(\d+)\)")


def parse_type(text: str, place: str) -> Any:
    """The Arrow type of that name.

    Args:
        text: a type that JSON lines or CSV can hold, written as Arrow prints it.
        place: the key it stands under, for messages.

    Raises:
        SourceError: no such type; names the nearest.
    """
    text = text.strip()
    if text in _PLAIN:
        return _PLAIN[text]
    if match := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(match[1], tz=match[2])
    if match := _DECIMAL.fullmatch(text):
        try:
            return (pa.decimal128 if match[1] == "128" else pa.decimal256)(int(match[2]), int(match[3]))
        except ValueError as error:
            raise SourceError(f"{place}: {text!r}: {error}") from None
    head, bracket, rest = text.partition("<")
    if bracket and rest.endswith(">") and head in _NESTED:
        return _nested(head, rest[:-1], place)
    known = [*_PLAIN, *(f"{name}<...>" for name in _NESTED), "timestamp[us]", "decimal128(p, s)"]
    guess = nearest(text, known)
    raise SourceError(
        f"{place}: unknown type {text!r}"
        + (f"; did you mean {guess!r}?" if guess else f"; known: {', '.join(known)}")
    )


def _nested(head: str, inner: str, place: str) -> Any:
    if head == "struct":
        fields = []
        for part in _split(inner):
            name, colon, kind = part.partition(":")
            if not colon:
                raise SourceError(f"{place}: {part!r} in struct<...> must be written as name: type")
            fields.append((name.strip(), parse_type(kind, place)))
        return pa.struct(fields)
    # Arrow prints a list's item name; it may be left out.
    item = inner.removeprefix("item: ").removeprefix("element: ")
    return (pa.list_ if head == "list" else pa.large_list)(parse_type(item, place))


def _split(text: str) -> list[str]:
    """The parts between the commas that stand outside all brackets."""
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "<[(") - (character in ">])")
        if character == "," and depth == 0:
            parts.append(text[begin:position])
            begin = position + 1
    return [*parts, text[begin:]] if text.strip() else []
