"""load_executor: an EngineConfig -> a loaded model with KV blocks; every "auto" decided, with a reason."""

import logging
from functools import partial
from typing import Any

import torch

from batchgen.config import Decision, EngineConfig
from batchgen.kernels.ops import Kernels
from batchgen.models.decoder import Decoder
from batchgen.models.end_ids import describe_eos, eos_sources
from batchgen.tokenizer import tokenizer_of
from batchgen.worker.adapters import HOST_SHARE, WorkerAdapters
from batchgen.worker.base_tensors import BaseTensors
from batchgen.worker.decisions import (
    Decisions,
    Limits,
    decide_device,
    decide_dtype,
    decide_kernels,
    decide_limits,
    decide_swapping,
    refusing_settings,
)
from batchgen.worker.device import available_memory, environment
from batchgen.worker.executor import Executor, ExecutorInfo
from batchgen.worker.kv_blocks import KVBlocks
from batchgen.worker.memory import plan_blocks, plan_host_blocks
from batchgen.worker.model_files import ModelFiles
from batchgen.worker.model_memory import ModelMemory
from batchgen.worker.model_runner import ModelRunner
from batchgen.worker.precision import decide_kv_dtype, decide_quantization, warn_of_slow_products
from batchgen.worker.sampler_setup import make_sampler
from batchgen.worker.thinking import find_marks

log = logging.getLogger("batchgen.worker")


def load_executor(config: EngineConfig) -> Executor:
    """Load a model and make it ready to run steps in this process.

    Raises:
        ConfigError: no such model, or settings that do not fit it.
        ModelError: weights or architecture that cannot be loaded.
        CapacityError: no memory for a single KV block, or not for all that were asked for.
    """
    decisions, block_size = Decisions(), config.cache.block_size
    files = ModelFiles(config.model.model, config.model.revision)
    shape = files.shape
    with refusing_settings():
        device = decide_device(config, decisions)
        dtype = decide_dtype(config.model.dtype, shape, device, decisions)
        limits = decide_limits(config, shape, device, decisions)
        swapping = decide_swapping(config, device, decisions)
        quantization = decide_quantization(config, shape, device, dtype, decisions, files.is_gguf)
        kv_dtype = decide_kv_dtype(config.cache.kv_cache_dtype, dtype, quantization, decisions)
        kernels, reproducible = decide_kernels(config, shape, device, dtype, kv_dtype, decisions)
    warn_of_slow_products(kernels, quantization)
    # The tokenizer comes before the weights: it is quick and fails early.
    tokenizer = tokenizer_of(config.model)
    ends = eos_sources(files.location, tokenizer.eos_token_ids)
    log.info("token ids that end a text: %s", describe_eos(ends))
    num_tokens = min(shape.vocab_size, tokenizer.vocab_size)
    marks = find_marks(tokenizer, num_tokens, config.model.reasoning_config)
    adapters = _make_adapters(config, files, kernels)
    build = partial(
        _build, adapters, files, kernels, dtype=dtype, quantization=quantization,
        kv_dtype=kv_dtype, device=device, max_len=limits.max_model_len, block_size=block_size,
    )  # fmt: skip
    model = build()
    blocks, block_bytes = _take_blocks(config, model, limits, swapping.space, decisions, adapters)
    resolved = config.with_values(
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_dtype,
        device=device.type,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        reproducible=reproducible,
        num_threads=torch.get_num_threads(),
        swap_space=swapping.space,
        preemption_mode=swapping.preemption_mode,
    )
    info = ExecutorInfo(
        architecture=shape.architecture,
        max_model_len=limits.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=tuple(index for index in ends if index < shape.vocab_size),
        num_blocks=blocks.num_blocks,
        group_windows=model.kv_layout.windows,
        num_cpu_blocks=blocks.num_host_blocks,
        block_bytes=block_bytes,
        no_thinking=marks if isinstance(marks, str) else None,
        decisions=tuple(str(decision) for decision in decisions.made),
        resolved=resolved.to_engine_args(),
        environment=environment(device, dtype, quantization or shape.stored_as, kv_dtype, _backends(kernels)),
        reproducible=reproducible,
        continues=True,
    )
    sampling = make_sampler(config.model, kernels, tokenizer, num_tokens, info.eos_token_ids, marks)
    return ModelRunner(ModelMemory(model, blocks, build), *sampling, info, block_size, adapters)


def _make_adapters(config: EngineConfig, files: ModelFiles, kernels: Kernels) -> WorkerAdapters | None:
    """Slots for adapters, if they are asked for."""
    if not config.lora.enable_lora:
        return None
    return WorkerAdapters(config.lora, files.shape, BaseTensors(files), kernels)


def _give_memory(config: EngineConfig, adapters: WorkerAdapters, decisions: Decisions) -> int:
    """Let adapters have a part of the host memory, the weights being in; how many bytes."""
    if config.lora.max_cpu_loras is not None:
        return 0
    budget = int(HOST_SHARE * available_memory())
    adapters.take_memory(budget)
    reason = f"as many as fit into {HOST_SHARE:.0%} of the free host memory, {budget / 2**30:.1f} GiB"
    decisions.made.append(Decision("max_cpu_loras", "by size", reason))
    return budget


def _build(adapters: WorkerAdapters | None, files: ModelFiles, kernels: Kernels, **how: Any) -> Decoder:
    model = files.build(kernels, **how)
    return model if adapters is None else adapters.attach(model)


def _take_blocks(
    config: EngineConfig,
    model: Decoder,
    limits: Limits,
    swap_space: float,
    decisions: Decisions,
    adapters: WorkerAdapters | None,
) -> tuple[KVBlocks, int]:
    """The pools of blocks, and the bytes of one block at all places; adapters are given theirs first."""
    reserved = 0 if adapters is None else _give_memory(config, adapters, decisions)
    layout, kernels, device = model.kv_layout, model.kernels, model.device
    on_cpu = device.type == "cpu"
    block_bytes = layout.num_places * kernels.kv_block_bytes(layout.spec)
    plan = plan_blocks(
        config.cache,
        layout,
        limits,
        block_bytes=block_bytes,
        free_bytes=max(available_memory() - reserved, 0) if on_cpu else torch.cuda.mem_get_info(device)[0],
        on_cpu=on_cpu,
    )
    decisions.made.append(plan.decision)
    # A pool in host memory takes its pages later, but it will take them.
    taken = plan.num_blocks * block_bytes if on_cpu else 0
    num_host_blocks = plan_host_blocks(
        swap_space, block_bytes=block_bytes, free_bytes=max(available_memory() - taken, 0)
    )
    return KVBlocks(kernels, layout, plan.num_blocks, num_host_blocks, device=device), block_bytes


def _backends(kernels: Kernels) -> str:
    return ", ".join(f"{op}: {choice.backend}" for op, choice in kernels.choices.items())
