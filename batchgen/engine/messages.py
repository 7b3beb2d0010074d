"""The messages between a caller and the engine core: picklable, small, token ids as int32 bytes.

No torch here: a caller need not have it.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.errors import ConfigError
from batchgen.outputs import RowFailure
from batchgen.sampling_params import SamplingParams


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes, the form in which they travel."""
    return array("i", token_ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The token ids of `pack_ids`."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


@dataclass(frozen=True, slots=True)
class Feature:
    """A stretch of positions whose embeddings come from elsewhere (an image, a soft prompt)."""

    offset: int
    length: int
    content_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What one row asks of the engine.

    Args:
        request_id: unique among requests in flight.
        prompt_token_ids: `pack_ids` of the prompt.
        params: how to draw; `params.seed` is ignored here in favour of `seed`.
        seed: 64-bit key of the request's random stream; sample and position are mixed in by the sampler.
        prompt: the text, only to be handed back in the RequestOutput.
        streams: whether tokens are wanted as they come (a stop string, a live reader); else only at the end.
        adapter: name of a loaded LoRA adapter; None for the base model.
        features, cache_salt, priority: see DESIGN; part of the prefix-cache root or the queue order.
        bad_words: token id sequences that `params.bad_words` stands for.
        is_pinned: the full blocks of its prompt stay in the prefix cache until unpinned, or until nothing
            else could run; nothing is drawn.
        serial: set by the client; comes back in every SampleOutput, so that late ones of an aborted request
            are told from those of a new request with the same id.
    """

    request_id: str
    prompt_token_ids: bytes
    params: SamplingParams
    seed: int = 0
    prompt: str | None = None
    streams: bool = True
    features: tuple[Feature, ...] = ()
    adapter: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    is_pinned: bool = False
    serial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A LoRA adapter that requests may name.

    Args:
        name: by which they do.
        path: where its files are, as it was given.
        content_hash: of all that its results depend on, in hex; equal for equal adapters of any name.
        rank: the largest of its modules.
        num_modules: modules that it changes.
        num_bytes: of its tensors in the file.
        warnings: what is odd about it.
    """

    name: str
    path: str
    content_hash: str
    rank: int = 0
    num_modules: int = 0
    num_bytes: int = 0
    warnings: tuple[str, ...] = ()


class RequestTimes(NamedTuple):
    """When what happened to a request in the core, in seconds of `time.monotonic()`; None: not yet."""

    queued: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None


@dataclass(slots=True)  # written once; freezing would double the time to make one
class SampleOutput:
    """New tokens of one sample of a request, from the core.

    Lists of log probabilities have one entry for each new token, or for each prompt position from 1 (or
    `prompt_logprob_start`) on; those of the prompt come once, with the request's first message or after.
    `valid` says whether the sample's grammar may end after these tokens. A beam search tells its samples
    once, whole, at its end, the best as index 0, with `cumulative_logprob` as the sum that ranked it.

    `finish_reason` and `stop_reason` are set on a sample's last message. When the core refuses or fails a
    request, `error` says why: finish_reason "error", tokens as far as they came. `times` come with a sample's
    first and last message.
    """

    request_id: str
    index: int
    token_ids: bytes
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: RowFailure | None = None
    serial: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    valid: bool | None = None
    cumulative_logprob: float | None = None
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may change while the engine runs; None leaves a value as it is.

    Raises:
        ConfigError: a value below 1.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"limit {name} must be 1 or more; got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine for everything that shows numbers. Counters count from the start.

    `step_time_s` is the time spent in steps so far; `prompt_tokens` counts each request's prompt once, cached
    or not, `prefix_cache_queries` and `prefix_cache_hits` tokens; `num_draft_tokens` and
    `num_accepted_tokens` are those of speculation; `num_cpu_blocks` are blocks in host memory for swapping;
    `choices` says how often each choice by cost was made.
    """

    time_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    num_blocks: int = 0
    num_cpu_blocks: int = 0
    num_used_cpu_blocks: int = 0
    num_pinned_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_finished: int = 0
    step_time_s: float = 0.0
    is_paused: bool = False
    max_num_seqs: int = 0
    choices: Mapping[str, int] = field(default_factory=dict)
    block_map: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Where an engine's time went between `begin_profile` and `end_profile`.

    Args:
        seconds: part -> seconds; "scheduling" is what a step takes beside kernels and drawing, "idle" the
            time between steps. They add up to `wall_s`.
        wall_s: between the two calls, without `measuring_s`.
        num_steps, num_tokens, num_rows: steps, tokens computed, and rows of logits.
        ceilings: rate -> of this machine: float_ops, int8_ops and read_bytes a second, the mean over that
            time; empty where they cannot be measured.
        bound_s: the least seconds that matrix_products and attention take on such a machine, whatever the
            kernels.
        measuring_s: time in the midst of steps that measuring the machine took; in no part.
    """

    seconds: Mapping[str, float]
    wall_s: float
    num_steps: int
    num_tokens: int
    num_rows: int
    ceilings: Mapping[str, float]
    bound_s: Mapping[str, float]
    measuring_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine is; sent once, when it is ready.

    `resolved` holds every engine argument after "auto" was decided, as plain JSON types; `decisions` the
    reasons. `environment` names what a row's bytes may depend on (backend, instruction set, threads, library
    versions). `no_thinking` says why `thinking_token_budget` cannot be served, None if it can.
    """

    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    reproducible: bool
    resolved: Mapping[str, Any]
    decisions: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    load_s: float = 0.0
    pid: int = 0
    no_thinking: str | None = None

    def decided(self, *names: str) -> list[str]:
        """The decisions on settings of these names."""
        return [line for line in self.decisions if line.partition("=")[0] in names]


# Block states in `EngineStats.block_map`, one byte a block.
BLOCK_FREE, BLOCK_CACHED, BLOCK_USED, BLOCK_SHARED = 0, 1, 2, 3
