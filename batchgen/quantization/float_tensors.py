"""What a linear layer's tensors are in a checkpoint of floats: a weight [N, K] and perhaps a bias [N]."""

from collections.abc import Mapping

from torch import Tensor

from batchgen.errors import WeightsError
from batchgen.quantization.base import BY_OUTPUT, BY_OUTPUT_AND_INPUT, LinearShape, ParameterLayout


def float_layouts(shape: LinearShape) -> Mapping[str, ParameterLayout]:
    """The tensors that each part of the layer has."""
    return (
        {"weight": BY_OUTPUT_AND_INPUT, "bias": BY_OUTPUT}
        if shape.has_bias
        else {"weight": BY_OUTPUT_AND_INPUT}
    )


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
