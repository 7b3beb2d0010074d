"""Checkpoints in the forms of bitsandbytes, torchao and auto-round; see tiny_checkpoints."""

import json
from typing import Any

import numpy as np
import torch

from batchgen.tiny_checkpoints import Store, Written, awq, gptq, is_head, rounded

# Blocks of bitsandbytes run through the whole weight; of this size they end where rows do.
BLOCK = 32


def table_bits(
    kind: str, *, is_nested: bool = False, storage: torch.dtype = torch.uint8
) -> tuple[Store, dict[str, Any]]:
    """As bitsandbytes writes 4 bits, by a table that the file holds; `is_nested`: double quantization."""
    table = np.sort(np.random.default_rng(len(kind)).uniform(-1, 1, 16)).astype(np.float32)
    # fp4 is not in order of size.
    table = table if kind == "nf4" else np.roll(table, 5)

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        blocks = weight.reshape(-1, BLOCK)
        tensors, scale = scales(np.abs(blocks).max(axis=1))
        codes = np.abs(blocks[:, :, None] / scale[:, None, None] - table).argmin(axis=2)
        pairs = codes.reshape(-1, 2).astype(np.uint8)
        packed = torch.from_numpy(pairs[:, 0] << 4 | pairs[:, 1])
        state = {"quant_type": kind, "blocksize": BLOCK, "dtype": "float32", "shape": list(weight.shape)}
        if is_nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
        tensors |= {
            "weight": packed.view(storage)[:, None],
            "weight.quant_map": torch.from_numpy(table.copy()),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        return Written(tensors, (table[codes] * scale[:, None]).reshape(weight.shape))

    def scales(largest: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        if not is_nested:
            return {"weight.absmax": torch.from_numpy(largest)}, largest
        offset, fine = np.float32(0.03), np.linspace(-1, 1, 256, dtype=np.float32)
        rest = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
        coarse = np.abs(rest).max(axis=1).astype(np.float32)
        stored = np.abs(rest[:, :, None] / coarse[:, None, None] - fine).argmin(axis=2)
        found = (fine[stored] * coarse[:, None] + offset).ravel()[: len(largest)]
        return {
            "weight.absmax": torch.from_numpy(stored.ravel()[: len(largest)].astype(np.uint8)),
            "weight.nested_absmax": torch.from_numpy(coarse),
            "weight.nested_quant_map": torch.from_numpy(fine.copy()),
        }, found

    return store, {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_nested,
        "llm_int8_skip_modules": None,
    }


def outlier_integers() -> tuple[Store, dict[str, Any]]:
    """As bitsandbytes writes 8 bits."""

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        largest = np.abs(weight).max(axis=1).astype(np.float32)
        values = np.round(weight / largest[:, None] * 127).astype(np.int8)
        tensors = {
            "weight": torch.from_numpy(values),
            "SCB": torch.from_numpy(largest),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return Written(tensors, values.astype(np.float32) * (largest / np.float32(127))[:, None])

    return store, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}


def one_to_a_byte(bits: int, group_size: int, *, is_symmetric: bool = True) -> tuple[Store, dict[str, Any]]:
    """As torchao writes integers, whatever their bits; scales of 16 bits where they are of groups."""

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        made = rounded(weight, bits, group_size, is_symmetric=is_symmetric)
        half = 2 ** (bits - 1)
        scale = torch.from_numpy(made.scale).to(torch.float32 if group_size == -1 else torch.bfloat16)
        zero = made.zero - half
        tensors = {
            "_weight_qdata": torch.from_numpy((made.codes - half).astype(np.int8)),
            "_weight_scale": scale,
            "_weight_zero_point": torch.from_numpy(zero.astype(np.int8)),
        }
        difference = (made.codes - half - zero[:, made.group]).astype(np.float32)
        return Written(tensors, difference * scale.to(torch.float32).numpy()[:, made.group])

    kind = "Int8WeightOnlyConfig" if group_size == -1 else "IntxWeightOnlyConfig"
    return store, torchao(kind)


def float8_rows() -> tuple[Store, dict[str, Any]]:
    """As torchao writes floats of 8 bits."""

    def store(module: str, weight: np.ndarray) -> Written | None:
        if is_head(module):
            return None
        scale = (np.abs(weight).max(axis=1, keepdims=True) / 448).astype(np.float32)
        values = torch.from_numpy(weight / scale).to(torch.float8_e4m3fn)
        tensors = {"_weight_qdata": values, "_weight_scale": torch.from_numpy(scale)}
        return Written(tensors, values.to(torch.float32).numpy() * scale)

    return store, torchao("Float8WeightOnlyConfig")


def torchao(kind: str) -> dict[str, Any]:
    """A config of torchao, as transformers saves it."""
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}},
        "modules_to_not_convert": None,
    }


def auto_round(form: str, bits: int, group_size: int) -> tuple[Store, dict[str, Any]]:
    """As auto-round writes its own form: GPTQ's layout without the groups of inputs, or AWQ's."""
    if form == "auto_round:auto_awq":
        store, _ = awq(group_size)
    else:
        version = 1 if form == "auto_round:auto_gptq" else 2
        store, _ = gptq(bits, group_size, version=version)

    def without_groups(module: str, weight: np.ndarray) -> Written | None:
        written = None if module.endswith("layers.1.mlp.down_proj") else store(module, weight)
        if written is not None:
            written.tensors.pop("g_idx", None)
        return written

    return without_groups, {
        "quant_method": "auto-round",
        "packing_format": form,
        "bits": bits,
        "group_size": group_size,
        "sym": False,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
        "extra_config": {"model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float"}},
    }
