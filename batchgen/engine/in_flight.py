"""InFlight: a request on the caller's side: its samples, what is told of them when, and which are best."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from batchgen.engine.core_request import BadWords, Encoder
from batchgen.engine.detokenizer import Decoder
from batchgen.engine.messages import EngineRequest, RequestTimes, SampleOutput, unpack_ids
from batchgen.engine.sample_text import SampleText
from batchgen.engine.token_logprobs import TokenTexts, prompt_logprobs
from batchgen.logprobs import PromptLogprobs
from batchgen.outputs import CompletionOutput, FinishReason, RequestOutput, RequestStateStats, RowFailure
from batchgen.sampling_params import RequestOutputKind


class OutputTokenizer(Decoder, Encoder, Protocol):
    """The part of a tokenizer that the caller's side of an engine needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens: spelling -> id."""


class InFlight:
    """One request of the caller.

    Args:
        request: as the caller gave it, with its prompt cut if it asked for that.
        serial: tells it from an earlier one of the same id.
        tokenizer: makes text of tokens.
        texts: of single tokens.
        end_ids: end-of-sequence ids of model and tokenizer.
    """

    def __init__(
        self,
        request: EngineRequest,
        serial: int,
        tokenizer: OutputTokenizer,
        texts: TokenTexts,
        end_ids: frozenset[int],
    ):
        params = request.params
        # With control tokens left out of the text, one that is given as a stop string shows only by its id.
        self.stop_tokens = {
            tokenizer.special_tokens[stop]: stop
            for stop in params.stop
            if params.skip_special_tokens and stop in tokenizer.special_tokens
        }
        self.request = request
        self.serial = serial
        self.kind = params.output_kind
        # Which samples are the best, and what a beam search found, is known only at the end.
        self._is_chosen_at_end = params.use_beam_search or params.num_samples > params.n
        self.shows_all = (
            request.streams and self.kind is not RequestOutputKind.FINAL_ONLY and not self._is_chosen_at_end
        )
        self._needs_tokens = self.shows_all or (bool(params.stop) and not params.use_beam_search)
        self.samples = [
            SampleText(
                params,
                tokenizer,
                index,
                self.stop_tokens,
                is_incremental=self.shows_all or bool(params.stop),
                texts=texts,
                end_ids=end_ids,
            )
            for index in range(params.num_samples)
        ]
        self.num_unfinished = params.num_samples
        self.error: RowFailure | None = None
        self._texts = texts if params.detokenize else None
        self._num_cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._arrival_time, self._arrived_at = time.time(), time.monotonic()
        self._times: RequestTimes | None = None
        self._is_ended_here = False
        self._is_shown = False
        self._num_unshown = 0  # tokens since the last output

    def for_core(self, bad_words: BadWords) -> EngineRequest:
        """The request as the core gets it: it tells tokens as they come only if somebody looks at them.

        Raises:
            ConfigError: a bad word without tokens.
        """
        params = self.request.params
        if self.stop_tokens:
            params = replace(params, stop_token_ids=tuple({*params.stop_token_ids, *self.stop_tokens}))
        return replace(
            self.request,
            params=params,
            streams=self._needs_tokens,
            serial=self.serial,
            prompt=None,
            bad_words=bad_words.ids(params.bad_words) if params.bad_words else self.request.bad_words,
        )

    def take(self, told: SampleOutput) -> bool:
        """Take in new tokens of a sample; whether it ended here, by a stop string, unknown to the core."""
        sample = self.samples[told.index]
        self._num_cached_tokens = told.num_cached_tokens
        self.error = self.error or told.error
        self._times = told.times or self._times
        if told.prompt_logprobs is not None:
            params = self.request.params
            self._prompt_logprobs = prompt_logprobs(
                told.prompt_logprobs, params.first_prompt_logprob, self._texts, params.flat_logprobs
            )
        ids = unpack_ids(told.token_ids)
        sample.extend(ids, told.finish_reason, told.stop_reason, told.logprobs, told.valid)
        self._num_unshown += len(ids)
        if told.cumulative_logprob is not None:
            sample.cumulative_logprob = told.cumulative_logprob
        if not sample.is_finished:
            return False
        self.num_unfinished -= 1
        self._is_ended_here = told.finish_reason is None
        return self._is_ended_here

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can come. A beam search may find fewer sequences than it is wide."""
        if self.request.params.use_beam_search:
            return self.num_unfinished < len(self.samples)
        return self.num_unfinished == 0

    @property
    def is_due(self) -> bool:
        """Whether what is new is to be told now, before the end."""
        interval = self.request.params.stream_interval or 1
        return self.shows_all and (not self._is_shown or self._num_unshown >= interval)

    def output(self) -> RequestOutput:
        """The samples as they are now, or, under DELTA, what is new of them."""
        is_finished = self.is_finished
        if is_finished and self._prompt_logprobs is None and self.error is None:
            self._prompt_logprobs = self._no_scores()
        self._is_shown, self._num_unshown = True, 0
        found = RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=unpack_ids(self.request.prompt_token_ids),
            outputs=self._best() if self._is_chosen_at_end else self._in_order(),
            finished=is_finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self._metrics(is_finished),
            error=self.error,
        )
        if self.kind is RequestOutputKind.DELTA:
            self._prompt_logprobs = None
        return found

    def _metrics(self, is_finished: bool) -> RequestStateStats:
        num_tokens = sum([len(sample.token_ids) for sample in self.samples])
        stats = RequestStateStats(num_tokens, self._arrival_time)
        if self._times is not None:
            stats.queued_ts, stats.scheduled_ts, first, last = self._times
            if num_tokens and first is not None:
                stats.first_token_ts, stats.first_token_latency = first, first - self._arrived_at
                if is_finished:
                    stats.last_token_ts = time.monotonic() if self._is_ended_here else last
        return stats

    def _no_scores(self) -> PromptLogprobs | None:
        """Of a prompt in which there is nothing to score; None if nobody asked, or has been told already."""
        params = self.request.params
        if params.prompt_logprobs is None:
            return None
        num_tokens = len(unpack_ids(self.request.prompt_token_ids))
        if num_tokens > params.first_prompt_logprob:
            return None
        return prompt_logprobs((), num_tokens, self._texts, params.flat_logprobs)

    def _in_order(self) -> list[CompletionOutput]:
        if self.kind is not RequestOutputKind.DELTA:
            return [sample.cumulative() for sample in self.samples]
        return [delta for sample in self.samples if (delta := sample.delta()) is not None]

    def _best(self) -> list[CompletionOutput]:
        """The `n` best samples, numbered anew; a beam search has ranked its own."""
        samples = [sample for sample in self.samples if sample.is_finished]
        if not self.request.params.use_beam_search:
            samples.sort(key=_badness)
        outputs = [sample.cumulative() for sample in samples[: self.request.params.n]]
        for index, output in enumerate(outputs):
            output.index = index
        return outputs


def _badness(sample: SampleText) -> tuple[bool, float, int]:
    """Failed samples come last, then the less likely; the earlier of two alike is the better."""
    value = sample.cumulative_logprob
    likely = -math.inf if value is None or math.isnan(value) else value
    return sample.finish_reason == FinishReason.ERROR, -likely, sample.index
