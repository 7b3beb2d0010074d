"""What a linear layer's tensors are in a checkpoint of floats: a weight [N, K] and perhaps a bias [N]."""

from collections.abc import Mapping

from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.quantization.base import LinearShape, ParameterLayout

_WEIGHT, _BIAS = ParameterLayout(output_dim=0, input_dim=1), ParameterLayout(output_dim=0, input_dim=None)


def float_layouts(shape: LinearShape) -> Mapping[str, ParameterLayout]:
    """The tensors that each part of the layer has."""
    return {"weight": _WEIGHT, "bias": _BIAS} if shape.has_bias else {"weight": _WEIGHT}


def check_float_tensor(shape: LinearShape, part: int, parameter: str, tensor: Tensor) -> None:
    """Want a part's weight or bias, sliced to this rank.

    Raises:
        WeightsError: another shape, or no floats.
    """
    rows = shape.part_sizes[part]
    expected = (rows,) if parameter == "bias" else (rows, shape.in_features)
    if tensor.shape != expected:
        raise WeightsError(
            f"{shape.name}, part {part}: {parameter} has shape {list(tensor.shape)}, "
            f"the model needs {list(expected)}"
        )
    if not tensor.is_floating_point():
        raise WeightsError(
            f"{shape.name}, part {part}: {parameter} is stored as {tensor.dtype}; a quantized checkpoint "
            f"must say so in its config.json (quantization_config)"
        )
