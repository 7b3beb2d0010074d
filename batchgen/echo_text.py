"""What an EchoEngine says: its options, and the samples that it makes of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qsl

from batchgen.byte_tokenizer import ByteTokenizer, utf8
from batchgen.engine.messages import EngineRequest
from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.engine.token_logprobs import TokenTexts, new_logprobs, position_logprobs, prompt_logprobs
from batchgen.errors import ConfigError, UnknownNameError
from batchgen.outputs import CompletionOutput, FinishReason, PromptLogprobs
from batchgen.sampling_params import SamplingParams
from batchgen.seeds import mix64

# Text, token ids and finish reason of a sample.
Sample = tuple[str, list[int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoOptions:
    """How an EchoEngine behaves; the keys of an `echo:?key=value&...` model name.

    Args:
        delay_ms: real time of a step; 0 jumps from one finished request to the next.
        batch: sequences that run at once, unless `max_num_seqs` says otherwise.
        jitter: up to so many more steps a request, drawn from its prompt: rows finish out of order.
        fail: a prompt that holds this text comes back as an `engine_error`.
        die_after: after so many finished requests the engine is dead and every call raises EngineError.
        load_s: real time that starting takes.
    """

    delay_ms: float = 0.0
    batch: int = 64
    jitter: int = 0
    fail: str = ""
    die_after: int = 0
    load_s: float = 0.0

    @classmethod
    def parse(cls, model: str) -> "EchoOptions":
        """Options of a model name `echo:` or `echo:?delay_ms=2&batch=16`."""
        prefix, _, query = model.partition("?")
        if prefix != "echo:":
            raise ConfigError(f"model {model!r}: write echo: or echo:?option=value&option=value")
        kinds: dict[str, type] = {spec.name: type(spec.default) for spec in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in parse_qsl(query, keep_blank_values=True):
            if name not in kinds:
                raise UnknownNameError("echo option", name, kinds, model)
            try:
                values[name] = kinds[name](text)
            except ValueError as error:
                raise ConfigError(f"model {model!r}: {name} must be a number; got {text!r}") from error
        return cls(**values)


class EchoTexts:
    """Makes samples of prompts: the prompt and a stamp of prompt and seed. Each token is certain."""

    def __init__(self, tokenizer: ByteTokenizer, max_model_len: int):
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._texts = TokenTexts(tokenizer)

    def samples(
        self, request: EngineRequest, prompt_ids: list[int], adapter: str | None = None
    ) -> list[Sample]:
        """The `n` samples of a request; none of one that only pins its prompt.

        Args:
            request: what is asked.
            prompt_ids: its prompt.
            adapter: content hash of its adapter, in hex; another one gives another stamp.
        """
        if request.is_pinned:
            return [("", [], FinishReason.STOP)]
        params = request.params
        text = self._tokenizer.decode(prompt_ids)
        key = prompt_hash(request.prompt_token_ids) ^ (0 if params.is_greedy else request.seed)
        key ^= 0 if adapter is None else int(adapter[:16], 16)
        room = self._max_model_len - len(prompt_ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        stamps = [f"{text}|{mix64(key ^ (index << 32)):016x}" for index in range(params.n)]
        return [self._cut(stamp, most, params) for stamp in stamps]

    def completion(self, index: int, sample: Sample, params: SamplingParams) -> CompletionOutput:
        """A sample as the caller gets it. No text of an echo conforms to a grammar, unless by chance."""
        text, ids, reason = sample
        logprobs = new_logprobs(params.flat_logprobs)
        for told in self._certain(ids) if params.has_logprobs else ():
            logprobs.append(position_logprobs(told, self._texts))
        is_summed = params.has_logprobs or params.num_samples > params.n or params.use_beam_search
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            cumulative_logprob=0.0 if is_summed else None,
            logprobs=logprobs if params.has_logprobs else None,
            finish_reason=str(reason),
            valid=None if params.structured_outputs is None else False,
        )

    def prompt_logprobs(self, prompt_ids: list[int], params: SamplingParams) -> PromptLogprobs | None:
        """Those of the prompt, if they are asked for."""
        if params.prompt_logprobs is None:
            return None
        start = params.first_prompt_logprob
        return prompt_logprobs(self._certain(prompt_ids[start:]), start, self._texts, params.flat_logprobs)

    @staticmethod
    def _certain(ids: Sequence[int]) -> list[TokenLogprobs]:
        return [TokenLogprobs((token,), (0.0,), (1,)) for token in ids]

    def _cut(self, text: str, most: int, params: SamplingParams) -> tuple[str, list[int], str]:
        ids = list(utf8(text))
        if params.ignore_eos or len(ids) < params.min_tokens:
            least = most if params.ignore_eos else params.min_tokens
            ids = (ids * (least // len(ids) + 1))[:least]
        else:
            ids.extend(self._tokenizer.eos_token_ids[:1])
        reason = FinishReason.LENGTH if len(ids) > most or params.ignore_eos else FinishReason.STOP
        ids = ids[:most]
        text = self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        found = min((at for stop in params.stop if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            return text[:found], list(utf8(text[:found])), FinishReason.STOP
        return text, ids, reason


def prompt_hash(packed: bytes) -> int:
    """A 64-bit number from packed token ids, the same in every process."""
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
