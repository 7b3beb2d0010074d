"""The parts of SamplingParams that have fields of their own. Checks and nothing else; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What a sample's text must conform to; exactly one of `json`, `json_object`, `regex`, `choice`, `grammar`.

    Args:
        json: a JSON schema, as a mapping or as text.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches.
        choice: one of these texts.
        grammar: a context-free grammar in Lark's syntax.
        disable_any_whitespace: JSON without whitespace between tokens; otherwise it is bounded.
        disable_additional_properties: objects have no properties but those that the schema names.
        whitespace_pattern: a regular expression of the whitespace that may stand between JSON tokens.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Ends a sample whose last tokens are one pattern again and again.

    Args:
        max_pattern_size: longest pattern looked for, in tokens; 0 looks for none.
        min_pattern_size: shortest.
        min_count: how many times it must stand there, 2 or more.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 1
    min_count: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A beam search, as `LLM.beam_search` takes it; vLLM's names.

    Args:
        beam_width: beams kept at every step, and sequences given back.
        max_tokens: most tokens of a sequence.
        ignore_eos: go on after end-of-sequence.
        length_penalty: a finished sequence's score is its log probability over (its length ** this).
        early_stopping: True ends when `beam_width` sequences have finished; False when no open beam is likely
            to beat them; "never" when none can.
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
