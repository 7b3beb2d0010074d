"""EngineConfig and its parts: frozen, checked, built from vLLM's flat names by one function."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from batchgen.errors import ConfigError, UnknownNameError
from batchgen.field_rules import (
    FLAG,
    FLAG_OR_NONE,
    TEXT_OR_NONE,
    Rule,
    above,
    check_fields,
    instance,
    number,
    one_of,
    only_built,
    or_none,
    whole,
)
from batchgen.foreign_names import ENGINE_ARGUMENTS
from batchgen.ngram_settings import NgramSettings

# More would only be a slip of the finger, which the OpenMP runtime answers by ending the process.
MOST_THREADS = 1024
# vLLM's name of the setting `speculative`.
_VLLM_SPECULATIVE = "speculative_config"
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
_SETTING = "engine setting"
# The widest adapter that the kernels take.
MOST_LORA_RANK = 512
# Forms that any float model (or GGUF file) is loaded in, whatever its checkpoint says.
AT_LOAD = ("int8", "fp8", "int4", "gguf")
_FLOATS = ("auto", "float32", "float16", "bfloat16")
_COUNT_OR_NONE = or_none(whole(1, "1 or more"))

_MODEL_RULES: dict[str, Rule] = {
    "model": (
        lambda value: isinstance(value, str) and bool(value),
        "a folder, a .gguf file, a hub id or package:NAME/FILE",
    ),
    "revision": TEXT_OR_NONE,
    "tokenizer": TEXT_OR_NONE,
    "tokenizer_revision": TEXT_OR_NONE,
    "chat_template": TEXT_OR_NONE,
    "dtype": one_of(*_FLOATS, words="auto, float32, float16 or bfloat16"),
    "quantization": one_of(None, "auto", *AT_LOAD, words=f"auto, {', '.join(AT_LOAD)} or null"),
    "max_model_len": _COUNT_OR_NONE,
    "device": one_of("auto", "cpu", "cuda", words="auto, cpu or cuda"),
    "kernel_backend": one_of(None, "reference", "cpu", "gpu", words="reference, cpu or gpu"),
    "generation_config": one_of("auto", "none", words="auto (the model's own defaults) or none"),
    "num_threads": or_none(whole(1, f"from 1 to {MOST_THREADS}", MOST_THREADS)),
    "seed": whole(-math.inf, "a whole number"),
    "reproducible": FLAG_OR_NONE,
    "max_logprobs": whole(-1, "0 or more, or -1 for no limit"),
    "logprobs_mode": one_of(
        *LOGPROBS_MODES, words=f"{', '.join(LOGPROBS_MODES[:-1])} or {LOGPROBS_MODES[-1]}"
    ),
    "reasoning_config": or_none(instance(Mapping, "a mapping")),
    "disable_log_stats": FLAG,
}
_CACHE_RULES: dict[str, Rule] = {
    "block_size": (lambda value: type(value) is int and value >= 16 and value % 16 == 0, "a multiple of 16"),
    "num_gpu_blocks_override": _COUNT_OR_NONE,
    "kv_cache_memory_bytes": _COUNT_OR_NONE,
    "gpu_memory_utilization": above(0, 1, "above 0 and at most 1"),
    "enable_prefix_caching": FLAG,
    "kv_cache_dtype": one_of(*_FLOATS, "int8", "fp8", words="auto, float32, float16, bfloat16, int8 or fp8"),
    "swap_space": or_none(number(0, math.inf, "a number of GiB, 0 or more")),
}
_SCHEDULER_RULES: dict[str, Rule] = {
    "max_num_seqs": _COUNT_OR_NONE,
    "max_num_batched_tokens": _COUNT_OR_NONE,
    "scheduling_policy": one_of("fcfs", "priority", words="fcfs or priority"),
    "enable_chunked_prefill": FLAG,
    "long_prefill_token_threshold": whole(0, "a number of tokens, or 0 for no limit"),
    "delay_factor": number(0, math.inf, "a number, 0 or more"),
    "preemption_mode": one_of(None, "recompute", "swap", words="recompute or swap"),
}
_LORA_RULES: dict[str, Rule] = {
    "enable_lora": FLAG,
    "max_loras": whole(1, "1 or more"),
    "max_lora_rank": or_none(whole(1, f"from 1 to {MOST_LORA_RANK}", MOST_LORA_RANK)),
    "max_cpu_loras": _COUNT_OR_NONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how its numbers are kept. None and "auto" are decided by `load_executor`."""

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0
    device: str = "auto"
    kernel_backend: str | None = None
    reproducible: bool | None = None
    num_threads: int | None = None
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    reasoning_config: Mapping[str, str] | None = None
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _MODEL_RULES, _SETTING)
        only_built("trust_remote_code", self.trust_remote_code, False, "running a model's own code")
        excluded = [("dtype", each) for each in ("float16", "bfloat16")] + [("device", "cuda")]
        for name, value in (("quantization", "int8"), ("reproducible", True)):
            for other, wrong in excluded:
                if getattr(self, name) == value and getattr(self, other) == wrong:
                    raise ConfigError(
                        f"{_SETTING} '{name}'={value!r}: built for float32 on a CPU, not for "
                        f"{other}={wrong!r}; leave one of the two out"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The pool of KV blocks."""

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    swap_space: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, _CACHE_RULES, _SETTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    delay_factor: float = 0.0
    preemption_mode: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, _SCHEDULER_RULES, _SETTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many devices share one model."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            only_built(name, getattr(self, name), 1, "more than one device")
        only_built("enable_expert_parallel", self.enable_expert_parallel, False, "expert parallelism")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapter slots.

    Args:
        enable_lora: whether requests may name adapters.
        max_loras: adapters that can be computed with in the same step.
        max_lora_rank: largest rank that is taken; None: any up to `MOST_LORA_RANK`.
        max_cpu_loras: adapters kept in host memory; None: as many as fit into a part of what is free.
    """

    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, _LORA_RULES, _SETTING)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"{_SETTING} 'max_cpu_loras'={self.max_cpu_loras}: less than max_loras={self.max_loras}, "
                f"but an adapter in a slot is in host memory too; raise the one or lower the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Drafting tokens ahead, off when null.

    Args:
        speculative: `method: ngram` and the fields of `NgramSettings`; also called `speculative_config`.
    """

    speculative: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.speculative is not None:
            NgramSettings.from_mapping(self.speculative)

    @property
    def ngram(self) -> NgramSettings | None:
        """How to draft, or None for not at all."""
        return None if self.speculative is None else NgramSettings.from_mapping(self.speculative)


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting that was left to us: its value, and why."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that fixes an engine. Passed whole to engine, executor, runner and model; never changed."""

    model: ModelSettings
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @classmethod
    def from_engine_args(cls, path: str = "engine", **engine_args: Any) -> "EngineConfig":
        """Build from vLLM's flat names, as `LLM(...)` and a job's `engine:` section give them.

        Raises:
            UnknownNameError: a name that no part has; carries the nearest one.
            ConfigError: a value out of range or not built.
        """
        homes = engine_arg_homes()
        if _VLLM_SPECULATIVE in engine_args:
            if "speculative" in engine_args:
                raise ConfigError(
                    f"{path}: speculative and {_VLLM_SPECULATIVE} are the same setting; give one"
                )
            engine_args["speculative"] = engine_args.pop(_VLLM_SPECULATIVE)
        parts: dict[str, dict[str, Any]] = {name: {} for name in set(homes.values())}
        for name, value in engine_args.items():
            if name not in homes:
                raise UnknownNameError("setting", name, homes, path, ENGINE_ARGUMENTS)
            parts[homes[name]][name] = value
        return cls(**{part: _PARTS[part](**values) for part, values in parts.items()})

    def with_values(self, **engine_args: Any) -> "EngineConfig":
        """A copy with some flat names changed."""
        homes = engine_arg_homes()
        parts: dict[str, dict[str, Any]] = {}
        for name, value in engine_args.items():
            parts.setdefault(homes[name], {})[name] = value
        return replace(
            self, **{part: replace(getattr(self, part), **values) for part, values in parts.items()}
        )

    def to_engine_args(self) -> dict[str, Any]:
        """The flat names and values, as plain JSON types."""
        return {
            name: value
            for part in fields(self)
            for name, value in dataclasses.asdict(getattr(self, part.name)).items()
        }


_PARTS = {
    "model": ModelSettings,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "lora": LoRAConfig,
    "speculative": SpeculativeConfig,
}


def engine_arg_homes() -> dict[str, str]:
    """Flat name -> the part of EngineConfig that holds it."""
    return {spec.name: part for part, cls in _PARTS.items() for spec in fields(cls)}
