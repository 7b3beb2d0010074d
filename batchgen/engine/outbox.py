"""Outbox: what callers are to be told, as messages, until somebody takes them."""

from batchgen.engine.messages import SampleOutput
from batchgen.engine.sequence import Sequence
from batchgen.engine.stop import Stop
from batchgen.outputs import RowFailure


class Outbox:
    """New tokens and ends of samples, in the order in which they came."""

    def __init__(self) -> None:
        self._outputs: list[SampleOutput] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def tell(self, sequence: Sequence, stop: Stop | None = None, error: RowFailure | None = None) -> None:
        """Say what a sample has got since it was told last, and whether it has ended."""
        request = sequence.request
        has_times = stop is not None or sequence.num_sent_tokens == 0
        start = len(request.prompt) + sequence.num_sent_tokens
        sequence.num_sent_tokens = len(sequence.token_ids) - len(request.prompt)
        logprobs = None
        if request.wants_logprobs:
            logprobs, sequence.logprobs = tuple(sequence.logprobs), []
        self._outputs.append(
            SampleOutput(
                request_id=request.request_id,
                index=sequence.index,
                token_ids=sequence.token_ids[start:].tobytes(),
                finish_reason=None if stop is None else stop.finish_reason,
                stop_reason=None if stop is None else stop.stop_reason,
                num_cached_tokens=request.num_cached_tokens,
                error=error,
                serial=request.source.serial,
                logprobs=logprobs,
                prompt_logprobs=request.take_prompt_logprobs(),
                valid=sequence.is_valid,
                times=request.times if has_times else None,
            )
        )

    def put(self, output: SampleOutput) -> None:
        """Say what was put together elsewhere."""
        self._outputs.append(output)

    def drop(self, request_id: str) -> None:
        """Forget what was to be told of a request."""
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def take(self) -> list[SampleOutput]:
        """What is to be told since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs
