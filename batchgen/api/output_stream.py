"""OutputStream: the outputs of one request on their way from the engine's thread to an event loop."""

import asyncio
import copy
from dataclasses import replace

from batchgen.errors import BatchgenError
from batchgen.outputs import CompletionOutput, FinishReason, RequestOutput
from batchgen.sampling_params import RequestOutputKind, SamplingParams


class OutputStream:
    """Holds what its reader has not seen: one output at most, so that a slow reader costs no memory.

    `put` and `fail` are called in the reader's event loop.

    Args:
        request_id: of the request.
        params: of the request.
        loop: the reader's.
    """

    def __init__(self, request_id: str, params: SamplingParams, loop: asyncio.AbstractEventLoop):
        self.request_id = request_id
        self.loop = loop
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._is_whole_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._num_samples = params.n
        self._unread: RequestOutput | None = None
        self._newest: RequestOutput | None = None
        self._error: BatchgenError | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output: the newer one replaces the older, or is joined to it under DELTA."""
        if self._is_whole_only and not output.finished:
            return
        if self._is_delta and self._unread is not None:
            output = joined(self._unread, output)
        self._unread = self._newest = output
        self._has_news.set()

    def fail(self, error: BatchgenError) -> None:
        """Let the reader's next step raise; each reader raises an exception of its own."""
        self._error = copy.copy(error)
        self._has_news.set()

    def end_aborted(self) -> None:
        """Let the reader end with what there is, marked as aborted."""
        last = self._newest
        if last is not None and last.finished:
            return
        if last is None or self._is_delta:
            samples = [CompletionOutput(index, "", []) for index in range(self._num_samples)]
        else:
            samples = list(last.outputs)
        for index, sample in enumerate(samples):
            if sample.finish_reason is None:
                samples[index] = replace(sample, finish_reason=FinishReason.ABORT.value)
        base = last or RequestOutput(self.request_id, None, [])
        self.put(replace(base, outputs=samples, finished=True))

    async def next(self) -> RequestOutput:
        """The next output; what the request's end was is the last one's to say.

        Raises:
            BatchgenError: what `fail` was given, after all outputs.
        """
        while self._unread is None:
            if self._error is not None:
                raise self._error
            self._has_news.clear()
            await self._has_news.wait()
        output, self._unread = self._unread, None
        return output


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of the kind DELTA as one: what is new since before the first."""
    samples = {sample.index: replace(sample) for sample in first.outputs}
    for new in second.outputs:
        old = samples.get(new.index)
        if old is None:
            samples[new.index] = new
            continue
        logprobs = new.logprobs
        if old.logprobs is not None and logprobs is not None:
            logprobs = old.logprobs[:]
            for position in new.logprobs or ():
                logprobs.append(position)  # type: ignore[arg-type]
        samples[new.index] = replace(
            new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs
        )
    return replace(
        second,
        outputs=[samples[index] for index in sorted(samples)],
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
