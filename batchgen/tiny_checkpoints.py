"""Checkpoints of few bits, written to the published layouts of their formats, and the same models in floats.

The numbers are packed bit by bit with numpy, and decoded by the formats' own formulas in numpy: nothing here
is shared with the code under test.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from batchgen.tiny_models import tiny_model, write_folder

# Sizes that divide into groups of 32 and words of 32 bits.
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
Tensors = dict[str, torch.Tensor]


@dataclass
class Written:
    """A module as a format stores it, and the weight that it means."""

    tensors: Tensors
    weight: np.ndarray


# Makes of a module's weight what is stored; gets its name as well.
Store = Callable[[str, np.ndarray], Written | None]


def write_pair(folder: Path, store: Store, config: dict[str, Any], **model: Any) -> tuple[Path, Path]:
    """Write a tiny model as a checkpoint of few bits, and as one of floats with the weights that it means."""
    made = tiny_model(**{**SIZES, **model})
    stored, floats = write_folder(made, folder / "stored"), write_folder(made, folder / "floats")
    tensors = load_file(stored / "model.safetensors")
    decoded = dict(tensors)
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if tensors[name].dim() != 2 or module == "model.embed_tokens" or module == name:
            continue
        written = store(module, tensors[name].numpy())
        if written is None:
            continue
        del tensors[name]
        tensors |= {f"{module}.{parameter}": value for parameter, value in written.tensors.items()}
        decoded[name] = torch.from_numpy(written.weight.astype(np.float32))
    save_file({name: value.contiguous() for name, value in tensors.items()}, stored / "model.safetensors")
    save_file({name: value.contiguous() for name, value in decoded.items()}, floats / "model.safetensors")
    settings = json.loads((stored / "config.json").read_text())
    settings["quantization_config"] = config
    (stored / "config.json").write_text(json.dumps(settings))
    return stored, floats


def is_head(module: str) -> bool:
    """Whether a module is left alone by most formats."""
    return module == "lm_head"


def bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the last axis as a stream of bits, the lowest first, in int32."""
    each = (codes[..., None].astype(np.int64) >> np.arange(bits)) & 1
    stream = each.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little").view("<i4")


def whole_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the last axis, as many in an int32 as fit whole."""
    per_word = 32 // bits
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word) * per_word), np.uint64)
    padded[..., : codes.shape[-1]] = codes
    grouped = padded.reshape(*codes.shape[:-1], -1, per_word)
    shifted = grouped << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))
    words: np.ndarray = shifted.sum(axis=-1).astype(np.uint32).view(np.int32)
    return words


@dataclass
class Grouped:
    """Codes [N, K], scale float16 and zero [N, G], and the group of each input."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    group: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """What the codes mean."""
        scale, zero = self.scale.astype(np.float32)[:, self.group], self.zero[:, self.group]
        return (self.codes.astype(np.float32) - zero.astype(np.float32)) * scale


def rounded(
    weight: np.ndarray, bits: int, group_size: int, *, is_symmetric: bool, seed: int | None = None
) -> Grouped:
    """Round a weight to codes; with a seed inputs are dealt to groups at random."""
    inputs = weight.shape[1]
    size = inputs if group_size == -1 else group_size
    group = np.arange(inputs) // size
    if seed is not None:
        group = np.random.default_rng(seed).permutation(group)
    levels, count = 2**bits, inputs // size
    scale = np.empty((len(weight), count), np.float16)
    zero = np.full((len(weight), count), levels // 2)
    for g in range(count):
        block = weight[:, group == g]
        if is_symmetric:
            scale[:, g] = np.abs(block).max(axis=1) / (levels // 2 - 0.5 if bits > 1 else 1)
        else:
            low, high = np.minimum(block.min(axis=1), 0), np.maximum(block.max(axis=1), 0)
            scale[:, g] = (high - low) / (levels - 1)
            zero[:, g] = np.clip(np.round(-low / scale[:, g].astype(np.float32)), 0, levels - 1)
    wide = scale.astype(np.float32)[:, group]
    codes = np.clip(np.round(weight / wide) + zero[:, group], 0, levels - 1).astype(np.int64)
    return Grouped(codes, scale, zero, group)


def gptq(
    bits: int, group_size: int, *, version: int = 1, is_symmetric: bool = False, act_order: bool = False,
    has_bias: bool = False,
) -> tuple[Store, dict[str, Any]]:  # fmt: skip
    """As AutoGPTQ (version 1) and gptqmodel (2) write it."""

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        made = rounded(
            weight, bits, group_size, is_symmetric=is_symmetric, seed=len(module) if act_order else None
        )
        if version == 1:
            made.zero = np.maximum(made.zero, 1)
        stored_zero = made.zero - 1 if version == 1 else made.zero
        tensors = {
            "qweight": torch.from_numpy(bit_stream(made.codes, bits).T.copy()),
            "qzeros": torch.from_numpy(bit_stream(stored_zero.T, bits)),
            "scales": torch.from_numpy(made.scale.T.copy()),
            "g_idx": torch.from_numpy(made.group.astype(np.int32)),
        }
        if has_bias:
            tensors["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return Written(tensors, made.weight)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": is_symmetric,
        "desc_act": act_order,
    }
    return store, {**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}


def awq(group_size: int, skipped: tuple[str, ...] = ()) -> tuple[Store, dict[str, Any]]:
    """As AutoAWQ writes it."""

    def columns(codes: np.ndarray) -> np.ndarray:
        return whole_words(
            codes.reshape(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 4
        )

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module) or any(part in module for part in skipped):
            return None
        made = rounded(weight, 4, group_size, is_symmetric=False)
        tensors = {
            "qweight": torch.from_numpy(columns(made.codes.T)),
            "qzeros": torch.from_numpy(columns(made.zero.T)),
            "scales": torch.from_numpy(made.scale.T.copy()),
        }
        return Written(tensors, made.weight)

    config = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
    }
    return store, {**config, "modules_to_not_convert": list(skipped) or None}


def packed_integers(
    bits: int, group_size: int, *, is_symmetric: bool = True, act_order: bool = False, is_old: bool = False
) -> tuple[Store, dict[str, Any]]:
    """As compressed-tensors writes pack-quantized; older versions let no code reach into the next word."""
    pack = whole_words if is_old else bit_stream

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        made = rounded(weight, bits, group_size, is_symmetric=is_symmetric, seed=3 if act_order else None)
        tensors = {
            "weight_packed": torch.from_numpy(pack(made.codes, bits)),
            "weight_scale": torch.from_numpy(made.scale).to(torch.float16),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(pack(made.zero.T, bits).T.copy())
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(made.group.astype(np.int32))
        return Written(tensors, made.weight)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group",
        "group_size": group_size,
    }
    if group_size == -1:
        weights |= {"strategy": "channel", "group_size": None}
    return store, compressed("pack-quantized", weights)


def plain_integers(*, rounds_inputs: bool) -> tuple[Store, dict[str, Any]]:
    """As compressed-tensors writes int-quantized: W8A8 or, without rounded activations, W8A16."""

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        scale = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float32)
        values = np.clip(np.round(weight / scale), -128, 127)
        tensors = {
            "weight": torch.from_numpy(values.astype(np.int8)),
            "weight_scale": torch.from_numpy(scale),
        }
        return Written(tensors, values.astype(np.float32) * scale)

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return store, compressed("int-quantized", weights, inputs if rounds_inputs else None)


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def float8(strategy: str, *, block: int = 32, style: str = "fp8") -> tuple[Store, dict[str, Any]]:
    """Floats of 8 bits with a scale for all ("tensor"), each output ("channel") or each block ("block")."""

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        outputs, inputs = weight.shape
        rows, columns = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (block, block)}[
            strategy
        ]
        wide = np.pad(weight, ((0, -outputs % rows), (0, -inputs % columns)))
        blocks = wide.reshape(len(wide) // rows, rows, wide.shape[1] // columns, columns)
        scale = (np.abs(blocks).max(axis=(1, 3)) / 448).astype(np.float32)
        spread = np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)[:outputs, :inputs]
        values = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
        scale_name = "weight_scale_inv" if strategy == "block" and style == "fp8" else "weight_scale"
        stored_scale = torch.from_numpy(scale.reshape(()) if strategy == "tensor" else scale)
        tensors = {"weight": values, scale_name: stored_scale}
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor(1.0)
        return Written(tensors, values.to(torch.float32).numpy() * spread)

    if style == "fp8":
        config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        return store, {**config, "weight_block_size": [block, block]} if strategy == "block" else config
    if style == "modelopt":
        return store, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "block_structure": [block, block],
    }
    return store, compressed("float-quantized", weights, {**weights, "dynamic": True})
