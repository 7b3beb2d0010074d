"""Blocks of a GGUF file, kept in their bits: `quantization: gguf`.

Every type of block but those of plain floats is codes of 2 to 8 bits with a scale, and perhaps a least value,
for each 16 or 32 of them; types with K have scales of 4 to 8 bits under one or two of 16 for 256 codes.
Layouts: ggml's (https://github.com/ggml-org/ggml, MIT).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import WeightsError
from batchgen.kernels.coded import Coded
from batchgen.quantization.base import AT_LOAD, BY_NEITHER, BY_OUTPUT_AND_INPUT, ParameterLayout
from batchgen.quantization.stored import Scheme, Stored

# What a block's bytes hold: uint8 [..., bytes] -> codes [..., values], scales and, if there are, least values
# [..., groups].
Parts = tuple[Tensor, Tensor, Tensor | None]


def _split(block: Tensor, count: int, size: int) -> Tensor:
    """The last dimension as `count` stretches of `size`."""
    return block.reshape(*block.shape[:-1], count, size)


def _halves(block: Tensor, at: int, count: int = 1) -> Tensor:
    """Floats of 16 bits from a byte on."""
    return block[..., at : at + 2 * count].contiguous().view(torch.float16)


def _nibbles(block: Tensor) -> Tensor:
    """Codes of 4 bits: all low halves of bytes, then all high ones."""
    return torch.cat((block & 15, block >> 4), dim=-1)


def _twos(block: Tensor) -> Tensor:
    """Codes of 2 bits: the lowest two of all bytes, then the next."""
    return torch.cat([block >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)


def _ones(block: Tensor) -> Tensor:
    """Single bits: the lowest of all bytes, then the next."""
    return torch.cat([block >> shift & 1 for shift in range(8)], dim=-1)


def _fifth(block: Tensor) -> Tensor:
    """32 bits, one for each code, where a fifth bit of a code stands."""
    bits = block.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q4_0(block: Tensor) -> Parts:
    return _nibbles(block[..., 2:]), _halves(block, 0), None


def _q4_1(block: Tensor) -> Parts:
    return _nibbles(block[..., 4:]), _halves(block, 0), _halves(block, 2)


def _q5_0(block: Tensor) -> Parts:
    return _nibbles(block[..., 6:]) | _fifth(block[..., 2:6]), _halves(block, 0), None


def _q5_1(block: Tensor) -> Parts:
    return _nibbles(block[..., 8:]) | _fifth(block[..., 4:8]), _halves(block, 0), _halves(block, 2)


def _q8_0(block: Tensor) -> Parts:
    return block[..., 2:] ^ 128, _halves(block, 0), None


def _q2_k(block: Tensor) -> Parts:
    small, codes = block[..., :16], _pairs(block[..., 16:80])
    whole = _halves(block, 80, 2).to(torch.float32)
    return codes, whole[..., :1] * (small & 15), -(whole[..., 1:] * (small >> 4))


def _q3_k(block: Tensor) -> Parts:
    codes = _pairs(block[..., 32:96]) | _ones(block[..., :32]) << 2
    small = (_nibbles(block[..., 96:104]) | _twos(block[..., 104:108]) << 4).to(torch.float32) - 32
    return codes, _halves(block, 108).to(torch.float32) * small, None


def _q4_k(block: Tensor) -> Parts:
    return _stretches(block, block[..., 16:])


def _q5_k(block: Tensor) -> Parts:
    codes, scale, least = _stretches(block, block[..., 48:])
    return codes | _ones(block[..., 16:48]) << 4, scale, least


def _q6_k(block: Tensor) -> Parts:
    low, high = _split(block[..., :128], 2, 64), _split(block[..., 128:192], 2, 32)
    codes = (_nibbles(low) | _twos(high) << 4).flatten(-2)
    small = block[..., 192:208].contiguous().view(torch.int8).to(torch.float32)
    return codes, _halves(block, 208).to(torch.float32) * small, None


def _pairs(block: Tensor) -> Tensor:
    """Codes of 2 bits: two halves, each four runs of 32, one for each two bits of its 32 bytes."""
    return _twos(_split(block, 2, 32)).flatten(-2)


def _stretches(block: Tensor, nibbles: Tensor) -> Parts:
    """Eight stretches of 32 codes; their scales and least values have six bits each, in 12 bytes."""
    small, least, rest = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = torch.cat((small & 63, rest & 15 | small >> 2 & 48), dim=-1)
    leasts = torch.cat((least & 63, rest >> 4 | least >> 2 & 48), dim=-1)
    whole = _halves(block, 0, 2).to(torch.float32)
    codes = _nibbles(_split(nibbles, 4, 32)).flatten(-2)
    return codes, whole[..., :1] * scales, -(whole[..., 1:] * leasts)


@dataclass(frozen=True, slots=True)
class _Kind:
    block_bytes: int
    block_values: int
    bits: int
    group_size: int
    parts: Callable[[Tensor], Parts]
    zero: int | None = None


# By the number of the type in a file (enum ggml_type).
KINDS = {
    2: _Kind(18, 32, 4, 32, _q4_0, 8),
    3: _Kind(20, 32, 4, 32, _q4_1),
    6: _Kind(22, 32, 5, 32, _q5_0, 16),
    7: _Kind(24, 32, 5, 32, _q5_1),
    8: _Kind(34, 32, 8, 32, _q8_0, 128),
    10: _Kind(84, 256, 2, 16, _q2_k),
    11: _Kind(110, 256, 3, 16, _q3_k, 4),
    12: _Kind(144, 256, 4, 32, _q4_k),
    13: _Kind(176, 256, 5, 32, _q5_k),
    14: _Kind(210, 256, 6, 16, _q6_k, 32),
}


def decode_blocks(rows: Tensor, type_id: int) -> Coded:
    """Rows of blocks as a weight of few bits: uint8 [N, bytes of a row]; the type by its number in a file."""
    kind = KINDS[type_id]
    codes, scale, least = kind.parts(_split(rows, -1, kind.block_bytes))
    scale = scale.flatten(1).contiguous()
    return Coded(
        codes=codes.flatten(1).contiguous(),
        bits=kind.bits,
        scale=scale,
        zero=None if kind.zero is None else torch.full_like(scale, kind.zero, dtype=torch.uint8),
        least=None if least is None else least.flatten(1).contiguous(),
        group_size=kind.group_size,
    )


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """Blocks of whatever type the file says."""

    optional = frozenset[str]()
    input_bits = None

    def __str__(self) -> str:
        return "GGUF blocks"

    @property
    def layouts(self) -> Mapping[str, ParameterLayout]:
        """See `Scheme`."""
        return {"weight": BY_OUTPUT_AND_INPUT, "weight_type": BY_NEITHER}

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`."""
        rows, type_id = tensors["weight"], int(tensors["weight_type"])
        kind = KINDS[type_id]
        expected = [outputs, inputs // kind.block_values * kind.block_bytes]
        if inputs % kind.block_values or list(rows.shape) != expected:
            raise WeightsError(
                f"weight has rows of {rows.shape[1]} bytes for {inputs} inputs in blocks of "
                f"{kind.block_values}"
            )
        coded = decode_blocks(rows, type_id)
        if not bool(coded.scale.isfinite().all()):
            raise WeightsError("weight holds a scale that is no finite number; the file is damaged")
        return coded


@AT_LOAD.register("gguf")
class KeptBlocks(Stored):
    """Weights of a GGUF file in their blocks. `config["modules"]` are those that it holds so."""

    @override
    def read_config(self) -> None:
        self._modules = frozenset(self.config.get("modules") or ())

    @override
    def scheme(self, module: str) -> Scheme | None:
        return BlockScheme() if module in self._modules else None
