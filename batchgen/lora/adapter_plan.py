"""AdapterPlan: the tensors of an adapter sorted to the modules of a model, all checked before one is read.

No torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from batchgen.config import MOST_LORA_RANK
from batchgen.errors import ConfigError, ModelError
from batchgen.lora.adapter_facts import CONFIG_FILE, TENSOR_FILE, AdapterFacts, TensorPlace, tensor_places
from batchgen.lora.base_modules import HEAD, BaseModule
from batchgen.lora.peft_config import PeftConfig
from batchgen.quantities import counted

_PREFIX = "base_model.model."
# What a tensor is to its module, by the end of its name; the longest that fits counts.
_ROLES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "b_bias",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".base_layer.weight": "copy",
    ".base_layer.bias": "bias",
    ".modules_to_save.weight": "weight",
    ".modules_to_save.bias": "bias",
    ".weight": "weight",
    ".bias": "bias",
}
_OTHER_KINDS = {
    "lora_magnitude_vector": "DoRA",
    "token_adapter": "training of single tokens",
    "lora_diag": "KaSA",
}
_TYPES = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"\.\d+\.")


@dataclass(slots=True)
class ModuleParts:
    """The names of the tensors that an adapter has for one module; None where it has none.

    Args:
        module: which.
        scaling: by what B · A, and B's bias, are multiplied.
        a, b, b_bias: the pair, and a bias of B's.
        weight, bias: in place of the module's own.
        copy: what must be the module's own weight.
    """

    module: BaseModule
    scaling: float
    a: str | None = None
    b: str | None = None
    b_bias: str | None = None
    weight: str | None = None
    bias: str | None = None
    copy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """What an adapter does to a model.

    Args:
        facts: of its files.
        modules: name of a module -> what the adapter has for it.
        rank: the largest.
        num_bytes: of its tensors.
        warnings: modules that it has nothing for, or that the model has not.
    """

    facts: AdapterFacts
    modules: Mapping[str, ModuleParts]
    rank: int
    num_bytes: int
    warnings: tuple[str, ...] = field(default=())


def plan_adapter(
    facts: AdapterFacts, base: Mapping[str, BaseModule], max_rank: int | None = None
) -> AdapterPlan:
    """Hold an adapter's tensors against a model.

    Args:
        facts: of its files.
        base: the modules of the model.
        max_rank: the setting `max_lora_rank`.

    Raises:
        ConfigError: its rank is over the limit; says which setting to change.
        ModelError: it is of another kind or for another model, or incomplete; names keys.
    """
    where, places = str(facts.path), tensor_places(facts.path)
    config = PeftConfig.of(facts.config, str(facts.path / CONFIG_FILE))
    modules: dict[str, ModuleParts] = {}
    foreign: dict[str, None] = {}
    for key in sorted(places):
        module, role = _split(key, where)
        if role is None:
            continue
        if module not in base:
            foreign[module] = None
            continue
        parts = modules.setdefault(module, ModuleParts(base[module], config.scaling(module)))
        if getattr(parts, role) is not None:
            raise ModelError(
                f"{where}: {module} has two tensors of one kind, {getattr(parts, role)} and {key}"
            )
        setattr(parts, role, key)
    if not modules:
        raise ModelError(
            f"{where}: no module of this adapter is in the model; it has {_listed(list(foreign))}, as of "
            f"{facts.config.get('base_model_name_or_path')!r}"
        )
    _check_pairs(modules, where)
    _check_shapes(modules, places, config, facts)
    rank = _check_ranks(modules, places, max_rank, where)
    return AdapterPlan(
        facts=facts,
        modules=modules,
        rank=rank,
        num_bytes=sum(place.stop - place.start for place in places.values()),
        warnings=tuple(_warnings(modules, list(foreign), base, config)),
    )


def _split(key: str, where: str) -> tuple[str, str | None]:
    """A tensor's module and what it is to it; None: nothing that is computed with."""
    name = key.removeprefix(_PREFIX)
    for mark, kind in _OTHER_KINDS.items():
        if f".{mark}" in name:
            raise ModelError(
                f"{where}: {TENSOR_FILE}: {key}: {kind} is not built; merge the adapter into its model with "
                f"peft's merge_and_unload, and run that"
            )
    if ".original_module." in name:
        return name, None
    for end in sorted(_ROLES, key=len, reverse=True):
        if name.endswith(end):
            return name.removesuffix(end), _ROLES[end]
    raise ModelError(f"{where}: {TENSOR_FILE}: {key} is no tensor that is known of LoRA adapters")


def _check_pairs(modules: Mapping[str, ModuleParts], where: str) -> None:
    for module, parts in modules.items():
        for have, lack, letter in (("a", "b", "B"), ("b", "a", "A"), ("b_bias", "b", "B")):
            if getattr(parts, have) is not None and getattr(parts, lack) is None:
                raise ModelError(
                    f"{where}: {getattr(parts, have)} has no lora_{letter} beside it; the adapter was not "
                    f"saved whole"
                )
        if parts.a is not None and parts.weight is not None:
            raise ModelError(
                f"{where}: {module} has both a pair ({parts.a}) and a weight of its own ({parts.weight})"
            )
        if parts.module.kind == "norm":
            raise ModelError(
                f"{where}: {module} ({parts.weight or parts.a or parts.bias}): adapters of norms are not "
                f"built; merge the adapter into its model with peft's merge_and_unload, and run that"
            )


def _check_shapes(
    modules: Mapping[str, ModuleParts],
    places: Mapping[str, TensorPlace],
    config: PeftConfig,
    facts: AdapterFacts,
) -> None:
    wrong = []
    for module, parts in modules.items():
        base, rank = parts.module, config.rank(module)
        if parts.a is not None:
            stored = places[parts.a].shape
            # A pair of another rank than the configuration's would be scaled wrongly.
            if stored and stored[0] != rank and stored[1:] == (base.inputs,):
                raise ModelError(
                    f"{facts.path}: {parts.a} has rank {stored[0]}, but r and rank_pattern say {rank}; the "
                    f"two files are of different adapters"
                )
        expected = {
            parts.a: (rank, base.inputs),
            parts.b: (base.outputs, rank),
            parts.b_bias: (base.outputs,),
            parts.weight: base.weight_shape,
            parts.copy: base.weight_shape,
            parts.bias: (base.outputs,),
        }
        wrong += [(key, shape) for key, shape in expected.items() if key and places[key].shape != shape]
    if wrong:
        key, shape = wrong[0]
        more = f" ({len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise ModelError(
            f"{facts.path}: {key} has shape {list(places[key].shape)}, this model needs {list(shape)}{more}; "
            f"the adapter was made for another model, {facts.config.get('base_model_name_or_path')!r}"
        )
    for key, place in places.items():
        if place.dtype not in _TYPES:
            raise ModelError(
                f"{facts.path}: {key} is {place.dtype}; adapters are read in {', '.join(_TYPES)}"
            )
        size = {"F64": 8, "F32": 4}.get(place.dtype, 2)
        if place.stop - place.start != prod(place.shape) * size:
            raise ModelError(f"{facts.path}: {key}: {TENSOR_FILE} is damaged: its size and shape disagree")


def _check_ranks(
    modules: Mapping[str, ModuleParts],
    places: Mapping[str, TensorPlace],
    max_rank: int | None,
    where: str,
) -> int:
    ranks = {module: places[parts.a].shape[0] for module, parts in modules.items() if parts.a is not None}
    largest = max(ranks, key=lambda module: ranks[module], default=None)
    if largest is None:
        return 0
    rank = ranks[largest]
    if rank > MOST_LORA_RANK:
        raise ConfigError(f"{where}: {largest} has rank {rank}; ranks up to {MOST_LORA_RANK} are built")
    if max_rank is not None and rank > max_rank:
        raise ConfigError(
            f"{where}: {largest} has rank {rank}, more than max_lora_rank={max_rank}; set max_lora_rank: "
            f"{rank} (or leave it out for no limit)"
        )
    return rank


def _warnings(
    modules: Mapping[str, ModuleParts],
    foreign: Sequence[str],
    base: Mapping[str, BaseModule],
    config: PeftConfig,
) -> list[str]:
    found = []
    if foreign:
        total = len(modules) + len(foreign)
        found.append(
            f"{len(foreign)} of its {total} modules are not in the model and are left out: {_listed(foreign)}"
        )
    wanted = [
        module
        for module, each in base.items()
        if each.kind != "norm"
        and config.targets_module(module, is_linear=each.kind == "linear" and module != HEAD)
    ]
    lacking = [module for module in wanted if module not in modules or modules[module].a is None]
    if lacking:
        found.append(
            f"it has nothing for {len(lacking)} of the {counted(len(wanted), 'module')} that its "
            f"target_modules name, which stay as they are: {_listed(lacking)}"
        )
    return found


def _listed(names: Sequence[str], most: int = 4) -> str:
    """The first of many, one of each kind before others of the same."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(_LAYER.sub(".*.", name), name)
    shown = list(kinds.values())[:most]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
