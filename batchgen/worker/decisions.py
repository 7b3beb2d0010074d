"""Settings that were left to us: each decided once, with a reason, before anything large is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from batchgen.config import Decision, EngineConfig
from batchgen.errors import ConfigError, KernelError
from batchgen.kernels.ops import Kernels, choose
from batchgen.models.model_config import ModelConfig
from batchgen.worker.device import available_memory, cpu_threads, pick_device

# On a CPU: as many rows as still gain from sharing a pass over the weights. More would only all finish late,
# and an interrupted job would have less to show. A chunk of prompt keeps a step near a second.
CPU_MAX_NUM_SEQS = 128
CPU_MAX_NUM_BATCHED_TOKENS = 512
GPU_MAX_NUM_SEQS = 256
GPU_MAX_NUM_BATCHED_TOKENS = 8192
# GiB of host memory for swapped blocks of a GPU, unless that is much of what is free.
GPU_SWAP_SPACE = 4.0
GPU_SWAP_SHARE = 0.25


@dataclass(slots=True)
class Decisions:
    """Every decision with its reason, in the order they were made."""

    made: list[Decision] = field(default_factory=list)

    def decide(self, name: str, given: Any, value: Any, reason: str) -> Any:
        """`given` unless it is None or "auto", else `value`, which is written down."""
        if given is not None and given != "auto":
            return given
        self.made.append(Decision(name, value, reason))
        return value


@contextmanager
def refusing_settings() -> Iterator[None]:
    """Within it nothing is loaded yet: what a device or the kernels cannot do, a setting has asked for.

    Raises:
        ConfigError: the KernelError or DeviceError that was raised inside.
    """
    try:
        yield
    except KernelError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes that the engine keeps to."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Swapping(NamedTuple):
    """GiB of host memory for swapped blocks, and how preempted sequences come back; None: by cost."""

    space: float
    preemption_mode: str | None


def decide_device(config: EngineConfig, decisions: Decisions) -> torch.device:
    """The device; on a CPU also the threads, which are set at once."""
    device, reason = pick_device(config.model.device)
    decisions.decide("device", config.model.device, device.type, reason)
    if device.type == "cpu":
        threads, why = cpu_threads()
        torch.set_num_threads(decisions.decide("num_threads", config.model.num_threads, threads, why))
    return device


def decide_dtype(given: str, shape: ModelConfig, device: torch.device, decisions: Decisions) -> str:
    """The dtype of activations, by name."""
    if device.type == "cpu":
        reason = "the float type that has kernels of its own on a CPU"
        return str(decisions.decide("dtype", given, "float32", reason))
    stored = shape.dtype if shape.dtype in ("float16", "bfloat16") else "bfloat16"
    reason = "as stored" if stored == shape.dtype else "half of float32's memory"
    return str(decisions.decide("dtype", given, stored, reason))


def decide_limits(
    config: EngineConfig, shape: ModelConfig, device: torch.device, decisions: Decisions
) -> Limits:
    """The lengths and numbers that the engine keeps to.

    Raises:
        ConfigError: more positions than the model has, or prompts that are not cut and do not fit a step.
    """
    scheduler, given_len = config.scheduler, config.model.max_model_len
    if given_len is not None and given_len > shape.max_len:
        raise ConfigError(
            f"max_model_len={given_len} is more than the {shape.max_len} positions that the model was made "
            f"for"
        )
    max_model_len = int(decisions.decide("max_model_len", given_len, shape.max_len, "the model's own length"))
    on_cpu, why = device.type == "cpu", f"default on {device.type}"
    max_num_seqs = int(
        decisions.decide(
            "max_num_seqs", scheduler.max_num_seqs, CPU_MAX_NUM_SEQS if on_cpu else GPU_MAX_NUM_SEQS, why
        )
    )
    most = max(CPU_MAX_NUM_BATCHED_TOKENS if on_cpu else GPU_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    if not scheduler.enable_chunked_prefill and most < max_model_len:
        most, why = max_model_len, "a prompt of max_model_len is computed in one step"
    batched = int(decisions.decide("max_num_batched_tokens", scheduler.max_num_batched_tokens, most, why))
    if not scheduler.enable_chunked_prefill and batched < max_model_len:
        raise ConfigError(
            f"enable_chunked_prefill: false computes a prompt in one step, but max_num_batched_tokens="
            f"{batched} is less than max_model_len={max_model_len}; raise the one or lower the other"
        )
    return Limits(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=batched)


def decide_swapping(config: EngineConfig, device: torch.device, decisions: Decisions) -> Swapping:
    """How much host memory swapped blocks get, and how preempted sequences come back.

    Raises:
        ConfigError: preemption by swap is asked for without any room.
    """
    if device.type == "cpu":
        space, reason = 0.0, "blocks are in host memory already"
    else:
        space = min(GPU_SWAP_SPACE, round(GPU_SWAP_SHARE * available_memory() / 2**30, 2))
        reason = f"at most {GPU_SWAP_SHARE:.0%} of the free host memory"
    space = float(decisions.decide("swap_space", config.cache.swap_space, space, reason))
    mode = config.scheduler.preemption_mode
    if mode == "swap" and not space:
        raise ConfigError(
            "preemption_mode: swap needs room for blocks in host memory, but swap_space is 0; set swap_space "
            "to some GiB, or leave preemption_mode out"
        )
    if space:
        decisions.decide("preemption_mode", mode, "by cost", "the cheaper of recompute and swap each time")
    else:
        mode = decisions.decide("preemption_mode", mode, "recompute", "there is no swap_space")
    return Swapping(space, mode)


def decide_kernels(
    config: EngineConfig,
    shape: ModelConfig,
    device: torch.device,
    dtype: str,
    kv_dtype: str,
    decisions: Decisions,
) -> tuple[Kernels, bool]:
    """The kernels, and whether a row's bytes are promised to be the same in any batch.

    Raises:
        ConfigError: a promise that no kernel here can keep.
        KernelError: a forced backend that cannot serve.
    """
    wanted = config.model.reproducible
    backend = config.model.kernel_backend

    def pick(reproducible: bool) -> Kernels:
        return choose(
            device.type, dtype, backend=backend, reproducible=reproducible,
            head_dim=shape.head_dim, block_size=config.cache.block_size, kv_dtype=kv_dtype,
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
