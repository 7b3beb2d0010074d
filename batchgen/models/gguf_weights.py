"""GGUFSource: the tensors of a GGUF file, dequantized one by one, under Hugging Face's names."""

import math
import re
import warnings

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.cpu.dequantize import dequantize as kernel_dequantize
from batchgen.models.gguf_file import GGUFFile, GGUFTensor
from batchgen.models.model_config import ModelConfig
from batchgen.quantization.gguf import KINDS

ROPE_DIVISORS = "rope_freqs.weight"

# Storage types that are read.
READ_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in (
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"
    )
)  # fmt: skip

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Weights that linear layers multiply by, and what is said beside them.
_LINEAR, _TYPE = ("_proj.weight", "lm_head.weight"), ".weight_type"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFSource:
    """The weights of a GGUF file as float32, those of linear layers as their blocks if that is asked for.

    Args:
        file: the open file.
        config: the model's shape; for families whose query and key rows are permuted in the file.
        keeps_blocks: give weights of linear layers as they are stored, uint8, and their type besides.

    Raises:
        UnsupportedModelError: a storage type that is not read, naming a tensor.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, keeps_blocks: bool = False):
        self.where = file.path.name
        self._file, self._config = file, config
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            if tensor.type_id not in READ_TYPES:
                raise UnsupportedModelError(
                    f"{self.where}: {tensor.name} is stored as {_type_name(tensor.type_id)}, which is not "
                    f"read (read: {', '.join(kind.name for kind in READ_TYPES)})"
                )
            if tensor.name != ROPE_DIVISORS:
                self._tensors[hf_name(tensor.name)] = tensor
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in self._tensors.items()
        }
        self.kept_modules: frozenset[str] = frozenset()
        if keeps_blocks:
            self.kept_modules = frozenset(
                name.removesuffix(".weight")
                for name, tensor in self._tensors.items()
                if name.endswith(_LINEAR) and tensor.type_id in KINDS
            )
            self.shapes |= {f"{module}{_TYPE}": () for module in self.kept_modules}

    def read(self, name: str) -> Tensor:
        """One tensor, dequantized to float32 or as blocks, its rows in Hugging Face's order."""
        module = name.rpartition(".")[0]
        if name.endswith(_TYPE):
            return torch.tensor(self._tensors[f"{module}.weight"].type_id)
        tensor = self._tensors[name]
        is_kept = module in self.kept_modules and name.endswith(".weight")
        weights = torch.from_numpy(self._blocks(tensor) if is_kept else self._dequantized(tensor))
        if self._config.family.gguf_rope_is_interleaved and ".self_attn." in name:
            if ".q_proj." in name:
                return _halves_together(weights, self._config.num_heads)
            if ".k_proj." in name:
                return _halves_together(weights, self._config.num_kv_heads)
        return weights

    def rope_divisors(self) -> Tensor | None:
        """By what each rotary frequency is divided, [dim / 2], or None."""
        tensor = self._file.tensors.get(ROPE_DIVISORS)
        return None if tensor is None else torch.from_numpy(self._dequantized(tensor))

    def _blocks(self, tensor: GGUFTensor) -> np.ndarray:
        """A copy of the stored bytes, [rows, bytes of a row]."""
        rows = self._stored(tensor).copy()
        self._file.forget()
        return rows

    def _dequantized(self, tensor: GGUFTensor) -> np.ndarray:
        rows, kind = self._stored(tensor), GGMLQuantizationType(tensor.type_id)
        values = _by_kernel(kind, rows.reshape(-1), math.prod(tensor.shape))
        if values is None:
            values = dequantize(rows, kind)
        values = values if values.flags.writeable else values.copy()
        # What has been read is not read again; it need not stay in this process's memory.
        self._file.forget()
        return values.reshape(tensor.shape)

    def _stored(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored bytes in the mapped file, [rows, bytes of a row]."""
        kind = GGMLQuantizationType(tensor.type_id)
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        row_len = tensor.shape[-1]
        if row_len % block_len:
            raise WeightsError(
                f"{self.where}: {tensor.name}: rows of {row_len} are no multiple of {block_len}"
            )
        num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        row_bytes = row_len // block_len * block_bytes
        raw = np.frombuffer(self._file.raw(tensor, num_rows * row_bytes), dtype=np.uint8)
        return raw.reshape(num_rows, row_bytes)


def _by_kernel(kind: GGMLQuantizationType, raw: np.ndarray, num_values: int) -> np.ndarray | None:
    with warnings.catch_warnings():
        # Mapped memory cannot be written to, and is not.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        values = kernel_dequantize(int(kind), torch.from_numpy(raw), num_values)
    return None if values is None else values.numpy()


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; an unknown one is given back as it is."""
    module, _, parameter = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{parameter}"
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return name
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _halves_together(rows: Tensor, num_heads: int) -> Tensor:
    """Undo the order of rows that rotates neighbours: per head, even rows first, then odd ones.

    Shapes: rows [num_heads * D, ...].
    """
    size = rows.shape[0] // num_heads
    return rows.view(num_heads, size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _type_name(type_id: int) -> str:
    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"type {type_id}"
