"""load_executor: an EngineConfig -> a loaded model with KV blocks; every "auto" decided, with a reason."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from batchgen.config import Decision, EngineConfig
from batchgen.errors import ConfigError, KernelError
from batchgen.kernels.kv import torch_dtype
from batchgen.kernels.ops import Kernels, choose
from batchgen.models.decoder import Decoder
from batchgen.models.end_ids import describe_eos, eos_sources
from batchgen.models.gguf_file import GGUFFile
from batchgen.models.gguf_weights import GGUFSource
from batchgen.models.location import ModelLocation, resolve_model
from batchgen.models.model_config import ModelConfig
from batchgen.models.weights import SafetensorsSource, WeightSource, load_weights
from batchgen.quantization.base import method_for
from batchgen.tokenizer import tokenizer_of
from batchgen.worker.device import available_memory, cpu_threads, environment, pick_device
from batchgen.worker.executor import Executor, ExecutorInfo
from batchgen.worker.memory import plan_blocks
from batchgen.worker.model_runner import ModelRunner
from batchgen.worker.sampler import Sampler

log = logging.getLogger("batchgen.worker")

# On a CPU: as many rows as still gain from sharing a pass over the weights. More would only all finish late,
# and an interrupted job would have less to show. A chunk of prompt keeps a step near a second.
CPU_MAX_NUM_SEQS = 64
CPU_MAX_NUM_BATCHED_TOKENS = 512
GPU_MAX_NUM_SEQS = 256
GPU_MAX_NUM_BATCHED_TOKENS = 8192


@dataclass(slots=True)
class _Decisions:
    """Settings as they were given, and as decided; every decision with its reason."""

    made: list[Decision] = field(default_factory=list)

    def decide(self, name: str, given: Any, value: Any, reason: str) -> Any:
        """`given` unless it is None or "auto", else `value`, which is written down."""
        if given is not None and given != "auto":
            return given
        self.made.append(Decision(name, value, reason))
        return value


def load_executor(config: EngineConfig) -> Executor:
    """Load a model and make it ready to run steps in this process.

    Raises:
        ConfigError: no such model, or settings that do not fit it.
        ModelError: weights or architecture that cannot be loaded.
        KernelError: a forced kernel backend that cannot serve.
        CapacityError: no memory for a single KV block.
    """
    settings, decisions = config.model, _Decisions()
    location = resolve_model(settings.model, settings.revision)
    device = _device(config, decisions)
    gguf = GGUFFile(location.path) if location.kind == "gguf" else None
    shape = (
        ModelConfig.from_gguf(gguf) if gguf else ModelConfig.from_hf(_config_json(location), location.name)
    )
    dtype = _dtype(settings.dtype, shape, device, decisions)
    max_model_len = _max_model_len(settings.max_model_len, shape, decisions)
    kernels, reproducible = _kernels(config, shape, device, dtype, decisions)
    # The tokenizer comes before the weights: it is quick and fails early.
    tokenizer = tokenizer_of(settings)
    ends = eos_sources(location, tokenizer.eos_token_ids)
    log.info("token ids that end a text: %s", describe_eos(ends))
    begin = time.perf_counter()
    source: WeightSource = GGUFSource(gguf, shape) if gguf else SafetensorsSource(location.path)
    method = method_for(shape.quantization, location.name)(kernels, torch_dtype(dtype), device)
    model = Decoder(
        shape, kernels, method, dtype=dtype, device=device, max_len=max_model_len,
        block_size=config.cache.block_size,
        rope_divisors=source.rope_divisors() if isinstance(source, GGUFSource) else None,
    )  # fmt: skip
    load_weights(model, source, method.transforms())
    log.info("weights of %s loaded in %.1f s", location.name, time.perf_counter() - begin)
    max_num_seqs = decisions.decide(
        "max_num_seqs", config.scheduler.max_num_seqs,
        CPU_MAX_NUM_SEQS if device.type == "cpu" else GPU_MAX_NUM_SEQS, f"default on {device.type}",
    )  # fmt: skip
    max_batched = _max_num_batched_tokens(config, device, max_num_seqs, decisions)
    plan = plan_blocks(
        config.cache,
        block_bytes=sum(kernels.kv_block_bytes(spec) for spec in model.kv_specs),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        free_bytes=available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0],
        on_cpu=device.type == "cpu",
    )
    decisions.made.append(plan.decision)
    caches = [kernels.allocate_kv(spec, plan.num_blocks, device) for spec in model.kv_specs]
    resolved = config.with_values(
        dtype=dtype,
        device=device.type,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_batched,
        reproducible=reproducible,
        num_threads=torch.get_num_threads(),
        preemption_mode=config.scheduler.preemption_mode or "recompute",
    )
    backends = ", ".join(f"{op}: {choice.backend}" for op, choice in kernels.choices.items())
    info = ExecutorInfo(
        architecture=shape.architecture,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=tuple(index for index in ends if index < shape.vocab_size),
        num_blocks=plan.num_blocks,
        group_windows=(None,) * (1 + max(layer.group for layer in model.layers)),
        decisions=tuple(str(decision) for decision in decisions.made),
        resolved=resolved.to_engine_args(),
        environment=environment(device, dtype, backends),
        reproducible=reproducible,
    )
    sampler = Sampler(min(shape.vocab_size, tokenizer.vocab_size))
    return ModelRunner(model, caches, sampler, info, config.cache.block_size)


def _config_json(location: ModelLocation) -> dict[str, Any]:
    data = location.read_json("config.json")
    if data is None:
        raise ConfigError(f"model {location.name!r}: {location.path} holds no config.json")
    return data


def _device(config: EngineConfig, decisions: _Decisions) -> torch.device:
    device, reason = pick_device(config.model.device)
    decisions.decide("device", config.model.device, device.type, reason)
    if device.type == "cpu":
        threads, why = cpu_threads()
        torch.set_num_threads(decisions.decide("num_threads", config.model.num_threads, threads, why))
    return device


def _dtype(given: str, shape: ModelConfig, device: torch.device, decisions: _Decisions) -> str:
    if device.type == "cpu":
        return str(
            decisions.decide(
                "dtype", given, "float32", "the fastest float type on a CPU without matrix units"
            )
        )
    stored = shape.dtype if shape.dtype in ("float16", "bfloat16") else "bfloat16"
    reason = "as stored" if stored == shape.dtype else "half of float32's memory"
    return str(decisions.decide("dtype", given, stored, reason))


def _max_model_len(given: int | None, shape: ModelConfig, decisions: _Decisions) -> int:
    if given is not None and given > shape.max_len:
        raise ConfigError(
            f"max_model_len={given} is more than the {shape.max_len} positions that the model was made for"
        )
    return int(decisions.decide("max_model_len", given, shape.max_len, "the model's own length"))


def _max_num_batched_tokens(
    config: EngineConfig, device: torch.device, max_num_seqs: int, decisions: _Decisions
) -> int:
    default = CPU_MAX_NUM_BATCHED_TOKENS if device.type == "cpu" else GPU_MAX_NUM_BATCHED_TOKENS
    value = decisions.decide(
        "max_num_batched_tokens",
        config.scheduler.max_num_batched_tokens,
        max(default, max_num_seqs),
        f"default on {device.type}",
    )
    return int(value)


def _kernels(
    config: EngineConfig, shape: ModelConfig, device: torch.device, dtype: str, decisions: _Decisions
) -> tuple[Kernels, bool]:
    """The kernels, and whether a row's bytes are promised to be the same in any batch."""
    wanted = config.model.reproducible
    backend = config.model.kernel_backend

    def pick(reproducible: bool) -> Kernels:
        return choose(
            device.type, dtype, backend=backend, reproducible=reproducible,
            head_dim=shape.head_dim, block_size=config.cache.block_size,
        )  # fmt: skip

    if wanted:
        if device.type != "cpu" or dtype != "float32":
            raise ConfigError(
                f"reproducible: true is built for float32 on a CPU, not for {dtype} on {device.type}; "
                f"set dtype: float32 and device: cpu, or reproducible: false"
            )
        try:
            kernels = pick(reproducible=True)
        except KernelError as error:
            raise ConfigError(f"reproducible: true cannot be had: {error}") from error
    else:
        kernels = pick(reproducible=False)
    if wanted is None:
        wanted = kernels.is_reproducible
        reason = (
            "its kernels give a row the same bits in any batch" if wanted else "its kernels do not promise it"
        )
        decisions.decide("reproducible", None, wanted, reason)
    for choice in dict.fromkeys(kernels.choices.values()):
        ops = [op for op, chosen in kernels.choices.items() if chosen == choice]
        what = "kernels" if len(ops) == len(kernels.choices) else f"kernels of {', '.join(ops)}"
        decisions.made.append(Decision(what, choice.backend, choice.reason))
    return kernels, wanted
