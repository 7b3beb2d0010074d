"""OutputProcessor: on the caller's side, tokens of samples in, RequestOutputs with text out."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from batchgen.engine.detokenizer import Decoder
from batchgen.engine.messages import EngineRequest, SampleOutput, unpack_ids
from batchgen.engine.sample_text import SampleText
from batchgen.errors import EngineError
from batchgen.outputs import CompletionOutput, RequestOutput, RowFailure
from batchgen.sampling_params import RequestOutputKind


class OutputTokenizer(Decoder, Protocol):
    """The part of a tokenizer that the caller's side of an engine needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens: spelling -> id."""


class _InFlight:
    """One request of the caller."""

    def __init__(self, request: EngineRequest, serial: int, tokenizer: OutputTokenizer):
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
        self.shows_all = request.streams and self.kind is not RequestOutputKind.FINAL_ONLY
        self.samples = [
            SampleText(
                params, tokenizer, index, self.stop_tokens, is_incremental=self.shows_all or bool(params.stop)
            )
            for index in range(params.n)
        ]
        self.num_unfinished = params.n
        self.num_cached_tokens = 0
        self.error: RowFailure | None = None

    def for_core(self) -> EngineRequest:
        """The request as the core gets it: it tells tokens as they come only if somebody looks at them."""
        params = self.request.params
        if self.stop_tokens:
            params = replace(params, stop_token_ids=tuple({*params.stop_token_ids, *self.stop_tokens}))
        return replace(
            self.request,
            params=params,
            streams=self.shows_all or bool(params.stop),
            serial=self.serial,
            prompt=None,
        )

    def output(self) -> RequestOutput:
        """The samples as they are now, or, under DELTA, what is new of them."""
        is_finished = self.num_unfinished == 0
        completions: list[CompletionOutput] = []
        for sample in self.samples:
            if self.kind is not RequestOutputKind.DELTA:
                completions.append(sample.cumulative())
            elif (delta := sample.delta()) is not None:
                completions.append(delta)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=unpack_ids(self.request.prompt_token_ids),
            outputs=completions,
            finished=is_finished,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


class OutputProcessor:
    """Keeps the requests of one caller, makes text of tokens, and finds stop strings.

    What it says of a sample is final: tokens that the core draws before it hears that a stop string was found
    change neither text nor counts.
    """

    def __init__(self, tokenizer: OutputTokenizer):
        self._tokenizer = tokenizer
        self._requests: dict[str, _InFlight] = {}
        self._num_added = 0

    def add(self, request: EngineRequest) -> EngineRequest:
        """Enter a request; returns the form in which it is to be sent to the core.

        Raises:
            EngineError: its id is in flight.
        """
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is already in flight; ids must be unique")
        self._num_added += 1
        entry = _InFlight(request, self._num_added, self._tokenizer)
        self._requests[request.request_id] = entry
        return entry.for_core()

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; returns those that were in flight."""
        return [request_id for request_id in request_ids if self._requests.pop(request_id, None) is not None]

    def in_flight(self) -> list[str]:
        """Ids of the requests not finished, in the order in which they were added."""
        return list(self._requests)

    @property
    def has_requests(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._requests)

    def process(self, samples: Iterable[SampleOutput]) -> tuple[list[RequestOutput], list[tuple[str, int]]]:
        """Take in what the core told.

        Returns: outputs for the caller, at most one a request, and the samples, as (request id, index), of
            which the
        core shall draw no more.
        """
        touched: dict[str, _InFlight] = {}
        ended_here: list[tuple[str, int]] = []
        for told in samples:
            entry = self._requests.get(told.request_id)
            # A late word for a request that was aborted, perhaps with a new one under the same id.
            if entry is None or entry.serial != told.serial or entry.samples[told.index].is_finished:
                continue
            touched[told.request_id] = entry
            sample = entry.samples[told.index]
            entry.num_cached_tokens = told.num_cached_tokens
            entry.error = entry.error or told.error
            sample.extend(unpack_ids(told.token_ids), told.finish_reason, told.stop_reason)
            if sample.is_finished:
                entry.num_unfinished -= 1
                if told.finish_reason is None:
                    ended_here.append((told.request_id, told.index))
        outputs = []
        for request_id, entry in touched.items():
            if entry.num_unfinished == 0:
                del self._requests[request_id]
                outputs.append(entry.output())
            elif entry.shows_all:
                outputs.append(entry.output())
        return outputs, ended_here
