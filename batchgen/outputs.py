"""What the engine gives back: RequestOutput, CompletionOutput, and the failure of a single row."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at a position; rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# A position: token id -> its log probability. The token that stands there is the first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request; vLLM's field names, and `valid`: whether it conforms to its grammar."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    valid: bool | None = None


@dataclass(slots=True)
class RequestOutput:
    """All samples of a request; vLLM's field names, and `error` when it could not (wholly) be served."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: Any = None
    metrics: Any = None
    lora_request: Any = None
    error: RowFailure | None = None
