"""SampleText: one sample on the caller's side: its tokens, its text, and the stop string that may end it."""

from collections.abc import Container, Mapping, Sequence

from batchgen.engine.detokenizer import Decoder, Detokenizer, StopMatch, StopStrings
from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.engine.token_logprobs import TokenTexts, new_logprobs, position_logprobs
from batchgen.logprobs import Logprobs
from batchgen.outputs import CompletionOutput, FinishReason
from batchgen.sampling_params import SamplingParams


class SampleText:
    """What one sample has become.

    Args:
        params: of the request.
        decoder: makes text of token ids.
        index: number of the sample.
        stop_tokens: ids that stand for a stop string spelled as a control token.
        is_incremental: text is needed as tokens come, for a stop string or a live reader.
        texts: of single tokens, for log probabilities.
        end_ids: end-of-sequence ids; one that ends a sample is no part of its text.
    """

    def __init__(
        self,
        params: SamplingParams,
        decoder: Decoder,
        index: int,
        stop_tokens: Mapping[int, str],
        *,
        is_incremental: bool,
        texts: TokenTexts | None = None,
        end_ids: Container[int] = (),
    ):
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None
        self.valid: bool | None = None
        self._params = params
        self._stop_tokens = stop_tokens
        self._end_ids = end_ids
        self._is_incremental = is_incremental and params.detokenize
        self._detokenizer = Detokenizer(
            decoder,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stops = StopStrings(params.stop)
        self._num_checked = 0
        self._num_text_shown = 0
        self._num_ids_shown = 0
        self._is_end_shown = False
        self._texts = texts if params.detokenize else None
        self._logprobs: Logprobs | None = new_logprobs(params.flat_logprobs) if params.has_logprobs else None

    @property
    def is_finished(self) -> bool:
        """Whether nothing can be added to it."""
        return self.finish_reason is not None

    def extend(
        self,
        ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: int | str | None,
        logprobs: Sequence[TokenLogprobs] | None = None,
        valid: bool | None = None,
    ) -> None:
        """Take in new tokens, up to the one with which a stop string is complete.

        Args:
            ids: drawn since the last call.
            finish_reason: why the core ended the sample with the last of them, or None.
            stop_reason: the stop token id with which it did, or the stop string that a beam came to contain.
            logprobs: of each of `ids`, if the core tells them.
            valid: whether the sample's grammar may end after the last of them.
        """
        num_visible = len(ids) - self._ends_hidden(ids, finish_reason, stop_reason)
        for position, token in enumerate(ids):
            self.token_ids.append(token)
            if logprobs is not None:
                self._add_logprobs(logprobs[position])
            if position < num_visible and self._params.detokenize and self._append(token):
                # Of a text cut between two messages nobody knows whether its grammar could end there.
                self.valid = valid if valid is None or position == len(ids) - 1 else False
                return
        self.valid = valid
        if finish_reason is not None:
            self._finish(finish_reason, stop_reason)

    def cumulative(self) -> CompletionOutput:
        """All tokens and text so far."""
        self._is_end_shown = self.is_finished
        text = self.text if self.is_finished else self.text[: self._num_sure()]
        return self._completion(text, 0)

    def delta(self) -> CompletionOutput | None:
        """What was not shown yet; None when there is nothing new."""
        end = len(self.text) if self.is_finished else self._num_sure()
        text = self.text[self._num_text_shown : end]
        start, self._num_ids_shown = self._num_ids_shown, len(self.token_ids)
        if not text and start == len(self.token_ids) and self._is_end_shown >= self.is_finished:
            return None
        self._num_text_shown = max(end, self._num_text_shown)
        self._is_end_shown = self.is_finished
        return self._completion(text, start)

    def _ends_hidden(
        self, ids: Sequence[int], finish_reason: str | None, stop_reason: int | str | None
    ) -> bool:
        """Whether the last token ended the sample, and is counted but no part of its text.

        So it is with end-of-sequence, and with a stop token unless it was asked for. What a grammar or a stop
        string ended has no such token.
        """
        if finish_reason != FinishReason.STOP or not ids or isinstance(stop_reason, str):
            return False
        if stop_reason is None:
            return ids[-1] in self._end_ids
        return not self._params.include_stop_str_in_output

    def _add_logprobs(self, told: TokenLogprobs) -> None:
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + told.values[0]
        if self._logprobs is not None:
            self._logprobs.append(position_logprobs(told, self._texts))

    def _append(self, token: int) -> bool:
        """Add a token to the text; whether a stop string ended the sample."""
        if not self._is_incremental:
            self._detokenizer.ids.append(token)
            return False
        self._detokenizer.append(token)
        self.text = self._detokenizer.text
        # As with stop tokens, what the first `min_tokens` tokens say ends nothing.
        if len(self.token_ids) <= self._params.min_tokens:
            self._num_checked = len(self.text)
        return self._cut_at_stop()

    def _cut_at_stop(self) -> bool:
        if len(self.text) <= self._num_checked:
            return False
        match: StopMatch | None = self._stops.find(self.text, self._num_checked)
        self._num_checked = len(self.text)
        if match is None:
            return False
        self.text = self.text[: match.end if self._params.include_stop_str_in_output else match.start]
        self.finish_reason, self.stop_reason = FinishReason.STOP.value, match.stop
        return True

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        if self._params.detokenize:
            self.text = self._detokenizer.finish()
            if self._cut_at_stop():  # in what was held back as half a character
                return
        self.finish_reason = str(finish_reason)
        if isinstance(stop_reason, int):
            stop_reason = self._stop_tokens.get(stop_reason, stop_reason)
        self.stop_reason = stop_reason

    def _num_sure(self) -> int:
        """Characters that no stop string can take away any more."""
        if self._params.include_stop_str_in_output:
            return len(self.text)
        return len(self.text) - self._stops.num_held_back(self.text)

    def _completion(self, text: str, start: int) -> CompletionOutput:
        """What is known, with tokens from `start` on."""
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            valid=self.valid,
        )
