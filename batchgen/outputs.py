"""What the engine gives back: RequestOutput and its samples, beams, scores, and the failure of a row."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from batchgen.logprobs import FlatLogprobs, Logprob, Logprobs, PositionLogprobs, PromptLogprobs

__all__ = [
    "RETRYABLE",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "FailureCode",
    "FinishReason",
    "FlatLogprobs",
    "Logprob",
    "Logprobs",
    "PositionLogprobs",
    "PromptLogprobs",
    "RequestOutput",
    "RequestStateStats",
    "RowFailure",
    "ScoreOutput",
]


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class FailureCode(StrEnum):
    """Why a row has no (whole) result; the `error.code` of an output row."""

    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    NEVER_FITS = "never_fits"
    KV_CAPACITY = "kv_capacity"
    NOT_A_STRING = "not_a_string"
    NULL_PROMPT = "null_prompt"
    TEMPLATE_ERROR = "template_error"
    INVALID_MESSAGES = "invalid_messages"
    INVALID_JSON = "invalid_json"
    NOT_AN_OBJECT = "not_an_object"
    SCHEMA_MISMATCH = "schema_mismatch"
    INVALID_ENCODING = "invalid_encoding"
    INVALID_PARAMETER = "invalid_parameter"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    UNKNOWN_ADAPTER = "unknown_adapter"
    QUARANTINED = "quarantined"
    ENGINE_ERROR = "engine_error"


# Failures that depend on the machine's memory or luck: worth another try as they are.
RETRYABLE = frozenset(
    {FailureCode.NEVER_FITS, FailureCode.KV_CAPACITY, FailureCode.QUARANTINED, FailureCode.ENGINE_ERROR}
)


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A bad row, as data: written to the output, counted, and never raised."""

    code: FailureCode
    message: str


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request; vLLM's field names, and `valid`: whether it conforms to its grammar.

    `logprobs` has an entry for each of `token_ids`; `cumulative_logprob` is the sum of the tokens' own.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    valid: bool | None = None


@dataclass(slots=True)
class RequestStateStats:
    """When what happened to a request; vLLM's field names.

    `arrival_time` is that of the wall clock, `time.time()`; the others are of `time.monotonic()`, and None
    for what has not happened or was not told yet.

    Attributes:
        num_generation_tokens: tokens of all samples, those of `best_of` that are not given back included.
        arrival_time: when the engine was handed the request.
        queued_ts: when it came to wait among the others.
        scheduled_ts: when the first of its prompt was scheduled.
        first_token_ts: when its first token had been drawn; of a beam search, when the first step was.
        last_token_ts: when its last token had been drawn; when a stop string was seen, if one was the end.
        first_token_latency: seconds from the arrival to the first token.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    first_token_latency: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """All samples of a request; vLLM's field names, and `error` when it could not (wholly) be served.

    `prompt_logprobs` has an entry for each of `prompt_token_ids`: None for the first, and for those before
    `prompt_logprob_start`. `metrics`, which no two runs have in common, plays no part in comparisons; the
    echo engine gives none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestStateStats | None = field(default=None, compare=False)
    lora_request: Any = None
    error: RowFailure | None = None

    def tell_lora(self, lora_request: Any) -> None:
        """Note with which adapter it was computed, in every sample too."""
        self.lora_request = lora_request
        for sample in self.outputs:
            sample.lora_request = lora_request


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that a beam search found; vLLM's field names.

    Attributes:
        tokens: the prompt's ids and the generated ones; without the end-of-sequence token, unless
            `include_stop_str_in_output` asked for it.
        text: the text of `tokens`, so it begins with the prompt.
        cum_logprob: sum of the log probabilities of the generated tokens, the end-of-sequence token included.
        logprobs: per generated token, if the engine gave them.
        finish_reason, stop_reason: as in `CompletionOutput`.
        num_prompt_tokens: how many of `tokens` are the prompt.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class BeamSearchOutput:
    """What a beam search found for one prompt, the best first; none with `error` set."""

    sequences: list[BeamSearchSequence]
    error: RowFailure | None = None


@dataclass(slots=True)
class ScoreOutput:
    """How likely a model finds a continuation.

    Attributes:
        prompt_token_ids: what it was given.
        token_ids: the continuation.
        token_logprobs: natural log of each of its tokens' probability.
        logprob: their sum.
        is_greedy: whether greedy sampling would have written exactly this.
        num_cached_tokens: tokens read from the prefix cache.
        error: why there is no score; the lists are then empty.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    is_greedy: bool
    num_cached_tokens: int = 0
    error: RowFailure | None = None
