"""The Jinja2 environment of row templates: sandboxed, nothing random, and strict about nulls."""

import json
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class NullColumnError(jinja2.UndefinedError):
    """A null column was used."""


class Null(jinja2.StrictUndefined):
    """A null in the data: false, equal to none, replaced by `default(...)`; any other use is an error."""

    __slots__ = ()

    def __bool__(self) -> bool:  # type: ignore[override]  # a null is false
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return other is None or isinstance(other, Null)

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(None)


def null_column(name: str) -> Null:
    """What a null cell is to a template."""
    return Null(hint=f"column {name!r} is null", name=name, exc=NullColumnError)


class _Environment(ImmutableSandboxedEnvironment):
    """Looks up fields of a struct before methods of a dict, and makes every null strict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Null):
            return _null_field(f"{obj._undefined_name}.{attribute}")
        found = (
            obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)
        )
        return _null_field(attribute) if found is None else found

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, Null):
            return _null_field(f"{obj._undefined_name}.{argument}")
        found = super().getitem(obj, argument)
        return _null_field(argument) if found is None else found


def _null_field(name: Any) -> Null:
    return Null(hint=f"{name!r} is null; give it a default: | default('...')", name=str(name))


@lru_cache(maxsize=2)
def environment(with_globals: bool = True) -> _Environment:
    """The one environment; without globals it is only good for finding out which names a template takes."""
    made = _Environment(
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        keep_trailing_newline=True,
        autoescape=False,
        extensions=["jinja2.ext.loopcontrols"],
    )
    made.filters["default"] = made.filters["d"] = _default
    made.filters["tojson"] = _to_json
    made.tests["none"] = lambda value: value is None or isinstance(value, Null)
    # The same row must always give the same prompt.
    del made.filters["random"]
    del made.globals["lipsum"]
    if not with_globals:
        made.globals.clear()
    return made


def _finalize(value: Any) -> Any:
    if type(value) is str:
        return value
    if value is None:
        raise jinja2.UndefinedError("a null is written out; give it a default: | default('...')")
    if isinstance(value, bytes | bytearray):
        raise jinja2.UndefinedError("a binary value is written out; only text and numbers can be")
    if callable(value) and not isinstance(value, jinja2.Undefined):
        raise jinja2.UndefinedError("a method is written out; were its parentheses forgotten?")
    return value


def _default(value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    if value is None or isinstance(value, jinja2.Undefined) or (boolean and not value):
        return default_value
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_json_value)


def _json_value(value: Any) -> Any:
    return None if isinstance(value, Null) else str(value)
