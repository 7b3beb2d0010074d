"""What the library says of a grammar that it cannot enforce, in the user's terms: what, where, what to do."""

import re
from collections.abc import Callable
from typing import Any

from batchgen.structured.schema import place_of
from batchgen.structured.vocabulary import HIDING

_TYPES = "array, boolean, integer, null, number, object and string"
_LOOK_AROUNDS = {"Start": "'^' that is not its beginning", "End": "'$' that is not its end"}
_LEXER = "neither a name, a text in double quotes nor a pattern between slashes"

Say = Callable[["re.Match[str]", Any], str]


def reworded(said: str, schema: Any) -> str:
    """The reason in one line.

    Args:
        said: by the library.
        schema: the JSON schema, or None for another grammar.
    """
    # What follows is the state of its parser.
    said = said.partition("\n<non-verbose/>")[0].partition("\n<state>")[0]
    said = said.replace(f"\\u{{{ord(HIDING):x}}}", "").replace(HIDING, "")
    for pattern, say in _REWORDED:
        if found := pattern.search(said):
            said = say(found, schema)
            break
    # Further lines show the place in the grammar, or list what else there is.
    return said.partition("\n")[0].partition("; following")[0]


def _keywords(found: "re.Match[str]", schema: Any) -> str:
    names = re.findall(r'"([^"]*)"', found[1])
    placed = ", ".join(f"'{name}'{place_of(name, schema)}" for name in names)
    what = "it" if len(names) == 1 else "them"
    return f"{placed}; leave {what} out and check the texts for {what}"


def _type(found: "re.Match[str]", schema: Any) -> str:
    return f"type '{found[1]}' is none of {_TYPES}{place_of('type', schema, found[1])}"


def _format(found: "re.Match[str]", schema: Any) -> str:
    place = place_of("format", schema, found[1])
    return f"format '{found[1]}'{place} is not known; leave it out, or give a pattern"


def _look_around(found: "re.Match[str]", _: Any) -> str:
    what = _LOOK_AROUNDS.get(found[1], r"look-around such as '\b'")
    return f"'{found[2]}': {what} is not supported; the whole text must match in any case"


def _bad_pattern(found: "re.Match[str]", _: Any) -> str:
    return f"'{found[1]}': {found[2]}"


def _place_in_grammar(found: "re.Match[str]", _: Any) -> str:
    what = {"lexer error": _LEXER}.get(found[3], found[3])
    return f"line {found[1]}, column {found[2]}: {what}"


_REWORDED: tuple[tuple["re.Pattern[str]", Say], ...] = tuple(
    (re.compile(pattern), say)
    for pattern, say in (
        (r"Unimplemented keys: (\[.*\])", _keywords),
        (r"Invalid type: (.*)", _type),
        (r"Unknown format: (.*)", _format),
        (r"Pointer '(.*)' does not exist", lambda found, _: f"$ref '#{found[1]}' leads nowhere"),
        (
            r"Resource '(.*)' is not present",
            lambda found, _: f"$ref '{found[1]}' leads out of the schema; copy what it names into $defs",
        ),
        (r"Unsatisfiable schema: Regex is empty", lambda *_: "no text has its pattern, format and length"),
        (r"Unsatisfiable schema: (.*)", lambda found, _: f"no text conforms to it: {found[1]}"),
        (r"oneOf constraints", lambda *_: "oneOf whose schemas may overlap; use anyOf"),
        (r"NoExtension", lambda *_: "it leads to where no token may stand"),
        (r"Failed to generate regex for", lambda *_: "a minimum or maximum of so many digits"),
        (r"invalid multiple of", lambda *_: "multipleOf must be above 0"),
        (r"lookarounds not supported yet; (\w+) in regex /(.*)/", _look_around),
        (r"regex parse error:\n\s*(.*)\n(?s:.*)error: (.*)", _bad_pattern),
        (r"no start rule found", lambda *_: "it has no rule 'start', which the text must be"),
        (r"^(?:at )?(\d+)\((\d+)\): (.*)", _place_in_grammar),
    )
)
