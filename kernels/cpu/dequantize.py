"""dequantize: blocks of quantized weights as GGUF files store them, as float32."""

import torch
from torch import Tensor

from batchgen.kernels.cpu.library import Library, load


def dequantize(type_id: int, blocks: Tensor, num_values: int) -> Tensor | None:
    """The values of stored blocks, one after the other.

    Args:
        type_id: number of the type in a GGUF file.
        blocks: uint8, contiguous.
        num_values: how many they hold.

    Returns: [num_values] float32; None where the C kernels do not know the type, or are not available.
    """
    library = load()
    size = _BLOCKS.get(type_id)
    if size is None or not isinstance(library, Library):
        return None
    out = torch.empty(num_values)
    num_blocks = blocks.numel() // size[0]
    assert num_blocks * size[0] == blocks.numel() and num_blocks * size[1] == num_values
    threads = torch.get_num_threads()
    status = library.dequantize(type_id, blocks.data_ptr(), out.data_ptr(), num_blocks, threads)
    assert status == 0, f"type {type_id}"
    return out


# Type -> bytes and values of a block (dequantize.c).
_BLOCKS = {
    2: (18, 32), 3: (20, 32), 6: (22, 32), 7: (24, 32), 8: (34, 32),
    12: (144, 256), 13: (176, 256), 14: (210, 256),
}  # fmt: skip
