"""StructuredOutputsParams -> the grammar as llguidance reads it, or why there is none."""

import json
import re
from typing import Any

from batchgen.errors import ConfigError
from batchgen.sampling_parts import GRAMMARS, StructuredOutputsParams
from batchgen.structured.schema import close_objects, place_of, read_schema, unenforceable
from batchgen.structured.vocabulary import HIDING, hidden_name

# Between JSON tokens: a space, or a line end and an indentation. A model cannot fill its text with it.
WHITESPACE = r"(\r?\n[ \t]{0,24}| )"
# Without \u, by which a property's name could be spelled so that the schema for it does not apply.
_ESCAPES = 'nrtbf\\"'

_REWORDED = {
    "NoExtension": "it leads to where no token may stand",
    "oneOf constraints": "oneOf whose schemas may overlap (anyOf can be enforced)",
}
# Outside of Lark's texts, comments and patterns: a control token.
_LARK_CONTROL = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s\[\]]+>)')
_BAD_PATTERN = re.compile(r"regex parse error:\n\s*(.*)\n(?s:.*)error: (.*)")
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]*)"')


def kind_of(params: StructuredOutputsParams) -> str:
    """Which of the ways to give a grammar is used."""
    return next(name for name in GRAMMARS if getattr(params, name) is not None)


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own notation. It may still be one that cannot be enforced.

    Raises:
        ConfigError: it cannot even be written down.
    """
    from llguidance import LLMatcher, grammar_from

    kind = kind_of(params)
    try:
        if kind in ("json", "json_object"):
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(params)), overrides=_options(params))
        if kind == "regex":
            return LLMatcher.grammar_from_regex(str(params.regex))
        if kind == "choice":
            # As one terminal: rules of many alternatives run into the parser's limits.
            texts = " | ".join(map(json.dumps, params.choice or ()))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        return grammar_from("grammar", _with_hidden_names(str(params.grammar)))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"structured_outputs.{kind}: {error}") from None


def _with_hidden_names(grammar: str) -> str:
    """A grammar in Lark's syntax that names control tokens as the library knows them; GBNF names none."""
    if "::=" in grammar:
        return grammar
    return _LARK_CONTROL.sub(lambda found: hidden_name(found[1]) if found[1] else found[0], grammar)


def explain(params: StructuredOutputsParams, error: str) -> str:
    """The library's refusal in the user's terms: which key, where."""
    kind = kind_of(params)
    # What follows is the state of its parser.
    reason = error.partition("\n<non-verbose/>")[0].partition("\n<state>")[0]
    reason = next((ours for theirs, ours in _REWORDED.items() if theirs in reason), reason)
    reason = reason.replace(f"\\u{{{ord(HIDING):x}}}", "")
    pattern = _BAD_PATTERN.search(reason)
    if pattern:
        reason = f"{pattern[1]!r}: {pattern[2]}"
    unknown = _UNIMPLEMENTED.search(reason)
    if unknown and params.json is not None:
        reason += place_of(unknown[1], _schema(params))
    # Further lines show the place in the grammar, or list what else there is.
    reason = reason.partition("\n")[0].partition("; following")[0]
    return f"structured_outputs.{kind}: cannot be enforced: {reason}"


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
        "whitespace_pattern": params.whitespace_pattern or WHITESPACE,
    }
