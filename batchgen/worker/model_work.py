"""ModelWork: what a step asks of the machine at least, in operations and bytes, by the model's shape."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from batchgen.kernels.ceilings import Ceilings
from batchgen.layers.linear import LinearLayer
from batchgen.models.decoder import Decoder
from batchgen.worker.input_batch import InputBatch


@dataclass(slots=True)
class StepWork:
    """What a step computes: tokens, rows of logits; by KV group, keys that queries see and blocks read."""

    num_tokens: int
    num_rows: int
    num_keys: list[int]
    num_blocks: list[int]


@dataclass(slots=True)
class _Products:
    """Matrix products of one row: operations on floats and on 8-bit integers, and bytes of weights."""

    float_ops: int = 0
    int8_ops: int = 0
    num_bytes: int = 0

    def add(self, layer: object) -> None:
        """Count a layer; an adapter's own products are left out."""
        if not isinstance(layer, LinearLayer):
            return
        ops, screen = 2 * layer.shape.in_features * layer.shape.out_features, layer.screen
        bits = layer.input_bits if screen is None else 16
        if bits is None:
            self.float_ops += ops
        else:
            # 16 bits are multiplied as two times 8.
            self.int8_ops += ops * bits // 8
        kept = layer.tensors() if screen is None else screen.tensors()
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def seconds(self, rows: "np.ndarray", ceilings: Ceilings) -> "np.ndarray":
        """Time of the products for so many rows."""
        each: float = self.float_ops / ceilings.float_ops + self.int8_ops / ceilings.int8_ops
        return rows * each


@dataclass(slots=True)
class ModelWork:
    """The least that steps cost on a machine with given ceilings.

    A step multiplies every row by every weight, and reads every weight once. Its attention multiplies every
    query by every key that it sees and sums as many values, and reads each KV block once, however many of its
    sequences share that. Of operations and reading, whichever takes longer counts. A head that is looked
    through as integers for greedy rows counts as these. The rest, elementwise work and drawing, counts
    nothing.
    """

    windows: tuple[int | None, ...]
    layers: _Products = field(default_factory=_Products)
    head: _Products = field(default_factory=_Products)
    # Per KV group: bytes of a block in all its layers, operations for a key.
    block_bytes: list[int] = field(default_factory=list)
    key_ops: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: Decoder) -> "ModelWork":
        """The work of one model."""
        layout, config = model.kv_layout, model.config
        work = cls(layout.windows)
        for layer in model.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                work.layers.add(linear)
        work.head.add(model.head)
        for group in range(len(layout.windows)):
            num_layers = layout.groups.count(group)
            work.block_bytes.append(num_layers * model.kernels.kv_block_bytes(layout.spec))
            work.key_ops.append(num_layers * 4 * config.num_heads * config.head_dim)
        return work

    def step(self, batch: InputBatch) -> StepWork:
        """What a batch computes."""
        part = batch.part
        keys, blocks = [], []
        for window, tables, meta in zip(self.windows, part.tables, batch.metas, strict=True):
            seen = part.positions if window is None else np.minimum(part.positions, window - 1)
            keys.append(int(seen.sum()) + len(seen))
            blocks.append(_num_distinct(tables[:, : meta.block_tables.shape[1]]))
        return StepWork(len(part.positions), batch.logit_rows.shape[0], keys, blocks)

    def bound_s(self, steps: Sequence[StepWork], ceilings: Ceilings) -> dict[str, float]:
        """The least seconds that some steps take, by what takes them."""
        tokens = np.array([step.num_tokens for step in steps], dtype=np.float64)
        rows = np.array([step.num_rows for step in steps], dtype=np.float64)
        num_bytes = self.layers.num_bytes + np.where(rows > 0, self.head.num_bytes, 0)
        products = self.layers.seconds(tokens, ceilings) + self.head.seconds(rows, ceilings)
        matrix = np.maximum(products, num_bytes / ceilings.read_bytes)
        key_ops = np.array([np.dot(step.num_keys, self.key_ops) for step in steps], dtype=np.float64)
        read = np.array([np.dot(step.num_blocks, self.block_bytes) for step in steps], dtype=np.float64)
        attention = np.maximum(key_ops / ceilings.float_ops, read / ceilings.read_bytes)
        return {"matrix_products": float(matrix.sum()), "attention": float(attention.sum())}


def _num_distinct(tables: np.ndarray) -> int:
    """How many blocks tables name; -1 is none."""
    # Marks in an array are counted ten times as fast as sorted numbers, and this stands in every step.
    is_named = np.zeros(int(tables.max(initial=-1)) + 2, dtype=np.bool_)
    is_named[tables] = True
    return int(np.count_nonzero(is_named[:-1]))
