"""Rules for the fields of settings: what a value must be, and the words that say so."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.errors import ConfigError

# Whether a value is right, and what it must be.
Rule = tuple[Callable[[Any], bool], str]


def check_fields(settings: Any, rules: Mapping[str, Rule], what: str) -> None:
    """Hold every field that has a rule to it.

    Args:
        settings: an object with these fields.
        rules: field -> rule.
        what: what a field is called, as in "sampling parameter".

    Raises:
        ConfigError: names the field, the rule and the value.
    """
    for name, (is_right, words) in rules.items():
        value = getattr(settings, name)
        if not is_right(value):
            raise ConfigError(f"{what} {name!r} must be {words}; got {value!r:.200}")


def only_built(name: str, value: Any, built: Any, what: str) -> None:
    """Refuse an engine setting that is known but has only one value so far.

    Raises:
        ConfigError: another value than `built`.
    """
    if value != built:
        raise ConfigError(
            f"engine setting {name}={value!r}: {what} is not built yet; only {built!r} is accepted"
        )


def is_whole(value: Any) -> bool:
    """A whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(least: float, words: str, most: float = math.inf) -> Rule:
    """A whole number from `least` to `most`."""
    return lambda value: is_whole(value) and least <= value <= most, words


def number(least: float, most: float, words: str) -> Rule:
    """A finite number from `least` to `most`."""
    return lambda value: is_number(value) and least <= value <= most, words


def above(least: float, most: float, words: str) -> Rule:
    """A finite number above `least` and at most `most`."""
    return lambda value: is_number(value) and least < value <= most, words


def one_of(*values: Any, words: str) -> Rule:
    """One of these values; 1 is not True, and 0 not False."""
    return lambda value: any(value == each and type(value) is type(each) for each in values), words


def instance(kind: type, words: str) -> Rule:
    """An object of a class."""
    return lambda value: isinstance(value, kind), words


def or_none(rule: Rule) -> Rule:
    """What another rule says, or None."""
    is_right, words = rule
    return lambda value: value is None or is_right(value), f"{words}, or null"


FLAG = one_of(True, False, words="true or false")
FLAG_OR_NONE = one_of(None, True, False, words="true, false or null")
TEXT_OR_NONE = or_none(instance(str, "a text"))


_PLAIN = frozenset((str, int, float, bool, type(None)))


def plain(value: Any) -> Any:
    """Text and numbers of a class of their own (members of an enum) as what they are, in tuples too.

    A process of its own does not know such classes.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if type(value) is tuple and not all(type(each) in _PLAIN for each in value):
        return tuple([plain(each) for each in value])
    return value


def plain_json(value: Any) -> Any:
    """Mappings and sequences of plain values, as JSON has them.

    Raises:
        TypeError: something that JSON has no form for.
    """
    value = plain(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    raise TypeError(f"JSON has no {type(value).__name__}")
