"""Request: what one row asks of the engine, as the core keeps it while any of its samples is unfinished."""

from array import array
from typing import TYPE_CHECKING

from batchgen.engine.messages import EngineRequest, RequestTimes
from batchgen.engine.scheduler_output import DrawRules, TokenLogprobs

if TYPE_CHECKING:
    from batchgen.engine.group import Group


class Request:
    """One ask: a prompt, how to draw, and what ends a sample.

    Args:
        source: the message it came in.
        arrival: running number; smaller came first.
        arrived_at: when it came, in seconds of the scheduler's clock.
        max_total_tokens: prompt and generated tokens at which a sample ends with `length`.
        eos_token_ids: the model's end-of-sequence ids.
        vocab_size: ids from here on do not exist; stop ids beyond are dropped.
        cache_root: first link of the prefix cache's hash chain (see `prefix_cache.cache_root`).
    """

    __slots__ = (
        "arrival",
        "arrived_at",
        "cache_root",
        "end_ids",
        "eos_ids",
        "first_scored",
        "first_token_at",
        "groups",
        "last_token_at",
        "max_total_tokens",
        "next_scored",
        "num_cached_tokens",
        "num_scores",
        "num_unfinished",
        "params",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "rules",
        "scheduled_at",
        "seed",
        "source",
        "streams",
        "wants_logprobs",
        "watches_repetition",
    )

    def __init__(
        self,
        source: EngineRequest,
        arrival: int,
        *,
        arrived_at: float = 0.0,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        cache_root: bytes,
    ):
        params = source.params
        self.source = source
        self.request_id = source.request_id
        self.params = params
        self.seed = source.seed
        self.streams = source.streams
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.cache_root = cache_root
        self.prompt = array("i")
        self.prompt.frombytes(source.prompt_token_ids)
        limit = max_model_len if params.max_tokens is None else len(self.prompt) + params.max_tokens
        self.max_total_tokens = min(limit, max_model_len)
        self.eos_ids = frozenset() if params.ignore_eos else eos_token_ids
        # The same set for all requests if it can be: it is looked into for every token.
        self.end_ids = self.eos_ids.union(params.stop_token_ids) if params.stop_token_ids else self.eos_ids
        self.watches_repetition = params.repetition_detection is not None
        # What is kept from being drawn before `min_tokens`; an id that the logits do not have needs no mask.
        self.rules = DrawRules(
            params,
            frozenset(token for token in self.end_ids if token < vocab_size),
            source.bad_words,
            len(self.prompt),
            params.needs_history,
        )
        self.groups: list[Group] = []
        self.num_unfinished = 1 if source.is_pinned else params.num_samples
        self.num_cached_tokens = 0
        # The likeliest of more samples than are given back are chosen on the caller's side.
        self.wants_logprobs = params.has_logprobs or (
            params.num_samples > params.n and not params.use_beam_search
        )
        # Prompt positions from here on have a score, which the step that computes the one before it gives.
        self.first_scored = len(self.prompt)
        if params.prompt_logprobs is not None:
            self.first_scored = min(params.first_prompt_logprob, len(self.prompt))
        self.next_scored = self.first_scored
        self.num_scores = 0
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def times(self) -> RequestTimes:
        """When what happened to it, as far as it has."""
        return RequestTimes(self.arrived_at, self.scheduled_at, self.first_token_at, self.last_token_at)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The scores of the prompt, once all are there, and only once."""
        if not self.prompt_logprobs or not self.has_all_scores:
            return None
        scores, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return scores

    @property
    def has_all_scores(self) -> bool:
        """Whether all prompt tokens have the scores that are wanted."""
        return self.first_scored + self.num_scores == len(self.prompt)
