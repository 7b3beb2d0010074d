"""OutputProcessor: on the caller's side, tokens of samples in, RequestOutputs with text out."""

from collections.abc import Iterable

from batchgen.engine.core_request import BadWords, truncated
from batchgen.engine.in_flight import InFlight, OutputTokenizer
from batchgen.engine.messages import EngineInfo, EngineRequest, SampleOutput
from batchgen.engine.token_logprobs import TokenTexts
from batchgen.errors import EngineError
from batchgen.outputs import RequestOutput

__all__ = ["OutputProcessor", "OutputTokenizer"]


class OutputProcessor:
    """Keeps the requests of one caller, makes text of tokens, and finds stop strings.

    What it says of a sample is final: tokens that the core draws before it hears that a stop string was found
    change neither text nor counts.

    Args:
        tokenizer: makes text of tokens.
        info: of the engine, if it is known yet.
    """

    def __init__(self, tokenizer: OutputTokenizer, info: EngineInfo | None = None):
        self._tokenizer = tokenizer
        self._max_model_len = 2**31
        self._end_ids = frozenset(tokenizer.eos_token_ids)
        if info is not None:
            self.know(info)
        self._texts = TokenTexts(tokenizer)
        self._bad_words = BadWords(tokenizer)
        self._requests: dict[str, InFlight] = {}
        self._num_added = 0

    def know(self, info: EngineInfo) -> None:
        """Take in what a started engine is, before the first request."""
        self._max_model_len = info.max_model_len
        self._end_ids |= frozenset(info.eos_token_ids)

    def add(self, request: EngineRequest) -> EngineRequest:
        """Enter a request; returns the form in which it is to be sent to the core.

        Raises:
            EngineError: its id is in flight.
            ConfigError: a bad word without tokens.
        """
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is already in flight; ids must be unique")
        self._num_added += 1
        cut = truncated(request, self._max_model_len)
        entry = InFlight(cut, self._num_added, self._tokenizer, self._texts, self._end_ids)
        for_core = entry.for_core(self._bad_words)
        self._requests[request.request_id] = entry
        return for_core

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

        Returns: outputs for the caller, at most one a request; and the samples, as (request id, index), of
        which the core shall draw no more.
        """
        touched: dict[str, InFlight] = {}
        ended_here: list[tuple[str, int]] = []
        for told in samples:
            entry = self._requests.get(told.request_id)
            # A late word for a request that was aborted, perhaps with a new one under the same id.
            if entry is None or entry.serial != told.serial or entry.samples[told.index].is_finished:
                continue
            touched[told.request_id] = entry
            if entry.take(told):
                ended_here.append((told.request_id, told.index))
        outputs = []
        for request_id, entry in touched.items():
            if entry.is_finished:
                del self._requests[request_id]
                outputs.append(entry.output())
            elif entry.is_due:
                outputs.append(entry.output())
        return outputs, ended_here
