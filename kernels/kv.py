"""KVCacheSpec, LayerKV and AttentionMeta: what the KV cache of a layer is, and how a batch reads it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.errors import ShapeError

DTYPES = {
    "float64": torch.float64,  # only the reference backend: the truth that tests compare with
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,  # only KV caches: a scale for each token and head, of keys and of values
    "fp8": torch.int8,  # likewise: the bytes of floats with 4 bits of exponent and 3 of fraction (e4m3)
}
# Those that have scales.
SCALED = ("int8", "fp8")
DTYPE_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The KV cache of one layer.

    `window` None keeps all positions, else the last so many are enough. `kind` is "full"; latent and state
    caches come later under other kinds.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kind: str = "full"
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values, without a backend's padding."""
        scale_bytes = SCALE_BYTES if self.dtype in SCALED else 0
        row_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + scale_bytes
        return 2 * self.num_kv_heads * self.block_size * row_bytes


@dataclass(slots=True)
class LayerKV:
    """The blocks of one layer, or of several that share them.

    Opaque: only the backend that made it knows the layout inside a block.

    `data` is contiguous with the block as its outermost dimension, so copying, swapping and poisoning a block
    need no layout: `data[i]` is block i, whole.
    """

    spec: KVCacheSpec
    data: Tensor
    backend: str

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.data.shape[0]


@dataclass(slots=True)
class AttentionMeta:
    """How one batch, prefill chunks and decodes mixed, reads and writes the cache of one group of layers.

    Shapes (S sequences, T tokens of this step, M blocks a sequence):
        query_start_loc  [S + 1] int32  tokens of sequence s are query_start_loc[s] : query_start_loc[s + 1]
        seq_lens         [S] int32      tokens of sequence s in the cache once this step is written; the last
                                        of them are this step's
        block_tables     [S, M] int32   row s lists the blocks of sequence s, then -1; also -1 for blocks that
                                        lie wholly before the window of the sequence's first query
        slot_mapping     [T] int32      block * block_size + offset where each token is written; -1: nowhere
    Plain values:
        max_query_len, max_seq_len      the largest of each, for choosing a kernel
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int

    def __post_init__(self) -> None:
        """Check what kernels rely on, once for all layers of a step.

        Raises:
            ShapeError: shapes disagree, or a tensor is not a contiguous int32 one.
        """
        tensors = (self.query_start_loc, self.seq_lens, self.block_tables, self.slot_mapping)
        sequences = self.seq_lens.shape[0] if self.seq_lens.dim() == 1 else -1
        if (
            any(tensor.dtype is not torch.int32 or not tensor.is_contiguous() for tensor in tensors)
            or len({tensor.device for tensor in tensors}) > 1
            or self.query_start_loc.shape != (sequences + 1,)
            or self.block_tables.dim() != 2
            or self.block_tables.shape[0] != sequences
            or self.slot_mapping.dim() != 1
        ):
            names = ("query_start_loc [S + 1]", "seq_lens [S]", "block_tables [S, M]", "slot_mapping [T]")
            given = "; ".join(
                f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                for name, tensor in zip(names, tensors, strict=True)
            )
            raise ShapeError(f"AttentionMeta wants contiguous int32 tensors on one device; got {given}")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a KVCacheSpec's or a setting's name."""
    return DTYPES[name]
