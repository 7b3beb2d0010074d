"""Names that users know from vLLM and its relatives, and that batchgen does not have: what to do instead.

Whoever refuses an unknown name looks here first; docs/vllm.md says the same of each name of vLLM's.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from batchgen.errors import UnknownNameError

_LEAVE_OUT = "; leave it out"
_DEVICES = "more than one device is not built yet" + _LEAVE_OUT
_GENERATES = "models here generate" + _LEAVE_OUT
_TEXT = "prompts are text" + _LEAVE_OUT
_EAGER = "nothing is captured or compiled at run time" + _LEAVE_OUT
_NGRAM = "use speculative: {method: ngram}"

ENGINE_ARGUMENTS: dict[str, str] = {
    "tokenizer_mode": "there is one kind of tokenizer, the fast one" + _LEAVE_OUT,
    "skip_tokenizer_init": "prompts as token ids need no tokenizer's time anyway" + _LEAVE_OUT,
    "quantization_config": "a checkpoint says itself how it is quantized" + _LEAVE_OUT,
    "prefix_caching_hash_algo": "there is one, chained sha256" + _LEAVE_OUT,
    "kv_offloading_size": "use swap_space, the GiB of host memory for preempted sequences",
    "spec_method": _NGRAM,
    "spec_model": f"draft models are not built yet; {_NGRAM}",
    "spec_tokens": _NGRAM,
    "speculative_model": f"draft models are not built yet; {_NGRAM}",
    "num_speculative_tokens": _NGRAM,
    "ngram_prompt_lookup_max": _NGRAM,
    "ngram_prompt_lookup_min": _NGRAM,
    "fully_sharded_loras": _DEVICES,
    "lora_dtype": "adapters are kept in the type that suits the model's weights" + _LEAVE_OUT,
    "lora_modules": "name adapters in requests, or load them with add_lora",
    "default_mm_loras": "prompts are text" + _LEAVE_OUT,
    "enable_tower_connector_lora": "prompts are text" + _LEAVE_OUT,
    "specialize_active_lora": _EAGER,
    "lora_target_modules": "an adapter's own config says what it adapts" + _LEAVE_OUT,
    "runner": _GENERATES,
    "convert": _GENERATES,
    "task": _GENERATES,
    "pooler_config": _GENERATES,
    "allowed_local_media_path": _TEXT,
    "allowed_media_domains": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "limit_mm_per_prompt": _TEXT,
    "cpu_offload_gb": "weights that do not fit are not run in pieces" + _LEAVE_OUT,
    "enforce_eager": _EAGER,
    "compilation_config": _EAGER,
    "max_seq_len_to_capture": _EAGER,
    "attention_config": "kernel_backend is the choice there is",
    "disable_custom_all_reduce": _DEVICES,
    "distributed_executor_backend": _DEVICES,
    "async_scheduling": "the engine decides it" + _LEAVE_OUT,
    "hf_token": "the hub's own login is used; leave it out and log in with 'hf auth login'",
    "hf_overrides": "a model's config is taken as it is" + _LEAVE_OUT,
    "structured_outputs_config": "there is one backend" + _LEAVE_OUT,
    "guided_decoding_backend": "there is one backend" + _LEAVE_OUT,
    "profiler_config": "put a profiler around the process" + _LEAVE_OUT,
    "logits_processors": "no code of the caller's runs in the engine; penalties, logit_bias, bad_words, "
    "allowed_token_ids and structured_outputs are sampling parameters",
    "load_format": "the model's files say what they are" + _LEAVE_OUT,
    "download_dir": "the hub's own cache is used; leave it out and set HF_HOME",
    "served_model_name": "there is no server yet" + _LEAVE_OUT,
}

SAMPLING_PARAMETERS: dict[str, str] = {
    "guided_decoding": "use structured_outputs",
    **{
        f"guided_{kind}": f"use structured_outputs: {{{kind}: ...}}"
        for kind in ("json", "regex", "choice", "grammar")
    },
    "response_format": "use structured_outputs: {json: ...}",
    "logits_processors": ENGINE_ARGUMENTS["logits_processors"],
    "max_new_tokens": "use max_tokens",
    "do_sample": "use temperature; 0 is greedy",
    "num_beams": "use LLM.beam_search, or use_beam_search: true with n",
    "num_return_sequences": "use n",
    "eos_token_id": "use stop_token_ids",
    "stop_strings": "use stop",
    "bad_words_ids": "use bad_words, as texts",
}

GRAMMAR_OPTIONS: dict[str, str] = {
    "json_schema": "use json",
    "ebnf": "use grammar",
    "backend": "there is one backend" + _LEAVE_OUT,
    "disable_fallback": "there is one backend" + _LEAVE_OUT,
}

DRAFTING: dict[str, str] = {
    "model": "draft models are not built yet; drafting is by looking up the text itself, method: ngram",
}

METHODS: dict[str, str] = {
    "encode": "models here generate",
    "embed": "models here generate",
    "classify": "models here generate",
    "reward": "models here generate",
    "collective_rpc": "no code of the caller's runs in the engine's process",
    "apply_model": "no code of the caller's runs in the engine's process",
    "start_profile": "put a profiler around the process",
    "stop_profile": "put a profiler around the process",
    "llm_engine": "'info' says what the engine is, get_metrics() what it does",
    "model_config": "'config' has the arguments as given, 'info' what they came to",
}

ASYNC_METHODS: dict[str, str] = METHODS | {
    "add_request": "use generate, whose outputs come as it is iterated over",
    "beam_search": "use generate with SamplingParams(use_beam_search=True, temperature=0, n=...)",
    "score": "use LLM.score, or generate with prompt_logprobs",
    "pin_prefix": "use LLM.pin_prefix",
}

T = TypeVar("T")


def refuse_unknown(what: str, instead: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: a keyword that it has no field for is refused by name, and not with a TypeError.

    Args:
        what: what a field is called, as in "sampling parameter".
        instead: names of other tools -> what to do here.
    """

    def decorate(cls: type[T]) -> type[T]:
        make: Any = cls.__init__
        known = [spec.name for spec in fields(cls) if spec.init]  # type: ignore[arg-type]

        @wraps(make)
        def checked(self: T, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    raise UnknownNameError(what, name, known, instead=instead)
            make(self, *args, **given)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


class WithoutForeignMethods:
    """A class whose `_not_offered` says of other tools' methods what to do here, when one is asked for."""

    _not_offered: Mapping[str, str] = METHODS

    if not TYPE_CHECKING:  # a type checker shall go on finding names that are not there

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name in self._not_offered:
                raise AttributeError(f"{kind}.{name} is not offered: {self._not_offered[name]}")
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)
