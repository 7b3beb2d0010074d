"""StructuredOutputsParams -> the grammar as llguidance reads it, or why there is none."""

import json
import re
from typing import Any

from batchgen.errors import ConfigError
from batchgen.sampling_parts import GRAMMARS, StructuredOutputsParams
from batchgen.structured.reasons import reworded
from batchgen.structured.schema import close_objects, read_schema, unenforceable
from batchgen.structured.vocabulary import hidden_name

# Between JSON tokens: a space, or a line end and an indentation. A model cannot fill its text with it.
WHITESPACE = r"(\r?\n[ \t]{0,24}| )"
# Without \u, by which a property's name could be spelled so that the schema for it does not apply.
_ESCAPES = 'nrtbf\\"'

# In Lark's syntax: texts and comments; patterns; control tokens.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|(/(?:\\.|[^/\\\n])+/)|(<[^<>\s\[\]]+>)')
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# As in JSON schemas: held to Unicode's \d, a model may write any of its 700 digits.
_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


def kind_of(params: StructuredOutputsParams) -> str:
    """Which of the ways to give a grammar is used."""
    return next(name for name in GRAMMARS if getattr(params, name) is not None)


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own notation. It may still be one that cannot be enforced.

    Raises:
        ConfigError: it cannot even be written down.
    """
    from llguidance import LLMatcher

    kind = kind_of(params)
    try:
        if kind in ("json", "json_object"):
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(params)), overrides=_options(params))
        if kind == "regex":
            return LLMatcher.grammar_from_regex(_ascii_classes(str(params.regex)))
        if kind == "choice":
            # As one terminal: rules of many alternatives run into the parser's limits.
            texts = " | ".join(map(json.dumps, params.choice or ()))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        return LLMatcher.grammar_from_lark(_lark(str(params.grammar)))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"structured_outputs.{kind}: {error}") from None


def _lark(grammar: str) -> str:
    """A grammar in the library's dialect of Lark's syntax, from that syntax or from GBNF.

    Control tokens get the names under which the library knows them; GBNF names none.
    """
    if not _GBNF.search(grammar):
        return _LARK.sub(_respelled, grammar)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:
        raise ConfigError(f"as GBNF (it has '::='): {error}") from None


def _ascii_classes(pattern: str) -> str:
    r"""A regular expression with \d and \w spelled out as those of ASCII, within [...] too."""
    return _ESCAPE.sub(lambda found: _ASCII.get(found[1], found[0]), pattern)


def _respelled(found: "re.Match[str]") -> str:
    if found[1]:
        return f"/{_ascii_classes(found[1][1:-1])}/"
    return hidden_name(found[2]) if found[2] else found[0]


def explain(params: StructuredOutputsParams, said: str) -> str:
    """The library's refusal in the user's terms: which key, what, where, what to do."""
    schema = _schema(params) if params.json is not None else None
    return f"structured_outputs.{kind_of(params)}: cannot be enforced: {reworded(said, schema)}"


def _schema(params: StructuredOutputsParams) -> Any:
    if params.json is None:
        return {"type": "object"}
    schema = read_schema(params.json)
    try:
        if params.disable_additional_properties:
            close_objects(schema)
        slips = unenforceable(schema)
    except RecursionError:
        raise ConfigError("the schema is nested too deeply") from None
    if slips is not None:
        raise ConfigError(f"cannot be enforced: {slips}")
    return schema


def _options(params: StructuredOutputsParams) -> Any:
    """How the library writes JSON; these win over an "x-guidance" in the schema, which could loosen it."""
    options = {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": _ESCAPES}
    if params.disable_any_whitespace or params.whitespace_pattern == "":
        return options | {"whitespace_flexible": False}
    return options | {
        "whitespace_flexible": True,
        "whitespace_pattern": _ascii_classes(params.whitespace_pattern or WHITESPACE),
    }
