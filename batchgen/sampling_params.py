"""SamplingParams: how the tokens of one request are drawn. Checks and nothing else; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from batchgen.errors import ConfigError, UnknownNameError
from batchgen.sampling_parts import RepetitionDetection, StructuredOutputsParams

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01

# Fields that vLLM has and that batchgen does not offer (docs/vllm.md says why): a value other than the default
# is refused by name.
REFUSED = frozenset(
    ("watermarking", "routed_experts_prompt_start", "trace_decode_token_ids", "skip_clone", "extra_args")
)

_FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a request carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn; names and defaults are vLLM's.

    One default differs: `max_tokens` is None, which means up to the context, never a hidden 16.
    A `temperature` below 1e-5 is greedy (then `top_p`, `top_k` and `min_p` have no effect); between that and
    0.01 it is raised to 0.01.

    Raises:
        ConfigError: a value out of range, or a field that is not built yet; the message names the field.
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
    repetition_detection: RepetitionDetection | None = None
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
        _check_ranges(self)
        for spec in fields(self):
            if spec.name in REFUSED and getattr(self, spec.name) != spec.default:
                raise ConfigError(
                    f"sampling parameter {spec.name!r} is not offered (got {getattr(self, spec.name)!r}); "
                    f"leave it out"
                )

    def _normalise(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("stop", "stop_token_ids", "bad_words"):
            given: Any = getattr(self, name)
            if given is None or isinstance(given, list | tuple | set | frozenset):
                put(name, tuple(given or ()))
            elif name != "stop_token_ids" and isinstance(given, str):
                put(name, (given,))
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

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """Samples that are drawn, of which `n` are given back; the width of a beam search."""
        return self.best_of or self.n

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
    def from_mapping(cls, data: Mapping[str, Any], path: str = "sampling") -> "SamplingParams":
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
                raise UnknownNameError("setting", name, known, path)
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The fields as plain values, for storing beside results; `output_kind` and refused ones left out."""
        return {
            spec.name: list(value) if isinstance(value := getattr(self, spec.name), tuple) else value
            for spec in fields(self)
            if spec.name not in REFUSED and spec.name != "output_kind"
        }


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_bias(given: Any) -> dict[int, float]:
    """Token ids may be spelled as text, as JSON has them."""
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"sampling parameter 'logit_bias' must be a mapping of token id to a bias from -100 to 100; "
            f"got {given!r}"
        ) from error


def _check_ranges(params: SamplingParams) -> None:
    def need(name: str, is_right: bool, rule: str) -> None:
        if not is_right:
            raise ConfigError(f"sampling parameter {name!r} must be {rule}; got {getattr(params, name)!r}")

    p = params
    need("n", _is_int(p.n) and 1 <= p.n <= 16384, "a whole number from 1 to 16384")
    need(
        "temperature", _is_number(p.temperature) and 0 <= p.temperature < float("inf"), "a number, 0 or more"
    )
    need("top_p", _is_number(p.top_p) and 0 < p.top_p <= 1, "above 0 and at most 1")
    need("top_k", _is_int(p.top_k) and p.top_k >= 0, "a whole number: 0 or -1 for all tokens, else 1 or more")
    need("min_p", _is_number(p.min_p) and 0 <= p.min_p <= 1, "from 0 to 1")
    need("seed", p.seed is None or _is_int(p.seed), "a whole number or null")
    need(
        "stop",
        isinstance(p.stop, tuple) and all(isinstance(s, str) and s for s in p.stop),
        "a non-empty string or a list of such",
    )
    need(
        "stop_token_ids",
        isinstance(p.stop_token_ids, tuple) and all(_is_int(t) and t >= 0 for t in p.stop_token_ids),
        "a list of token ids",
    )
    need(
        "max_tokens",
        p.max_tokens is None or (_is_int(p.max_tokens) and p.max_tokens >= 1),
        "1 or more, or null",
    )
    need("min_tokens", _is_int(p.min_tokens) and p.min_tokens >= 0, "a whole number, 0 or more")
    if p.max_tokens is not None:
        need("min_tokens", p.min_tokens <= p.max_tokens, f"at most max_tokens ({p.max_tokens})")
    if p.logit_bias is not None:
        need(
            "logit_bias",
            all(t >= 0 and abs(b) <= 100 for t, b in p.logit_bias.items()),
            "a mapping of token id to a bias from -100 to 100",
        )
    for name in _FLAGS:
        need(name, isinstance(getattr(p, name), bool), "true or false")
    need("output_kind", isinstance(p.output_kind, RequestOutputKind), "a RequestOutputKind")
    if p.stop and not p.detokenize:
        raise ConfigError("sampling parameter 'stop' needs detokenize: true; stop strings are found in text")
