"""Every reason for which a sample ends in the core, in the order in which they are asked.

`min_tokens` is no reason here: until it is reached the sampler keeps all stop ids from being drawn. Stop
strings are found on the caller's side, where there is text (`output_processor.py`).
"""

from array import array
from typing import NamedTuple

from batchgen.engine.request import Request
from batchgen.engine.sequence import Sequence
from batchgen.outputs import FinishReason
from batchgen.sampling_parts import RepetitionDetectionParams


class Stop(NamedTuple):
    """Why a sample ended; `stop_reason` is the stop token id, or a beam's stop string, or None."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


_EOS = Stop(FinishReason.STOP)
_LENGTH = Stop(FinishReason.LENGTH)
_REPETITION = Stop(FinishReason.REPETITION)


def stop_by_token(request: Request, token: int, num_tokens: int) -> Stop | None:
    """Why a sample of `num_tokens` tokens, prompt included, ends with `token`: its id or its length."""
    if token in request.eos_ids:
        return _EOS
    if token in request.params.stop_token_ids:
        return Stop(FinishReason.STOP, token)
    return _LENGTH if num_tokens >= request.max_total_tokens else None


def check_stop(sequence: Sequence, is_complete: bool = False) -> Stop | None:
    """Why the last accepted token of a sequence ends it, if it does.

    `is_complete` says that its grammar is at its end: nothing else could follow, whatever `min_tokens` asks.
    """
    request, token_ids = sequence.request, sequence.token_ids
    stop = stop_by_token(request, token_ids[-1], len(token_ids))
    if is_complete and (stop is None or stop is _LENGTH):
        return _EOS
    if stop is not None:
        return stop
    detection = request.params.repetition_detection
    if detection is not None and sequence.num_generated >= request.params.min_tokens:
        return _REPETITION if repeats(token_ids, len(request.prompt), detection) else None
    return None


def repeats(token_ids: "array[int]", start: int, detection: RepetitionDetectionParams) -> bool:
    """Whether the generated tokens, from `start` on, end in one pattern `min_count` times or more."""
    num_generated = len(token_ids) - start
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > num_generated:
            return False
        # Tokens repeat with period `size` when the stretch equals itself moved by one pattern.
        if token_ids[-span:-size] == token_ids[len(token_ids) - span + size :]:
            return True
    return False
