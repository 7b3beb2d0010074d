"""SamplingParams: how the tokens of one request are drawn. Checks and nothing else; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from batchgen.errors import ConfigError, UnknownNameError
from batchgen.field_rules import plain
from batchgen.foreign_names import SAMPLING_PARAMETERS, refuse_unknown
from batchgen.sampling_checks import GREEDY_BELOW, REFUSED, check_each, check_together
from batchgen.sampling_parts import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

__all__ = [
    "GREEDY_BELOW",
    "REFUSED",
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

LOWEST_TEMPERATURE = 0.01

# Lists that stand for tuples, so that nobody changes a request under way.
_TUPLES = (
    "stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logprob_token_ids",
    "prompt_logprob_token_ids",
)  # fmt: skip
_PARTS: dict[str, type[StructuredOutputsParams] | type[RepetitionDetectionParams]] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


@refuse_unknown("sampling parameter", SAMPLING_PARAMETERS)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn; names and defaults are vLLM's.

    One default differs: `max_tokens` is None, which means up to the context, never a hidden 16.
    A `temperature` below 1e-5 is greedy (then `top_p`, `top_k` and `min_p` have no effect); between that and
    0.01 it is raised to 0.01. `best_of`, `use_beam_search`, `length_penalty`, `early_stopping` and
    `truncate_prompt_tokens` are those of older releases of vLLM. docs/vllm.md goes through all fields.

    Raises:
        ConfigError: a value out of range, fields that exclude each other, or a field that is not offered; the
            message names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool | None = None

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    stream_interval: int | None = None

    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    extra_args: Any = None
    watermarking: Any = None
    skip_clone: bool = False
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Any = None

    def __post_init__(self) -> None:
        self._normalise()
        check_each(self)
        check_together(self)

    def _normalise(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in _TUPLES:
            given: Any = getattr(self, name)
            if isinstance(given, list | tuple | set | frozenset | range):
                put(name, tuple(given))
            elif isinstance(given, str) and name in ("stop", "bad_words"):
                put(name, (given,))
            elif given is None and name in ("stop", "bad_words", "stop_token_ids"):
                put(name, ())
        for spec in fields(self):
            put(spec.name, plain(getattr(self, spec.name)))
        for name, part in _PARTS.items():
            if isinstance(value := getattr(self, name), Mapping):
                put(name, part.from_mapping(value, name))
        if self.repetition_detection == RepetitionDetectionParams(max_pattern_size=0):
            put("repetition_detection", None)
        if self.seed == -1:
            put("seed", None)
        if self.logit_bias is not None:
            put("logit_bias", _as_bias(self.logit_bias) or None)
        if (
            isinstance(self.temperature, int | float)
            and GREEDY_BELOW <= self.temperature < LOWEST_TEMPERATURE
        ):
            put("temperature", LOWEST_TEMPERATURE)
        if self.top_k == -1:
            put("top_k", 0)
        # Positions read from the prefix cache have no logits to score the prompt by.
        if (
            self.prompt_logprobs is not None
            and self.skip_reading_prefix_cache is None
            and self.prompt_logprob_start in (None, 0, 1)
        ):
            put("skip_reading_prefix_cache", True)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """Samples that are drawn, of which `n` are given back; the width of a beam search."""
        return self.best_of or self.n

    @property
    def has_logprobs(self) -> bool:
        """Whether samples come with log probabilities of their tokens."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def first_prompt_logprob(self) -> int:
        """The first position of a prompt that has a log probability, when `prompt_logprobs` asks for them."""
        return max(self.prompt_logprob_start or 0, 1)

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on which tokens came before."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
            or self.structured_outputs is not None
            or self.thinking_token_budget is not None
        )

    @classmethod
    def check_field(cls, **value: Any) -> None:
        """Check fields by themselves, without those that they may need beside them.

        Raises:
            ConfigError: a value out of range.
        """
        alone = object.__new__(cls)
        for spec in fields(cls):
            object.__setattr__(alone, spec.name, value.get(spec.name, spec.default))
        alone._normalise()
        check_each(alone)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], path: str = "sampling") -> Self:
        """Build from names and values; unknown names are refused with the nearest one.

        `max_new_tokens` is accepted as another name of `max_tokens`.
        """
        known = {spec.name for spec in fields(cls)}
        values = dict(data)
        if "max_new_tokens" in values:
            if "max_tokens" in values:
                raise ConfigError(f"{path}: max_tokens and max_new_tokens are the same setting; give one")
            values["max_tokens"] = values.pop("max_new_tokens")
        for name in values:
            if name not in known:
                raise UnknownNameError("setting", name, known, path, SAMPLING_PARAMETERS)
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The fields as plain values, for storing beside results; `output_kind` and refused ones left out.

        `from_mapping` makes the same params of them.
        """
        return {
            spec.name: _plain(getattr(self, spec.name))
            for spec in fields(self)
            if spec.name not in REFUSED and spec.name != "output_kind"
        }


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputsParams | RepetitionDetectionParams):
        return value.to_mapping()
    return list(value) if isinstance(value, tuple) else value


def _as_bias(given: Any) -> dict[int, float]:
    """Token ids may be spelled as text, as JSON has them."""
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"sampling parameter 'logit_bias' must be a mapping of token id to a bias from -100 to 100; "
            f"got {given!r}"
        ) from error
