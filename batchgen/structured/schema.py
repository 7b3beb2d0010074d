"""JSON schemas before they become grammars: read, closed where asked, and checked for what slips through."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.errors import ConfigError

# Keywords whose value is one schema, a list of schemas, or a mapping of names to schemas.
_ONE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
    "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
# As JSON writes control characters that have no letter of their own, and DEL.
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\u00|\x7f")
# The same in a regular expression: as they are, or escaped; but not as an end of a range.
_NAMES_CONTROL = re.compile(
    r"(?<!-)(?:[\x00-\x07\x0b\x0e-\x1f\x7f]|\\[cva0]"
    r"|\\(?:x|u00)(?:0[0-8bef]|1[0-9a-f]|7f)|\\[xu]\{0*(?:[0-8bef]|1[0-9a-f]|7f)\})(?!-)",
    re.IGNORECASE,
)

# The library intersects patterns in a time that doubles with each, and cannot be interrupted.
_MOST_PATTERNS = 12


def read_schema(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema as plain values, whether given so or as text; true is the empty schema.

    Raises:
        ConfigError: it is no JSON, not a schema, or false, to which nothing conforms.
    """
    try:
        # Through text in any case: a key that is no text, or a NaN, has no place in a schema.
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        schema = json.loads(text)
    except RecursionError:
        raise ConfigError("the schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the schema is no JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConfigError(f"must be a schema that some text conforms to; got {text[:60]}")
    return schema


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all schemas in it, outer ones first, each with its dotted path ("" is the whole)."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        here = f"{path}.{key}" if path else key
        if key in _ONE and isinstance(value, dict):
            yield from subschemas(value, here)
        elif key in _LIST and isinstance(value, list):
            for index, each in enumerate(value):
                yield from subschemas(each, f"{here}.{index}")
        elif key in _NAMED and isinstance(value, dict):
            for name, each in value.items():
                yield from subschemas(each, f"{here}.{name}")


def close_objects(schema: Any) -> None:
    """Allow no properties but the named ones, in every object that names some and leaves the others open."""
    for _, each in subschemas(schema):
        if ("properties" in each or "patternProperties" in each) and "additionalProperties" not in each:
            each["additionalProperties"] = False


def unenforceable(schema: Any) -> str | None:
    """What the library takes but cannot hold to, with the place; None if nothing is.

    An object's unnamed properties may come twice under one name, and then count twice. Control characters
    without a letter of their own are lost from texts that are given letter by letter.
    """
    for path, each in subschemas(schema):
        if _num_patterns(each) > _MOST_PATTERNS:
            return _at(f"allOf with more than {_MOST_PATTERNS} patterns, or 4 multipleOf, at once", path)
        least = each.get("minProperties", 0)
        if isinstance(least, int | float) and least > max(1, len(each.get("required", ()))):
            return _at(f"minProperties {least} beyond the required properties", path) + "; name them there"
        texts = json.dumps([each.get("const"), each.get("enum")], ensure_ascii=False)
        patterns = [each.get("pattern"), *each.get("patternProperties", ())]
        if _ESCAPED.search(texts) or any(_NAMES_CONTROL.search(str(pattern)) for pattern in patterns):
            return _at("a control character", path)
    return None


def _num_patterns(schema: Any) -> int:
    """How many patterns a text must match at once to conform to a schema."""
    if not isinstance(schema, dict):
        return 0
    parts = schema.get("allOf", ())
    # Multiples of several numbers grow faster still.
    own = ("pattern" in schema) + ("format" in schema) + 3 * ("multipleOf" in schema)
    return own + (sum(map(_num_patterns, parts)) if isinstance(parts, list) else 0)


def place_of(key: str, schema: Any, value: Any = None) -> str:
    """Where in the schema a keyword stands first, as " (at a.b)"; "" when it is nowhere or at the top.

    With a value: where the keyword has it, or has it in a list.
    """

    def is_there(each: Mapping[str, Any]) -> bool:
        found = each.get(key)
        return key in each and (
            value is None or value == found or (isinstance(found, list) and value in found)
        )

    return next((_at("", path) for path, each in subschemas(schema) if is_there(each)), "")


def _at(what: str, path: str) -> str:
    return f"{what} (at {path})" if path else what
