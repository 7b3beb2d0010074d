"""Numbers of a few bits out of the integers that checkpoints hold them in, and into them."""

import torch
from torch import Tensor


def unpack_stream(words: Tensor, bits: int, dim: int, count: int | None = None) -> Tensor:
    """Numbers that lie one after the other in the words along a dimension, the lowest bits first.

    Numbers may reach from one word into the next (3 bits). Shapes: words int32, [..., W, ...] -> uint8
    [..., count, ...]; without a count as many as there are, 32 * W / bits.
    """
    moved = words.movedim(dim, -1).contiguous()
    if 32 % bits == 0:
        # Bytes in memory are the words' own, lowest first.
        stored = moved.view(torch.uint8)
        numbers = [stored >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
        unpacked = torch.stack(numbers, dim=-1).flatten(-2)
    else:
        unpacked = _straddling(moved, bits)
    return unpacked[..., :count].movedim(-1, dim)


def pack_stream(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Words of 32 bits with the numbers one after the other along a dimension, the lowest bits first.

    Shapes: numbers uint8 [..., count, ...] of 1, 2, 4 or 8 bits -> int32 [..., W, ...]; the last word is
    filled up with zeros.
    """
    moved = numbers.movedim(dim, -1)
    moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % (32 // bits)))
    parts = moved.reshape(*moved.shape[:-1], -1, 8 // bits)
    stored = parts[..., 0].clone()
    for place in range(1, 8 // bits):
        stored |= parts[..., place] << bits * place
    words: Tensor = stored.contiguous().view(torch.int32).movedim(-1, dim).contiguous()
    return words


def unpack_words(words: Tensor, bits: int, dim: int, count: int) -> Tensor:
    """Numbers of which each word holds as many as fit whole, the lowest bits first: `count` of them."""
    per_word = 32 // bits
    if 32 % bits == 0:
        return unpack_stream(words, bits, dim).narrow(dim, 0, count)
    moved = words.movedim(dim, -1)
    shifts = torch.arange(per_word, dtype=torch.int32) * bits
    unpacked: Tensor = (moved.unsqueeze(-1) >> shifts & (2**bits - 1)).to(torch.uint8).flatten(-2)
    return unpacked[..., :count].movedim(-1, dim)


def codes_of_signed(values: Tensor, bits: int = 8) -> Tensor:
    """Integers of so many bits, int8, as codes: half their range is added."""
    shifted: Tensor = values.to(torch.int16) + 2 ** (bits - 1)
    return shifted.to(torch.uint8)


def _straddling(words: Tensor, bits: int) -> Tensor:
    """32 numbers in each `bits` words; the last of them may be missing."""
    words = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    groups = words.view(*words.shape[:-1], -1, bits).to(torch.int64) & 0xFFFFFFFF
    numbers = []
    for number in range(32):
        word, shift = divmod(number * bits, 32)
        value = groups[..., word] >> shift
        if shift + bits > 32:
            value = value | groups[..., word + 1] << (32 - shift)
        numbers.append((value & (2**bits - 1)).to(torch.uint8))
    return torch.stack(numbers, dim=-1).flatten(-2)
