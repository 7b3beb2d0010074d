"""In which types a model's numbers are kept and multiplied: activations, weights, KV cache."""

import logging

import torch

from batchgen.config import Decision, EngineConfig
from batchgen.errors import ConfigError
from batchgen.kernels.ops import Kernels, choose
from batchgen.models.model_config import ModelConfig
from batchgen.worker.decisions import Decisions
from batchgen.worker.device import is_host
from batchgen.worker.machine_speed import product_speeds

log = logging.getLogger("batchgen.worker")

# `quantization: auto` takes int8 from this gain on: below, its loss in precision buys too little.
WORTHWHILE_GAIN = 1.5


def decide_quantization(
    config: EngineConfig,
    shape: ModelConfig,
    device: torch.device,
    dtype: str,
    decisions: Decisions,
    is_gguf: bool,
) -> str | None:
    """How weights are rounded as they are loaded; None: not at all, or as the checkpoint says.

    Raises:
        ConfigError: int8 is asked for where it is not built, or gguf of a model that is no such file.
    """
    asked = config.model.quantization
    if asked is None:
        if shape.stored_as:
            decisions.made.append(Decision("quantization", shape.stored_as, "as the checkpoint is stored"))
        return None
    if asked == "gguf":
        if not is_gguf:
            raise ConfigError(
                f"quantization: gguf keeps the weights of a GGUF file in their bits, and "
                f"{config.model.model} is none; leave quantization out"
            )
        decisions.made.append(Decision("quantization", asked, "as set"))
        return asked
    obstacle = None
    # Weights of 4 bits and of 8-bit floats are decoded to floats, by any kernels.
    if asked in ("int8", "auto") and (not is_host(device) or dtype != "float32"):
        obstacle = f"int8 is built for float32 activations on a CPU, not for {dtype} on {device}"
    elif asked == "auto" and shape.quantization is not None:
        obstacle = "the checkpoint is quantized already"
    if asked == "auto":
        chosen, reason = (None, obstacle) if obstacle else _by_speed(config, shape)
        decisions.made.append(Decision("quantization", chosen, reason))
        log.info("%s", decisions.made[-1])
    elif obstacle:
        raise ConfigError(f"quantization: {obstacle}; leave quantization out, or dtype and device")
    else:
        chosen = asked
        decisions.made.append(Decision("quantization", chosen, "as set"))
    if chosen == "int8" and not shape.family.has_foldable_norms:
        reason = f"{shape.family.name} norms what a layer gives, which a rotation cannot be folded into"
        decisions.made.append(Decision("rotation", "none", reason))
        log.warning(
            "%s: int8 without a rotation of the residual stream loses more precision: %s", shape.family.name,
            reason,
        )  # fmt: skip
    return chosen


def decide_kv_dtype(given: str, dtype: str, quantization: str | None, decisions: Decisions) -> str:
    """The dtype of the KV cache, by name."""
    if quantization == "int8":
        reason = "its loss is small beside that of int8 weights"
        return str(decisions.decide("kv_cache_dtype", given, "int8", reason))
    return str(decisions.decide("kv_cache_dtype", given, dtype, "as the activations"))


def warn_of_slow_products(kernels: Kernels, quantization: str | None) -> None:
    """Say so when int8 is taken for speed, and is slower than no int8 at all."""
    choice = kernels.choices["linear_int8"]
    if quantization == "int8" and choice.backend == "reference":
        log.warning(
            "quantization: int8 runs on the reference kernels (%s), about ten times slower than float32 "
            "would; leave quantization out, or let the C kernels run", choice.reason,
        )  # fmt: skip


def _by_speed(config: EngineConfig, shape: ModelConfig) -> tuple[str | None, str]:
    backend, block_size = config.model.kernel_backend, config.cache.block_size
    kernels = choose("cpu", "float32", backend=backend, head_dim=shape.head_dim, block_size=block_size)
    speeds = product_speeds(kernels)
    gain = speeds["int8"] / speeds["float32"]
    measured = (
        f"products run at {speeds['float32']:.0f} GFLOP/s in float32 and {speeds['int8']:.0f} in int8 here, "
        f"torch's at {speeds['bfloat16']:.0f} in bfloat16"
    )
    if gain >= WORTHWHILE_GAIN:
        return "int8", f"{measured}; the texts are not those of float32"
    return None, f"{measured}; int8 gains less than {WORTHWHILE_GAIN:g} times"
