"""Transcript: calls of the C kernels written down with their data in place of being run.

`TranscriptBackend` is the cpu backend over a library that only takes notes. So the file holds what Python
passes to kernels, and none is described here.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import count
from pkgutil import iter_modules
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from batchgen.kernels import cpu as cpu_kernels
from batchgen.kernels.backend import BACKENDS, OPERATIONS, Choice, PackedLinear
from batchgen.kernels.cpu import CpuBackend
from batchgen.kernels.cpu.calls import OP_FIELDS, STEP_SIZES, Operation
from batchgen.kernels.cpu.library import _SIGNATURES, Library, load
from batchgen.kernels.cpu.lora import CpuLoraBank
from batchgen.kernels.lora import PackedLora
from batchgen.kernels.ops import Kernels

# As in driver.c.
MAGIC = b"BATCHGEN"
NUMBER, PLAN, THREADS = -1, -2, -3
RUN, CALL, EXPECT, SAME, END = range(5)
TYPES = {
    torch.float32: 0, torch.float64: 1, torch.int8: 2, torch.int32: 3, torch.int64: 4, torch.bool: 5
}  # fmt: skip
# A panel of every build's width divides it, so that buffers suit all.
WIDEST_PANEL = 32
# Functions of the library that the driver calls by name. Others answer at once, or measure.
CALLED = frozenset(_SIGNATURES) - {
    "bg_panel", "bg_run", "bg_run_once", "bg_attention_plan_new", "bg_attention_plan_free", "bg_int8_use_amx",
    "bg_int8_bytes", "bg_int8_is_fast", "bg_ceilings", "bg_lora_has_integers",
}  # fmt: skip
_PLANS = 1 << 62  # where made-up addresses of plans begin
_RECORD = struct.Struct(f"={OP_FIELDS}q")


class Special(NamedTuple):
    """An argument that is a number, a plan, or how many threads there are."""

    base: int
    value: int


class Address(NamedTuple):
    """An argument that points into a tensor of this process."""

    value: int


# A part of a step is written as what it is; an argument as where it points or what it stands for.
Part = int | float | str | bytes | Special | Address


class NotingLibrary(Library):
    """A stand-in for Library: what it is asked to do goes into the transcript."""

    panel = WIDEST_PANEL
    # Only builds with AMX know them, and the cases are for all.
    lora_has_integers = False

    def __init__(self, transcript: "Transcript"):
        real = load()
        assert not isinstance(real, str), real
        self.kinds, self.int8_bytes = real.kinds, real.int8_bytes
        self._transcript, self._names = transcript, list(real.kinds)
        self._plans = count()
        self._operations = _operations()

    def attention_plan_new(self) -> int:
        return _PLANS + next(self._plans)

    def attention_plan_free(self, _plan: int) -> None:
        return None

    def run_once(self, records: bytes, number: int, _threads: int) -> int:
        return self.run(records, number, bytes(8 * STEP_SIZES), _threads)

    def run(self, records: Any, number: int, step: Any, _threads: int) -> int:
        sizes = struct.unpack_from(f"={STEP_SIZES}q", _raw(step))
        parts: list[Part] = [*sizes, number]
        for place in range(number):
            kind, *values = _RECORD.unpack_from(_raw(records), place * _RECORD.size)
            operation = self._operations[self._names[kind]]
            letters = operation.fields.ljust(len(values), "n")
            parts += [operation.name, *_arguments(letters, values)]
            self._transcript.used.add(operation.name)
        self._transcript.add(RUN, *parts)
        return 0

    def round_groups(self, *values: int | None) -> int:
        """It says that it had memory."""
        return 1 + self.__getattr__("round_groups")(*values)

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Any other function of the library, by its signature."""
        symbol = f"bg_{name}"
        letters = _SIGNATURES[symbol].split(":")[0]

        def note(*values: int | None) -> int:
            arguments = _arguments(letters, [value or 0 for value in values])
            self._transcript.add(CALL, symbol, len(arguments), *arguments)
            self._transcript.used.add(symbol)
            return 0

        return note


class TranscriptBackend(CpuBackend):
    """The cpu backend, writing down."""

    def __init__(self, transcript: "Transcript"):
        super().__init__()
        self.__dict__["library"] = NotingLibrary(transcript)
        self._transcript = transcript

    def record(self, build, sizes):
        program = super().record(build, sizes)
        self._transcript.know(program._tape.kept)  # memory that recorded operations took for themselves
        return program


class Transcript:
    """The calls of one case, and the tensors that they work on.

    A tensor's content is taken down when the case is written: nobody may change one between calls.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._tensors: list[Tensor] = []
        self.used: set[str] = set()  # kernels, and functions of the library

    def kernels(self) -> Any:
        """Kernels whose calls go into the transcript."""
        name = f"transcript-{id(self)}"
        backend = TranscriptBackend(self)
        BACKENDS.register(name)(backend)
        choices = {op: Choice(name, "written down") for op in OPERATIONS}
        # The plan that calls of this thread share belongs to one library.
        cpu_kernels.attention._MINE.plan = None
        return _Watched(Kernels(choices, dtype="float32", device="cpu"), self, backend.library)

    def shown(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function, made to show what it allocates: kernels' own memory is seen nowhere else."""

        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            self.know(tensor)
            return tensor

        return allocated

    def know(self, value: object) -> None:
        """Remember all tensors in a value: addresses will be looked up in them."""
        if isinstance(value, Tensor):
            self._tensors.append(value)
        elif isinstance(value, PackedLinear | PackedLora):
            self.know(value.tensors())
        elif isinstance(value, CpuLoraBank):
            self.know([value.table, value.columns])
        elif isinstance(value, list | tuple):
            for each in value:
                self.know(each)
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                self.know(getattr(value, field.name))

    def add(self, *parts: Part) -> None:
        """Add a step."""
        self._parts += parts

    def expect(self, name: str, result: Tensor, expected: Tensor, tolerance: float) -> None:
        """Add that a result must be what is expected."""
        self.know(result)
        assert result.is_contiguous(), f"{name}: only contiguous results are compared"
        assert result.shape == expected.shape, f"{name}: {result.shape} for {expected.shape}"
        values = expected.to(torch.float64).numpy().tobytes()
        where = Address(result.data_ptr())
        self.add(EXPECT, name, where, TYPES[result.dtype], result.numel(), float(tolerance), values)

    def same(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add that two results must be the same bytes."""
        self.know([left, right])
        assert left.is_contiguous() and right.is_contiguous() and left.shape == right.shape
        addresses = Address(left.data_ptr()), Address(right.data_ptr())
        self.add(SAME, name, *addresses, left.numel() * left.element_size())

    def write(self, name: str, file: BinaryIO) -> None:
        """Append the case to a file."""
        spans = _spans(self._tensors)
        used = sorted({_begin(spans, part.value) for part in self._parts if isinstance(part, Address)})
        num_plans = 1 + max(
            (part.value for part in self._parts if isinstance(part, Special) and part.base == PLAN),
            default=-1,
        )
        out: list[Part] = [name, len(used)]
        for begin in used:
            out += _buffer(ctypes.string_at(begin, spans[begin] - begin))
        out.append(num_plans)
        for part in self._parts:
            if isinstance(part, Address):
                begin = _begin(spans, part.value)
                out += [used.index(begin), part.value - begin]
            else:
                out.append(part)
        out.append(END)
        for part in out:
            file.write(_encoded(part))


class _Watched:
    """Passes calls on, and knows the tensors that go in and come out."""

    def __init__(self, kernels: Kernels, transcript: Transcript, library: Library):
        self._kernels, self._transcript = kernels, transcript
        self.library, self.know = library, transcript.know

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._transcript.know([*args, *kwargs.values()])
            result = found(*args, **kwargs)
            self._transcript.know(result)
            return result

        return call


def _arguments(letters: str, values: Sequence[int]) -> list[Special | Address]:
    """What each value stands for, by its letter in a signature."""
    found: list[Special | Address] = []
    for letter, value in zip(letters, values, strict=True):
        if letter == "i":
            found.append(Special(THREADS, 0))
        elif letter == "p" and value >= _PLANS:
            found.append(Special(PLAN, value - _PLANS))
        elif letter == "p" and value:
            found.append(Address(value))
        else:
            found.append(Special(NUMBER, value))
    return found


def _encoded(part: Part) -> bytes:
    if isinstance(part, Special):
        return struct.pack("=2q", *part)
    if isinstance(part, float):
        return struct.pack("=d", part)
    if isinstance(part, bytes):
        return part + bytes(-len(part) % 8)
    if isinstance(part, str):
        return _encoded(len(part.encode())) + _encoded(part.encode())
    assert isinstance(part, int)
    return struct.pack("=q", part)


def _buffer(data: bytes) -> list[Part]:
    """Its size, and its content; of four bytes over and over only those."""
    is_filled = len(data) >= 4 and data == (data[:4] * (len(data) // 4 + 1))[: len(data)]
    return [len(data), is_filled, data[:4] if is_filled else data]


def _spans(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Where memory begins and ends that tensors look at: those of one storage together."""
    found: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            begin = tensor.data_ptr()
            end = begin + (last + 1) * tensor.element_size()
            key = tensor.untyped_storage().data_ptr()
            before = found.get(key, (begin, end))
            found[key] = min(begin, before[0]), max(end, before[1])
    return dict(sorted(found.values()))


def _begin(spans: dict[int, int], address: int) -> int:
    for begin, end in spans.items():
        if begin <= address < end:
            return begin
    raise AssertionError(f"address {address:#x} lies in no tensor that the case has shown")


def _operations() -> dict[str, Operation]:
    """All operations that modules of the cpu backend declare, by the name of their kernel."""
    names = [module.name for module in iter_modules(cpu_kernels.__path__, f"{cpu_kernels.__name__}.")]
    modules = [import_module(name) for name in names]
    declared = [value for module in modules for value in vars(module).values()]
    declared += [each for value in declared if isinstance(value, tuple) for each in value]
    return {value.name: value for value in declared if isinstance(value, Operation)}


def _raw(data: Any) -> bytes:
    return data if isinstance(data, bytes) else data.raw
