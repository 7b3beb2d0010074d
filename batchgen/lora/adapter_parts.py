"""read_parts: an adapter's tensors as what each of our layers adds or replaces, folded if need be."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.kernels.lora import LoraPart
from batchgen.lora.adapter_facts import TENSOR_FILE
from batchgen.lora.adapter_plan import AdapterPlan, ModuleParts
from batchgen.lora.base_modules import TABLE
from batchgen.models.stream import norm_before, writes_stream
from batchgen.quantization.rotation import Rotation

# A weight that changes by no more is the same weight in float32.
_NOTHING = 1e-10
# A tensor of the base model by its name in a checkpoint, as floats; None where it has none of that name.
BaseTensor = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True)
class WholePart:
    """A weight [N, K] and a bias [N] or None, float32, that stand in place of a fused part's own."""

    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class AdapterParts:
    """What an adapter does to each of our layers, by the layer's name and the fused part's number.

    Args:
        added: to what layers give.
        whole: in their place.
        table_added: to the embedding's rows: a [r, V], b [E, r].
        table: in place of the embedding's, [V, E] float32.
    """

    added: dict[str, dict[int, LoraPart]] = field(default_factory=dict)
    whole: dict[str, dict[int, WholePart]] = field(default_factory=dict)
    table_added: LoraPart | None = None
    table: Tensor | None = None

    @property
    def changes_nothing(self) -> bool:
        """Whether the model with it is the model without it."""
        parts = [part for layer in self.added.values() for part in layer.values()]
        parts += [] if self.table_added is None else [self.table_added]
        return not self.whole and self.table is None and not any(_adds(part) for part in parts)


class Fold:
    """What an adapter's tensors become where the residual stream of the model is rotated.

    Args:
        rotation: of the stream, or None.
        base: for the weights of the norms, which went into the layers behind them.
    """

    def __init__(self, rotation: Rotation | None, base: BaseTensor):
        self._rotation, self._base = rotation, base

    def inputs(self, module: str, weight: Tensor) -> Tensor:
        """What multiplies a module's inputs: [..., K]."""
        norm = norm_before(module)
        if self._rotation is None or norm is None:
            return weight
        scale = self._base(f"{norm}.weight")
        assert scale is not None
        return self._rotation.inputs(weight, scale)

    def outputs(self, module: str, tensor: Tensor) -> Tensor:
        """What gives a module's outputs: [N, ...] or [N]."""
        if self._rotation is None or not (writes_stream(module) or module == TABLE):
            return tensor
        return self._rotation.outputs(tensor)

    def table(self, table: Tensor) -> Tensor:
        """Rows that begin the stream: [V, E]."""
        return table if self._rotation is None else self._rotation.inputs(table)


def read_parts(plan: AdapterPlan, base: BaseTensor, rotation: Rotation | None = None) -> AdapterParts:
    """Read an adapter.

    Args:
        plan: its tensors, checked.
        base: of the model that it is for.
        rotation: of that model's residual stream.

    Raises:
        ModelError: the file is not there any more or is damaged, a value is not finite, or the adapter brings
            a copy of a weight that is not the model's.
    """
    from safetensors import SafetensorError, safe_open

    path, fold, found = plan.facts.path / TENSOR_FILE, Fold(rotation, base), AdapterParts()
    try:
        with safe_open(path, framework="pt") as file:

            def read(key: str) -> Tensor:
                tensor: Tensor = file.get_tensor(key).to(torch.float32)
                if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
                    raise ModelError(f"{path}: {key} holds values that are NaN or infinite")
                # A view of the mapped file would keep it open, and read it again and again.
                return tensor.clone()

            for name, parts in plan.modules.items():
                _check_copy(path.parent, name, parts, read, base)
                _add_module(found, name, parts, read, base, fold)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    return found


def _add_module(
    found: AdapterParts,
    name: str,
    parts: ModuleParts,
    read: Callable[[str], Tensor],
    base: BaseTensor,
    fold: Fold,
) -> None:
    module = parts.module
    bias = None if parts.bias is None else read(parts.bias)
    if parts.weight is not None and module.kind == "table":
        found.table = fold.table(read(parts.weight))
        return
    if parts.weight is not None:
        own = base(f"{name}.bias") if bias is None and module.has_bias else bias
        weight = fold.outputs(name, fold.inputs(name, read(parts.weight)))
        whole = WholePart(weight, None if own is None else fold.outputs(name, own.to(torch.float32)))
        found.whole.setdefault(module.layer, {})[module.part] = whole
        return
    added = None
    if parts.b_bias is not None:
        added = parts.scaling * read(parts.b_bias)
    if bias is not None:
        # The base's own bias is in what the layer gives.
        own = base(f"{name}.bias")
        change = bias if own is None else bias - own.to(torch.float32)
        added = change if added is None else added + change
    if parts.a is None or parts.b is None:
        a, b = torch.zeros(1, module.inputs), torch.zeros(module.outputs, 1)
    else:
        a, b = read(parts.a), parts.scaling * read(parts.b)
    if module.kind == "table":
        found.table_added = LoraPart(a.contiguous(), fold.outputs(name, b).contiguous())
        return
    part = LoraPart(
        fold.inputs(name, a).contiguous(),
        fold.outputs(name, b).contiguous(),
        None if added is None else fold.outputs(name, added).contiguous(),
    )
    found.added.setdefault(module.layer, {})[module.part] = part


def _check_copy(
    folder: object, name: str, parts: ModuleParts, read: Callable[[str], Tensor], base: BaseTensor
) -> None:
    """A file may hold the weight that it was trained on; another one would be another model."""
    if parts.copy is None:
        return
    own = base(f"{name}.weight")
    if own is None and name == "lm_head":
        own = base(f"{TABLE}.weight")
    if own is None or own.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return
    copy, own = read(parts.copy), own.to(torch.float32)
    # Trained in 16 bits or not, it began as the model's.
    if not torch.allclose(copy, own, rtol=1e-2, atol=1e-3):
        raise ModelError(
            f"{folder}: {parts.copy} is not the {name} of this model, so the adapter is for another one; "
            f"merge it into its own model with peft's merge_and_unload, and run that"
        )


def _adds(part: LoraPart) -> bool:
    most = part.rank * float(part.a.abs().max()) * float(part.b.abs().max())
    return most > _NOTHING or (part.bias is not None and float(part.bias.abs().max()) > _NOTHING)
