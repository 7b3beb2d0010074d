"""LoRA adapters for tests, in the files that peft writes, made without it.

Everything is numpy, so that tests of code that needs no torch need none for their adapters.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"\.layers\.(\d+)\.")

# What adapter_config.json holds when nothing special was asked for.
_CONFIG: Mapping[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "rank_pattern": {},
    "revision": None,
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}


def write_adapter(
    folder: Path,
    base: Path | Shapes,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL_LINEAR,
    layers: Sequence[int] | None = None,
    saves_embeddings: bool = False,
    is_zero: bool = False,
    strength: float = 0.3,
    seed: int = 0,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Write an adapter_config.json and an adapter_model.safetensors.

    Args:
        folder: where; made.
        base: folder of the model, one file of safetensors; or module -> shape of its weight.
        rank: `r` of the file.
        alpha: `lora_alpha` of the file.
        targets: names of modules, or the ends of such names; `embed_tokens` and `lm_head` may be among them.
        layers: only of these layers (`layers_to_transform`).
        saves_embeddings: store the model's own embedding and head too, whole and unchanged, as peft does when
            one of them is a target.
        is_zero: B is zero, as before training: the adapter changes nothing.
        strength: about how much the adapter adds to what a layer gives, before scaling.
        seed: of the numbers.
        dtype: of the tensors, float32 or float16.
        **config: more keys of the file, as they are. Tensors follow `rank_pattern`, `lora_bias`, `bias`
            ("all": every bias of the model, changed), `modules_to_save` (whole, changed) and `use_dora`.

    Returns:
        The folder.
    """
    written = {**_CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": list(targets), **config}
    written["layers_to_transform"] = None if layers is None else list(layers)
    shapes = base_shapes(base) if isinstance(base, Path) else dict(base)
    adapted = target_modules(shapes, targets, layers)
    rng = np.random.default_rng(seed)
    tensors: Arrays = {}
    for module in adapted:
        tensors |= _adapted(module, base, shapes, written, rng, 0.0 if is_zero else strength)
    tensors |= _saved(base, written["modules_to_save"] or (), written["bias"], adapted, rng, strength)
    if saves_embeddings:
        tensors |= _embeddings(base, adapted)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {f"{_PREFIX}{name}": value.astype(dtype) for name, value in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True))
    return folder


def base_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Module -> shape of its weight; a head that is the embedding's weight once more is there too."""
    shapes = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            if name.endswith(".weight"):
                shapes[name.removesuffix(".weight")] = tuple(file.get_slice(name).get_shape())
    shapes.setdefault(_HEAD, shapes[_EMBEDDING])
    return shapes


def target_modules(shapes: Shapes, targets: Sequence[str], layers: Sequence[int] | None = None) -> list[str]:
    """The modules that these targets name, in the order of their names."""
    wanted = [module for module in shapes if any(_ends_with(module, target) for target in targets)]
    if layers is not None:
        wanted = [module for module in wanted if (at := _LAYER.search(module)) and int(at[1]) in layers]
    return sorted(wanted)


def _ends_with(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _pattern_for(module: str, patterns: Mapping[str, Any]) -> str | None:
    """The first key of a rank_pattern that is for this module: a regular expression for the name's end."""
    return next((key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), None)


def _adapted(
    module: str,
    base: Path | Shapes,
    shapes: Shapes,
    config: Mapping[str, Any],
    rng: np.random.Generator,
    strength: float,
) -> Arrays:
    """What an adapter has for a module that it targets."""
    ranks = config["rank_pattern"]
    rank = ranks[found] if (found := _pattern_for(module, ranks)) else config["r"]
    tensors = _pair(module, shapes[module], rank, rng, strength)
    if config["lora_bias"]:
        tensors[f"{module}.lora_B.bias"] = _noise(rng, (shapes[module][0],), strength)
    if config["use_dora"]:
        tensors[f"{module}.lora_magnitude_vector"] = _magnitudes(base, module, shapes, rng)
    return tensors


def _pair(
    module: str, shape: tuple[int, ...], rank: int, rng: np.random.Generator, strength: float
) -> Arrays:
    """A and B under peft's names, which are other ones for an embedding."""
    outputs, inputs = shape
    spread = strength * rank**-0.5
    if module == _EMBEDDING:
        # [vocabulary, hidden] is stored the other way round than a linear layer of the same shape.
        return {
            f"{module}.lora_embedding_A": _noise(rng, (rank, outputs), 1.0),
            f"{module}.lora_embedding_B": _noise(rng, (inputs, rank), spread),
        }
    return {
        f"{module}.lora_A.weight": _noise(rng, (rank, inputs), inputs**-0.5),
        f"{module}.lora_B.weight": _noise(rng, (outputs, rank), spread),
    }


def _noise(rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    noise: np.ndarray = (rng.standard_normal(shape) * spread).astype(np.float32)
    return noise


def _magnitudes(base: Path | Shapes, module: str, shapes: Shapes, rng: np.random.Generator) -> np.ndarray:
    """Lengths of the base's rows, each a little changed."""
    weight = _base_tensors(base)[f"{module}.weight"]
    lengths: np.ndarray = np.linalg.norm(weight.astype(np.float32), axis=1)
    return (lengths * rng.uniform(0.8, 1.2, shapes[module][0])).astype(np.float32)


def _saved(
    base: Path | Shapes,
    modules: Sequence[str],
    bias: str,
    adapted: Collection[str],
    rng: np.random.Generator,
    strength: float,
) -> Arrays:
    """Whole parameters of the model that an adapter brings along, changed."""
    if not modules and bias == "none":
        return {}
    found: Arrays = {}
    tensors = _base_tensors(base)
    if any(_HEAD.endswith(name) for name in modules):
        tensors.setdefault(f"{_HEAD}.weight", tensors[f"{_EMBEDDING}.weight"])
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        changed = tensor.astype(np.float32)
        changed = changed + _noise(rng, tensor.shape, strength * float(changed.std() or 1.0))
        # Unlike targets, ends of words count: `norm` is every norm.
        if any(module.endswith(wanted) for wanted in modules):
            found[name] = changed
        elif parameter == "bias" and bias == "all":
            # An adapted layer stands one level further down in peft's model.
            found[f"{module}.base_layer.bias" if module in adapted else name] = changed
    return found


def _embeddings(base: Path | Shapes, adapted: Collection[str]) -> Arrays:
    """Embedding and head as they are; an adapted one stands one level further down in peft's model."""
    tensors = _base_tensors(base)
    tensors.setdefault(f"{_HEAD}.weight", tensors[f"{_EMBEDDING}.weight"])
    found = {}
    for module in (_EMBEDDING, _HEAD):
        inner = ".base_layer" if module in adapted else ""
        found[f"{module}{inner}.weight"] = tensors[f"{module}.weight"]
    return found


def _base_tensors(base: Path | Shapes) -> Arrays:
    if not isinstance(base, Path):
        raise ValueError("parameters of the base are needed: give its folder, not shapes")
    tensors: Arrays = load_file(base / "model.safetensors")
    return tensors
