"""The parts of SamplingParams that have fields of their own. Checks and nothing else; no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Self

from batchgen.errors import ConfigError, UnknownNameError
from batchgen.field_rules import plain, plain_json
from batchgen.foreign_names import GRAMMAR_OPTIONS, refuse_unknown

# Of these a StructuredOutputsParams has exactly one.
GRAMMARS = ("json", "json_object", "regex", "choice", "grammar")
# Which of them an option is for.
_OPTIONS = {
    "disable_any_whitespace": ("json", "json_object"),
    "whitespace_pattern": ("json", "json_object"),
    "disable_additional_properties": ("json",),
}


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a request carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class _Part:
    """A part that a mapping stands for, in a job file or in JSON."""

    __slots__ = ()

    @classmethod
    def from_mapping(cls, data: Any, path: str) -> Self:
        """Build from names and values; unknown names are refused with the nearest one."""
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"{path} must be a {cls.__name__} or a mapping of its fields; got {type(data).__name__}"
            )
        known = [spec.name for spec in fields(cls)]  # type: ignore[arg-type]
        for name in data:
            if name not in known:
                raise UnknownNameError("field", str(name), known, path, GRAMMAR_OPTIONS)
        return cls(**data)

    def to_mapping(self) -> dict[str, Any]:
        """The fields that are set, as plain JSON types; `from_mapping` makes the same of them."""
        found = {}
        for spec in fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            if value != spec.default:
                found[spec.name] = list(value) if isinstance(value, tuple) else value
        return found


@refuse_unknown("field of structured_outputs", GRAMMAR_OPTIONS)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams(_Part):
    """What a sample's text must conform to: one of `json`, `json_object`, `regex`, `choice` and `grammar`.

    Args:
        json: a JSON schema, as a mapping, as text, or as a pydantic model.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches.
        choice: one of these texts.
        grammar: a context-free grammar in Lark's syntax.
        disable_any_whitespace: JSON without whitespace between tokens; otherwise it is bounded.
        disable_additional_properties: objects have no properties but those that the schema names.
        whitespace_pattern: a regular expression of the whitespace that may stand between JSON tokens.
        structural_tag: vLLM's; not offered.

    Raises:
        ConfigError: not exactly one grammar, or one that is no grammar at all. Whether the engine can enforce
            it is found out when it runs.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: Any = None

    def __post_init__(self) -> None:
        make_schema = getattr(self.json, "model_json_schema", None)
        if make_schema is not None:
            object.__setattr__(self, "json", make_schema())
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        for spec in fields(self):
            if spec.name != "json":
                object.__setattr__(self, spec.name, plain(getattr(self, spec.name)))
        if self.structural_tag is not None:
            raise ConfigError(
                "structured_outputs: 'structural_tag' is not offered; describe the text with 'grammar'"
            )
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs needs exactly one of {', '.join(GRAMMARS)}; "
                f"got {' and '.join(given) or 'none'}"
            )
        self._check_values()
        self._check_options(given[0])

    def _check_options(self, kind: str) -> None:
        """Nothing is taken that has no effect."""
        for name, kinds in _OPTIONS.items():
            if getattr(self, name) and kind not in kinds:
                raise ConfigError(
                    f"structured_outputs: {name!r} is for {' and '.join(kinds)}; leave it out beside {kind!r}"
                )
        if self.whitespace_pattern and self.disable_any_whitespace:
            raise ConfigError(
                "structured_outputs: 'whitespace_pattern' and 'disable_any_whitespace' exclude each other"
            )

    def _check_values(self) -> None:
        def need(name: str, is_right: bool, rule: str) -> None:
            if not is_right:
                raise ConfigError(
                    f"structured_outputs: {name!r} must be {rule}; got {getattr(self, name)!r:.100}"
                )

        if self.json is not None:
            schema = _schema(self.json)
            need("json", schema is not None, "a JSON schema")
            object.__setattr__(self, "json", schema)
        need("json_object", self.json_object in (None, True), "true")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            need(name, value is None or (isinstance(value, str) and bool(value)), "a non-empty text")
        if self.choice is not None:
            is_texts = isinstance(self.choice, tuple) and all(isinstance(each, str) for each in self.choice)
            need("choice", is_texts and any(self.choice), "a list of texts, not all of them empty")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            need(name, isinstance(getattr(self, name), bool), "true or false")
        is_text = self.whitespace_pattern is None or isinstance(self.whitespace_pattern, str)
        need("whitespace_pattern", is_text, "a regular expression")


def _schema(given: Any) -> Any:
    """A schema as the same text, or as plain values; None if it is none."""
    try:
        if isinstance(given, str):
            return plain(given) if isinstance(json.loads(given), Mapping | bool) else None
        return plain_json(given) if isinstance(given, Mapping | bool) else None
    except RecursionError:
        raise ConfigError("structured_outputs: 'json' is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"structured_outputs: 'json' is a text that is no JSON: {error}") from None
    except TypeError:
        return None


@refuse_unknown("field of repetition_detection", {})
@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams(_Part):
    """Ends a sample whose last tokens are one pattern again and again; finish reason `repetition`.

    Args:
        max_pattern_size: longest pattern looked for, in tokens; 0 looks for none.
        min_pattern_size: shortest.
        min_count: how many times it must stand there, 2 or more.

    Raises:
        ConfigError: a value out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        for name, least in (("max_pattern_size", 0), ("min_pattern_size", 0), ("min_count", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"repetition_detection: {name!r} must be a whole number, {least} or more; got {value!r}"
                )
        if self.min_pattern_size == 0:
            object.__setattr__(self, "min_pattern_size", 1)
        if 0 < self.max_pattern_size < self.min_pattern_size:
            raise ConfigError(
                f"repetition_detection: 'min_pattern_size' must be at most max_pattern_size "
                f"({self.max_pattern_size}); got {self.min_pattern_size}"
            )


@refuse_unknown("field of a beam search", {})
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A beam search, as `LLM.beam_search` takes it; vLLM's names.

    Args:
        beam_width: beams kept at every step, and sequences given back.
        max_tokens: most tokens of a sequence.
        ignore_eos: go on after end-of-sequence.
        temperature: 0; a beam search draws nothing.
        length_penalty: a finished sequence's score is its log probability over (its length ** this).
        early_stopping: True ends when `beam_width` sequences have finished; False when no open beam is likely
            to beat them; "never" when none can.
        include_stop_str_in_output: keep the end-of-sequence token in `tokens`.

    Raises:
        ConfigError: a width or a length below 1, a temperature. SamplingParams checks the other values.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: Any = None

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"beam search: {name!r} must be a whole number, 1 or more; got {value!r}")
        if self.temperature != 0:
            raise ConfigError(
                f"beam search: 'temperature' must be 0, nothing is drawn; got {self.temperature!r:.40}"
            )
        if self.watermarking is not None:
            raise ConfigError("beam search: 'watermarking' is not offered; leave it out")
