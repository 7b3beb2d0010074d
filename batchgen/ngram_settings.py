"""NgramSettings: the `speculative` setting, which drafts tokens ahead by looking them up in the text."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from batchgen.errors import ConfigError, UnknownNameError
from batchgen.field_rules import only_built
from batchgen.foreign_names import DRAFTING

_LOOKUP_MAX, _LOOKUP_MIN = 4, 2


def _check(is_right: bool, name: str, value: Any, rule: str) -> None:
    if not is_right:
        raise ConfigError(f"engine setting {name!r} must be {rule}; got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSettings:
    """Drafting by prompt lookup: what followed the last place that reads like the end of the text.

    Args:
        num_speculative_tokens: most tokens drafted ahead.
        prompt_lookup_max: longest end of the text that is looked up, in tokens.
        prompt_lookup_min: shortest.
    """

    num_speculative_tokens: int = 4
    prompt_lookup_max: int = _LOOKUP_MAX
    prompt_lookup_min: int = _LOOKUP_MIN

    def __post_init__(self) -> None:
        most = {
            "num_speculative_tokens": 64,
            "prompt_lookup_max": 64,
            "prompt_lookup_min": self.prompt_lookup_max,
        }
        for name, upper in most.items():
            value = getattr(self, name)
            _check(
                type(value) is int and 1 <= value <= upper, f"speculative.{name}", value, f"from 1 to {upper}"
            )

    @classmethod
    def from_mapping(cls, given: Any) -> "NgramSettings":
        """Build from the `speculative` setting: `method`, which must be ngram, and the fields."""
        _check(isinstance(given, Mapping), "speculative", given, "a mapping with method: ngram, or null")
        values = dict(given)
        known = ["method", *(spec.name for spec in fields(cls))]
        for name in values:
            if name not in known:
                raise UnknownNameError("setting", name, known, "engine setting 'speculative'", DRAFTING)
        only_built("speculative.method", values.pop("method", "ngram"), "ngram", "another way of drafting")
        # One bound alone moves the other's default out of its way.
        low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
        if type(low) is int and high is None:
            values["prompt_lookup_max"] = max(low, _LOOKUP_MAX)
        if type(high) is int and low is None:
            values["prompt_lookup_min"] = min(high, _LOOKUP_MIN)
        return cls(**values)
