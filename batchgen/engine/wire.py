"""The wire between a client and its engine child: length-prefixed pickles over pipes.

Caller to child: a Hello, then lists of (command, argument): the commands of EngineCore, and "call" with
(number, method, arguments) where the answer matters. Child to caller: one (kind, content) a step, and one for
each call. Both ends are the same user's own processes, so pickle is safe here.
"""

import os
import pickle
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import batchgen.errors
from batchgen.config import EngineConfig
from batchgen.engine.messages import RequestTimes, SampleOutput
from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.errors import BatchgenError, EngineError

# Kinds of messages from the child.
LOADING = "loading"  # str: what it is about to do
READY = "ready"  # (EngineInfo, EngineStats)
FAILED = "failed"  # (class name, message): loading failed
STEP = "step"  # (list of encoded SampleOutput, EngineStats or None)
STATS = "stats"  # EngineStats that was asked for
ANSWER = "answer"  # (number of the call, what it returned, None) or (number, None, encoded error)
WAKE = "wake"  # none from the child: a thread of the caller's wants its `poll` to return


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first packet to a child: what it is to be.

    Args:
        config: settings of the engine.
        executor: "module:function" that loads the executor.
        tokenizer_eos_ids: end-of-sequence ids of the tokenizer.
        parent_pid: whose death is the child's.
        log_level: level of the "batchgen" logger.
        tells_loading: send what is said of loading as messages, not as lines of the log.
    """

    config: EngineConfig
    executor: str
    tokenizer_eos_ids: tuple[int, ...]
    parent_pid: int
    log_level: int
    tells_loading: bool = False


_LENGTH = struct.Struct("<Q")


def encode(message: Any) -> bytes:
    """A message as bytes with its length in front."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def write(fd: int, packet: bytes) -> None:
    """Write a packet whole; OSError when the other end is gone."""
    view = memoryview(packet)
    while view:
        view = view[os.write(fd, view) :]


def read(fd: int) -> bytes | None:
    """The content of the next packet; None when the other end is gone. Waits."""
    head = _read_exactly(fd, _LENGTH.size)
    return None if head is None else _read_exactly(fd, _LENGTH.unpack(head)[0])


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def encode_outputs(outputs: Iterable[SampleOutput]) -> list[tuple[Any, ...]]:
    """SampleOutputs as tuples, which pickle several times as fast: the engine loop pays for it."""
    return [
        (
            output.request_id,
            output.index,
            output.token_ids,
            output.finish_reason and str(output.finish_reason),
            output.stop_reason,
            output.num_cached_tokens,
            output.error,
            output.serial,
            output.logprobs and _encode_logprobs(output.logprobs),
            output.prompt_logprobs and _encode_logprobs(output.prompt_logprobs),
            output.valid,
            output.cumulative_logprob,
            output.times and tuple(output.times),
        )
        for output in outputs
    ]


def decode_outputs(encoded: Iterable[tuple[Any, ...]]) -> list[SampleOutput]:
    """The SampleOutputs of `encode_outputs`."""
    outputs = []
    for *head, logprobs, prompt_logprobs, valid, cumulative_logprob, times in encoded:
        told = logprobs and _decode_logprobs(logprobs)
        of_prompt = prompt_logprobs and _decode_logprobs(prompt_logprobs)
        values: list[Any] = [
            *head,
            told,
            of_prompt,
            valid,
            cumulative_logprob,
            times and RequestTimes(*times),
        ]
        outputs.append(SampleOutput(*values))
    return outputs


def _encode_logprobs(positions: tuple[TokenLogprobs, ...]) -> list[tuple[Any, ...]]:
    return [(position.ids, position.values, position.ranks) for position in positions]


def _decode_logprobs(encoded: list[tuple[Any, ...]]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(*position) for position in encoded)


def encode_error(error: BaseException) -> tuple[str, str]:
    """An exception by class name and message; its own pickling may need arguments that are gone."""
    return type(error).__name__, str(error) or repr(error)


def decode_error(encoded: tuple[str, str], doing: str = "start") -> BatchgenError:
    """The same exception if it is one of ours, else an EngineError that names it and says what failed.

    Args:
        encoded: of `encode_error`.
        doing: what the engine could not do.
    """
    name, message = encoded
    kind = getattr(batchgen.errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BatchgenError)):
        return EngineError(f"the engine could not {doing}: {name}: {message}")
    error = kind.__new__(kind)
    error.args = (message,)
    return error
