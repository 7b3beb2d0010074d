"""EngineConfig and its parts: frozen, checked, built from vLLM's flat names by one function."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from batchgen.errors import ConfigError, UnknownNameError

# More would only be a slip of the finger, which the OpenMP runtime answers by ending the process.
MOST_THREADS = 1024
_FLAG_OR_NONE = (None, True, False)
_LOOKUP_MAX, _LOOKUP_MIN = 4, 2
# vLLM's name of the setting `speculative`.
_VLLM_SPECULATIVE = "speculative_config"
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


def _check(is_right: bool, name: str, value: Any, rule: str) -> None:
    if not is_right:
        raise ConfigError(f"engine setting {name!r} must be {rule}; got {value!r}")


def _positive_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _only(name: str, value: Any, built: Any, what: str) -> None:
    if value != built:
        raise ConfigError(
            f"engine setting {name}={value!r}: {what} is not built yet; only {built!r} is accepted"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how its numbers are kept. None and "auto" mean: decide for me (see `resolve`)."""

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
        _check(
            isinstance(self.model, str) and bool(self.model),
            "model",
            self.model,
            "a folder, a .gguf file, a hub id or package:NAME/FILE",
        )
        for name in ("revision", "tokenizer", "tokenizer_revision", "chat_template"):
            _check(_text_or_none(getattr(self, name)), name, getattr(self, name), "a text")
        _check(
            self.dtype in ("auto", "float32", "float16", "bfloat16"),
            "dtype",
            self.dtype,
            "auto, float32, float16 or bfloat16",
        )
        _only("quantization", self.quantization, None, "quantization")
        _check(_positive_or_none(self.max_model_len), "max_model_len", self.max_model_len, "1 or more")
        _check(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        _check(
            self.kernel_backend in (None, "reference", "cpu", "gpu"),
            "kernel_backend",
            self.kernel_backend,
            "reference, cpu or gpu",
        )
        _check(
            self.generation_config in ("auto", "none"),
            "generation_config",
            self.generation_config,
            "auto (the model's own defaults) or none",
        )
        _only("trust_remote_code", self.trust_remote_code, False, "running a model's own code")
        _check(
            _positive_or_none(self.num_threads) and (self.num_threads or 1) <= MOST_THREADS,
            "num_threads",
            self.num_threads,
            f"from 1 to {MOST_THREADS}",
        )
        _check(type(self.seed) is int, "seed", self.seed, "a whole number")
        _check(self.reproducible in _FLAG_OR_NONE, "reproducible", self.reproducible, "true, false or null")
        self._check_outputs()

    def _check_outputs(self) -> None:
        _check(
            type(self.max_logprobs) is int and self.max_logprobs >= -1,
            "max_logprobs",
            self.max_logprobs,
            "0 or more, or -1 for no limit",
        )
        _check(
            self.logprobs_mode in LOGPROBS_MODES,
            "logprobs_mode",
            self.logprobs_mode,
            f"{', '.join(LOGPROBS_MODES[:-1])} or {LOGPROBS_MODES[-1]}",
        )
        _check(
            self.reasoning_config is None or isinstance(self.reasoning_config, Mapping),
            "reasoning_config",
            self.reasoning_config,
            "a mapping",
        )
        _check(
            self.disable_log_stats in (True, False),
            "disable_log_stats",
            self.disable_log_stats,
            "true or false",
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
    swap_space: float = 0.0

    def __post_init__(self) -> None:
        _check(
            type(self.block_size) is int and self.block_size >= 16 and self.block_size % 16 == 0,
            "block_size",
            self.block_size,
            "a multiple of 16",
        )
        _check(
            _positive_or_none(self.num_gpu_blocks_override),
            "num_gpu_blocks_override",
            self.num_gpu_blocks_override,
            "1 or more",
        )
        _check(
            _positive_or_none(self.kv_cache_memory_bytes),
            "kv_cache_memory_bytes",
            self.kv_cache_memory_bytes,
            "1 or more",
        )
        _check(
            type(self.gpu_memory_utilization) in (int, float) and 0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "above 0 and at most 1",
        )
        _check(
            self.enable_prefix_caching in (True, False),
            "enable_prefix_caching",
            self.enable_prefix_caching,
            "true or false",
        )
        _only("kv_cache_dtype", self.kv_cache_dtype, "auto", "a KV cache in another type")
        _check(
            type(self.swap_space) in (int, float) and 0 <= self.swap_space < float("inf"),
            "swap_space",
            self.swap_space,
            "a number of GiB, 0 or more",
        )


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
        _check(_positive_or_none(self.max_num_seqs), "max_num_seqs", self.max_num_seqs, "1 or more")
        _check(
            _positive_or_none(self.max_num_batched_tokens),
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            "1 or more",
        )
        _check(
            self.scheduling_policy in ("fcfs", "priority"),
            "scheduling_policy",
            self.scheduling_policy,
            "fcfs or priority",
        )
        _check(
            self.enable_chunked_prefill in (True, False),
            "enable_chunked_prefill",
            self.enable_chunked_prefill,
            "true or false",
        )
        _check(
            type(self.long_prefill_token_threshold) is int and self.long_prefill_token_threshold >= 0,
            "long_prefill_token_threshold",
            self.long_prefill_token_threshold,
            "a number of tokens, or 0 for no limit",
        )
        _check(
            type(self.delay_factor) in (int, float) and 0 <= self.delay_factor < float("inf"),
            "delay_factor",
            self.delay_factor,
            "a number, 0 or more",
        )
        _check(
            self.preemption_mode in (None, "recompute", "swap"),
            "preemption_mode",
            self.preemption_mode,
            "recompute or swap",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many devices share one model."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            _only(name, getattr(self, name), 1, "more than one device")
        _only("enable_expert_parallel", self.enable_expert_parallel, False, "expert parallelism")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapter slots."""

    enable_lora: bool = False

    def __post_init__(self) -> None:
        _only("enable_lora", self.enable_lora, False, "LoRA")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSettings:
    """Drafting by prompt lookup: what followed the last place that reads like the end of the text.

    Args:
        num_speculative_tokens: most tokens drafted ahead.
        prompt_lookup_max: longest end of the text that is looked up, in tokens.
        prompt_lookup_min: shortest.
    """

    num_speculative_tokens: int = 4
    prompt_lookup_max: int = _LOOKUP_MAX
    prompt_lookup_min: int = _LOOKUP_MIN

    def __post_init__(self) -> None:
        most = {
            "num_speculative_tokens": 64,
            "prompt_lookup_max": 64,
            "prompt_lookup_min": self.prompt_lookup_max,
        }
        for name, upper in most.items():
            value = getattr(self, name)
            _check(
                type(value) is int and 1 <= value <= upper, f"speculative.{name}", value, f"from 1 to {upper}"
            )

    @classmethod
    def from_mapping(cls, given: Any) -> "NgramSettings":
        """Build from the `speculative` setting: `method`, which must be ngram, and the fields."""
        _check(isinstance(given, Mapping), "speculative", given, "a mapping with method: ngram, or null")
        values = dict(given)
        known = ["method", *(spec.name for spec in fields(cls))]
        for name in values:
            if name not in known:
                raise UnknownNameError("setting", name, known, "engine setting 'speculative'")
        _only("speculative.method", values.pop("method", "ngram"), "ngram", "another way of drafting")
        # One bound alone moves the other's default out of its way.
        low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
        if type(low) is int and high is None:
            values["prompt_lookup_max"] = max(low, _LOOKUP_MAX)
        if type(high) is int and low is None:
            values["prompt_lookup_min"] = min(high, _LOOKUP_MIN)
        return cls(**values)


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
                raise UnknownNameError("setting", name, homes, path)
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
