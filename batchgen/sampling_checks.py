"""What is right in SamplingParams: each field by itself, fields together, and all of them on an engine."""

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from batchgen.errors import ConfigError
from batchgen.field_rules import (
    FLAG,
    FLAG_OR_NONE,
    Rule,
    above,
    check_fields,
    instance,
    is_whole,
    number,
    one_of,
    or_none,
    whole,
)
from batchgen.sampling_parts import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

if TYPE_CHECKING:
    from batchgen.engine.messages import EngineInfo
    from batchgen.sampling_params import SamplingParams

# vLLM's limits.
MOST_SAMPLES = 16384
MOST_LOGPROB_IDS = 128
MOST_LENGTH_PENALTY = 16  # ours
GREEDY_BELOW = 1e-5

# Fields that vLLM has and that batchgen does not offer (docs/vllm.md says why): a value other than the
# default is refused by name.
REFUSED = frozenset(
    ("watermarking", "routed_experts_prompt_start", "trace_decode_token_ids", "skip_clone", "extra_args")
)

_BEAMS_ONLY = ("length_penalty", "early_stopping")
# What has no meaning in a search that draws nothing.
_DRAWING = ("seed", "top_p", "top_k", "min_p", "thinking_token_budget", "repetition_detection")


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) and each for each in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(is_whole(each) and each >= 0 for each in value)


_TEXTS: Rule = (_is_texts, "a non-empty string or a list of such")
_SAMPLES = whole(1, f"a whole number from 1 to {MOST_SAMPLES}", MOST_SAMPLES)
_COUNT_OF_LOGPROBS = or_none(whole(-1, "a number of tokens, 0 or more, or -1 for all"))
_FEW_IDS = or_none(
    (
        lambda value: _is_ids(value) and len(value) <= MOST_LOGPROB_IDS,
        f"a list of at most {MOST_LOGPROB_IDS} token ids",
    )
)

_RULES: dict[str, Rule] = {
    "n": _SAMPLES,
    "best_of": or_none(_SAMPLES),
    "temperature": number(0, math.inf, "a number, 0 or more"),
    "top_p": above(0, 1, "above 0 and at most 1"),
    "top_k": whole(0, "a whole number: 0 or -1 for all tokens, else 1 or more"),
    "min_p": number(0, 1, "from 0 to 1"),
    "presence_penalty": number(-2, 2, "from -2 to 2"),
    "frequency_penalty": number(-2, 2, "from -2 to 2"),
    "repetition_penalty": above(0, math.inf, "a number above 0"),
    # Beyond that every length to this power is as good as nothing, or infinite.
    "length_penalty": number(-MOST_LENGTH_PENALTY, MOST_LENGTH_PENALTY, "a number from -16 to 16"),
    "early_stopping": one_of(True, False, "never", words='true, false or "never"'),
    "seed": or_none(whole(-(2**63), "a whole number of 64 bits", 2**64 - 1)),
    "stop": _TEXTS,
    "bad_words": _TEXTS,
    "stop_token_ids": (_is_ids, "a list of token ids"),
    "allowed_token_ids": or_none(
        (lambda value: _is_ids(value) and bool(value), "a list of token ids that is not empty")
    ),
    "logprob_token_ids": _FEW_IDS,
    "prompt_logprob_token_ids": _FEW_IDS,
    "logit_bias": or_none(
        (
            lambda value: all(token >= 0 and abs(bias) <= 100 for token, bias in value.items()),
            "a mapping of token id to a bias from -100 to 100",
        )
    ),
    "max_tokens": or_none(whole(1, "1 or more")),
    "min_tokens": whole(0, "a whole number, 0 or more"),
    "logprobs": _COUNT_OF_LOGPROBS,
    "prompt_logprobs": _COUNT_OF_LOGPROBS,
    "prompt_logprob_start": or_none(whole(0, "a position in the prompt, 0 or more")),
    "thinking_token_budget": or_none(whole(0, "a number of tokens, 0 or more")),
    "stream_interval": or_none(whole(1, "a number of tokens, 1 or more")),
    "truncate_prompt_tokens": or_none(
        (
            lambda value: is_whole(value) and (value >= 1 or value == -1),
            "a number of tokens, 1 or more, or -1 for as many as the model takes",
        )
    ),
    "structured_outputs": or_none(
        instance(StructuredOutputsParams, "a StructuredOutputsParams or a mapping of its fields")
    ),
    "repetition_detection": or_none(
        instance(RepetitionDetectionParams, "a RepetitionDetectionParams or a mapping of its fields")
    ),
    "skip_reading_prefix_cache": FLAG_OR_NONE,
    "output_kind": instance(RequestOutputKind, "a RequestOutputKind"),
    "ignore_eos": FLAG,
    "detokenize": FLAG,
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG,
    "flat_logprobs": FLAG,
    "use_beam_search": FLAG,
}


def check_each(params: "SamplingParams") -> None:
    """Every field by itself.

    Raises:
        ConfigError: names the field, the rule and the value.
    """
    check_fields(params, _RULES, "sampling parameter")
    for spec in fields(params):
        value = getattr(params, spec.name)
        if spec.name in REFUSED and value != spec.default:
            raise ConfigError(
                f"sampling parameter {spec.name!r} is not offered (got {value!r:.100}); leave it out"
            )


def check_together(params: "SamplingParams") -> None:
    """The fields with each other; each is right by itself.

    Raises:
        ConfigError: names the fields that do not go together.
    """
    p = params
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ConfigError(
            f"sampling parameter 'min_tokens' must be at most max_tokens ({p.max_tokens}); got {p.min_tokens}"
        )
    if p.stop and not p.detokenize:
        raise ConfigError("sampling parameter 'stop' needs detokenize: true; stop strings are found in text")
    if p.prompt_logprobs is None:
        for name in ("prompt_logprob_start", "prompt_logprob_token_ids"):
            if getattr(p, name) is not None:
                raise ConfigError(f"sampling parameter {name!r} needs prompt_logprobs")
    if p.thinking_token_budget is not None and p.structured_outputs is not None:
        raise ConfigError(
            "sampling parameter 'thinking_token_budget' excludes 'structured_outputs', which say "
            "every token of the text; leave one out"
        )
    if p.best_of is not None and p.best_of < p.n:
        raise ConfigError(f"sampling parameter 'best_of' must be at least n ({p.n}); got {p.best_of}")
    if p.use_beam_search:
        _check_beams(p)
        return
    changed = _changed(p, _BEAMS_ONLY)
    if changed:
        raise ConfigError(f"sampling parameter {changed[0]!r} needs use_beam_search: true")
    if p.num_samples > p.n and p.is_greedy:
        raise ConfigError(
            f"sampling parameter 'best_of' ({p.best_of}) above n ({p.n}) needs a temperature above 0: "
            f"greedy samples are all the same"
        )


def _check_beams(params: "SamplingParams") -> None:
    if not params.is_greedy:
        raise ConfigError(
            f"sampling parameter 'use_beam_search' needs temperature: 0, for a beam search draws nothing; "
            f"got temperature {params.temperature!r}"
        )
    changed = _changed(params, _DRAWING)
    if changed:
        raise ConfigError(
            f"sampling parameter 'use_beam_search' excludes {', '.join(map(repr, changed))}; leave out "
            f"what says how to draw"
        )


def _changed(params: "SamplingParams", names: Iterable[str]) -> list[str]:
    return [
        spec.name
        for spec in fields(params)
        if spec.name in names and getattr(params, spec.name) != spec.default
    ]


def check_engine_limits(params: "SamplingParams", info: "EngineInfo") -> None:
    """What only an engine knows: its most log probabilities, its token ids, whether the model can think.

    Raises:
        ConfigError: names the field and the engine's limit.
    """
    most = info.resolved.get("max_logprobs", 20)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is None or most == -1:
            continue
        if value > most or (value == -1 and most < info.vocab_size):
            raise ConfigError(
                f"sampling parameter {name!r} is {value}, but the engine gives at most {most}; "
                f"raise max_logprobs (-1: no limit)"
            )
    if params.thinking_token_budget is not None and info.no_thinking is not None:
        raise ConfigError(f"sampling parameter 'thinking_token_budget': {info.no_thinking}")
    check_token_ids(params, info.vocab_size)


def check_token_ids(params: "SamplingParams", vocab_size: int) -> None:
    """Whether the model has the token ids that parameters name.

    Raises:
        ConfigError: names the field, the id and the model's last one.
    """
    for name in ("allowed_token_ids", "logit_bias", "logprob_token_ids", "prompt_logprob_token_ids"):
        beyond = [token for token in getattr(params, name) or () if token >= vocab_size]
        if beyond:
            raise ConfigError(
                f"sampling parameter {name!r} has token id {beyond[0]}, but the model's ids end at "
                f"{vocab_size - 1}"
            )
