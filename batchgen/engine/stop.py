"""Every reason for which a sample ends in the core, in the order in which they are asked.

`min_tokens` is no reason here: until it is reached the sampler keeps all stop ids from being drawn. Stop
strings are found on the caller's side, where there is text (`output_processor.py`).
"""

from typing import NamedTuple

from batchgen.engine.sequence import Sequence
from batchgen.outputs import FinishReason


class Stop(NamedTuple):
    """Why a sample ended; `stop_reason` is the stop token id, None for end-of-sequence and length."""

    finish_reason: FinishReason
    stop_reason: int | None = None


_EOS = Stop(FinishReason.STOP)
_LENGTH = Stop(FinishReason.LENGTH)


def check_stop(sequence: Sequence) -> Stop | None:
    """Whether the last accepted token of a sequence ends it: end of sequence, stop token, length."""
    request = sequence.request
    token = sequence.token_ids[-1]
    if token in request.eos_ids:
        return _EOS
    if token in request.params.stop_token_ids:
        return Stop(FinishReason.STOP, token)
    if len(sequence.token_ids) >= request.max_total_tokens:
        return _LENGTH
    return None
