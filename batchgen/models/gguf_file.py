"""GGUFFile: the key-values and the tensor directory of a GGUF file, read in milliseconds. No torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import hashlib
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Value type -> struct code of one scalar; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies.

    Args:
        name: as the file spells it ("blk.0.attn_q.weight").
        shape: in torch's order, the contiguous dimension last.
        type_id: ggml's number of the storage type.
        offset: of its first byte from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """A GGUF file, memory-mapped: key-values by `get`, `tensors`, and the raw bytes of each.

    Raises:
        ModelError: not a GGUF file, a version or byte order that is not read, or a file cut short.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        # Key -> where its value begins and ends. Arrays are only decoded when they are asked for: a
        # vocabulary takes more memory as Python strings than as bytes.
        self._spans: dict[str, tuple[int, int]] = {}
        with open(self.path, "rb") as file:
            if self.path.stat().st_size < 24:
                raise ModelError(f"{self.path}: not a GGUF file (shorter than its header)")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.tensors = self._read()
        except (struct.error, IndexError, UnicodeDecodeError, ArithmeticError) as error:
            raise ModelError(f"{self.path}: damaged or cut-off GGUF file ({error})") from error

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default`; an array as a new list.

        Raises:
            ModelError: text that is not UTF-8.
        """
        try:
            return self._value(self._spans[key][0])[0] if key in self._spans else default
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: damaged GGUF file: {key} ({error})") from error

    def __contains__(self, key: str) -> bool:
        return key in self._spans

    def raw(self, tensor: GGUFTensor, num_bytes: int) -> memoryview:
        """The stored bytes of a tensor, without a copy."""
        if tensor.offset + num_bytes > len(self._bytes):
            raise ModelError(
                f"{self.path}: tensor {tensor.name!r} reaches past the end of the file; it is cut off"
            )
        return memoryview(self._bytes)[tensor.offset : tensor.offset + num_bytes]

    def forget(self) -> None:
        """Let the operating system drop the pages read so far from this process's memory."""
        if hasattr(self._bytes, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def content_hash(self, prefix: str, without: Sequence[str] = ()) -> str:
        """sha256 of the stored bytes of all keys that begin with `prefix`, in sorted order."""
        digest = hashlib.sha256()
        for key in sorted(self._spans):
            if key.startswith(prefix) and key not in without:
                begin, end = self._spans[key]
                digest.update(f"{key}:{end - begin}:".encode())
                digest.update(memoryview(self._bytes)[begin:end])
        return digest.hexdigest()

    def _read(self) -> dict[str, GGUFTensor]:
        data = self._bytes
        if data[:4] != MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (it begins with {bytes(data[:4])!r})")
        (version,) = _U32.unpack_from(data, 4)
        if version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {version} (or byte order) is not read; only 2 and 3 are"
            )
        num_tensors, num_values = struct.unpack_from("<QQ", data, 8)
        at = 24
        for _ in range(num_values):
            key, at = self._string(at)
            begin, at = at, self._end_of_value(at)
            self._spans[key] = (begin, at)
        directory = []
        for _ in range(num_tensors):
            name, at = self._string(at)
            (num_dims,) = _U32.unpack_from(data, at)
            shape = struct.unpack_from(f"<{num_dims}Q", data, at + 4)
            at += 4 + 8 * num_dims
            type_id, offset = struct.unpack_from("<IQ", data, at)
            at += 12
            directory.append((name, tuple(reversed(shape)), type_id, offset))
        alignment = self.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-at // alignment) * alignment
        return {
            name: GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in directory
        }

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._bytes, at)
        begin, end = at + 8, at + 8 + length
        if end > len(self._bytes):
            raise IndexError("a string reaches past the end")
        return self._bytes[begin:end].decode("utf-8"), end

    def _end_of_value(self, at: int) -> int:
        (kind,) = _U32.unpack_from(self._bytes, at)
        if kind != _ARRAY:
            return self._scalar(kind, at + 4)[1]
        item, count = struct.unpack_from("<IQ", self._bytes, at + 4)
        at += 16
        if item in _SCALARS:
            at += count * struct.calcsize("<" + _SCALARS[item])
        elif item == _STRING:
            # A vocabulary has 10^5 of them: a tight loop over local names.
            data, unpack = self._bytes, _U64.unpack_from
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        else:
            raise ModelError(f"{self.path}: arrays of value type {item} are not read")
        if at > len(self._bytes):
            raise IndexError("an array reaches past the end")
        return at

    def _value(self, at: int) -> tuple[Any, int]:
        (kind,) = _U32.unpack_from(self._bytes, at)
        if kind == _ARRAY:
            (item,) = _U32.unpack_from(self._bytes, at + 4)
            (count,) = _U64.unpack_from(self._bytes, at + 8)
            return self._array(item, count, at + 16)
        return self._scalar(kind, at + 4)

    def _scalar(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: unknown value type {kind}")
        layout = struct.Struct("<" + _SCALARS[kind])
        return layout.unpack_from(self._bytes, at)[0], at + layout.size

    def _array(self, kind: int, count: int, at: int) -> tuple[list[Any], int]:
        if kind != _STRING:
            layout = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack_from(layout, self._bytes, at)), at + struct.calcsize(layout)
        data, unpack = self._bytes, _U64.unpack_from
        strings = []
        for _ in range(count):
            begin = at + 8
            at = begin + unpack(data, at)[0]
            strings.append(data[begin:at].decode("utf-8"))
        return strings, at
