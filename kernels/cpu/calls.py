"""Calls: operations of the library, run at once, or put on a tape while a program is recorded."""

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.cpu.library import Library
from batchgen.kernels.program import Program, StepSizes

# As in op.h.
OP_FIELDS, STEP_SIZES = 24, 8
NO_MEMORY = -4
_STEP = struct.Struct(f"={STEP_SIZES + 4}q")

Field = Tensor | int | float | None


class Operation:
    """A kernel of the library, and how its arguments are packed.

    Args:
        name: in the table of kernels.h.
        fields: a letter for each member of the kernel's struct: p pointer (a tensor, an address or None),
            n number, s number of rows that may differ from step to step, d floating-point number.
        errors: words for the codes that it fails with, unless a call brings its own.
        door: the operation of `Kernels` that it serves, if that has another name.
    """

    def __init__(
        self, name: str, fields: str, errors: Mapping[int, str] | None = None, door: str | None = None
    ):
        if len(fields) >= OP_FIELDS:
            raise ValueError(f"{name}: an operation has room for {OP_FIELDS - 1} fields")
        self.name, self.door, self.fields, self.errors = name, door or name, fields, dict(errors or {})
        letters = "".join("d" if letter == "d" else "q" for letter in fields)
        self.pack = struct.Struct(f"=q{letters}{8 * (OP_FIELDS - 1 - len(fields))}x").pack

    def failure(self, code: int, says: str) -> KernelError:
        """The error of a code."""
        if code == NO_MEMORY:
            says = "out of memory for scratch space"
        return KernelError(f"{self.door}: {self.errors.get(code) or says or f'error {code}'}")


@dataclass(slots=True)
class Tape:
    """What is recorded: operations, and all tensors whose addresses they hold.

    `notes` are a kernel's own, for what belongs to one recording (such as a plan that several calls share).
    """

    sizes: dict[int, int]  # rows of the placeholders -> the code of the size in op.h
    records: list[bytes] = field(default_factory=list)
    operations: list[tuple[Operation, str]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)
    notes: dict[object, object] = field(default_factory=dict)


class _Recording(threading.local):
    tape: Tape | None = None


class Calls:
    """A library, and whether this thread is recording."""

    def __init__(self, library: Library):
        self.library = library
        self._recording = _Recording()

    @property
    def tape(self) -> Tape | None:
        """What this thread is recording to; None: operations run at once."""
        return self._recording.tape

    def __call__(self, operation: Operation, *fields: Field, says: str = "") -> None:
        """Run one operation, or record it.

        Args:
            operation: which.
            fields: its arguments.
            says: what an error means.

        Raises:
            KernelError: it failed.
        """
        if self._recording.tape is not None:
            self._record(self._recording.tape, operation, fields, says)
            return
        record = operation.pack(self.library.kinds[operation.name], *map(_plain, fields))
        code = self.library.run_once(record, 1, torch.get_num_threads())
        if code:
            raise operation.failure(code, says)

    def together(self, calls: Sequence[tuple[Operation, tuple[Field, ...]]], says: str = "") -> None:
        """Run several operations one after the other in one go, or record them."""
        tape = self._recording.tape
        if tape is not None:
            for operation, fields in calls:
                self._record(tape, operation, fields, says)
            return
        kinds = self.library.kinds
        records = b"".join(
            operation.pack(kinds[operation.name], *map(_plain, fields)) for operation, fields in calls
        )
        code = self.library.run_once(records, len(calls), torch.get_num_threads())
        if code:
            raise calls[-1][0].failure(code, says)

    def start(self, sizes: StepSizes) -> Tape:
        """Record from here on; the sizes are those of the placeholders that operations will be given."""
        if self._recording.tape is not None:
            raise KernelError("a program is being recorded already")
        codes = {size: -1 - place for place, size in enumerate(sizes.in_order())}
        if len(codes) != len(sizes.in_order()):
            raise KernelError(f"sizes to be told apart must differ; got {sizes}")
        tape = self._recording.tape = Tape(codes)
        return tape

    def stop(self) -> None:
        """Record no more."""
        self._recording.tape = None

    def _record(self, tape: Tape, operation: Operation, fields: Sequence[Field], says: str) -> None:
        values: list[int | float] = []
        for letter, value in zip(operation.fields, fields, strict=True):
            plain = _plain(value)
            if letter == "s":
                if plain not in tape.sizes:
                    raise KernelError(f"{operation.name}: {plain} rows are none of a step's {tape.sizes}")
                plain = tape.sizes[int(plain)]
            values.append(plain)
        tape.kept += [value for value in fields if isinstance(value, Tensor)]
        tape.records.append(operation.pack(self.library.kinds[operation.name], *values))
        tape.operations.append((operation, says))


def _plain(value: Field) -> int | float:
    if value is None:
        return 0
    return value.data_ptr() if isinstance(value, Tensor) else value


class CpuProgram(Program):
    """A tape, ready to run."""

    def __init__(self, library: Library, tape: Tape):
        self._library, self._tape = library, tape
        self._count = len(tape.records)
        self._ops = ctypes.create_string_buffer(b"".join(tape.records))
        self._step = ctypes.create_string_buffer(_STEP.size)
        self._seconds: ctypes.Array[ctypes.c_double] | None = None
        self._runs = 0

    @override
    def run(self, sizes: StepSizes) -> None:
        in_order = sizes.in_order()
        seconds = 0 if self._seconds is None else ctypes.addressof(self._seconds)
        unused = (0,) * (STEP_SIZES - len(in_order))
        _STEP.pack_into(self._step, 0, *in_order, *unused, 0, 0, 0, seconds)
        code = self._library.run(self._ops, self._count, self._step, torch.get_num_threads())
        self._runs += 1
        if code:
            at = _STEP.unpack_from(self._step)[STEP_SIZES + 1]
            operation, says = self._tape.operations[at]
            raise operation.failure(code, says)

    @override
    def measure(self) -> None:
        self._seconds = (ctypes.c_double * len(self._library.kinds))()

    @override
    def profile(self) -> dict[str, float]:
        if self._seconds is None:
            return {}
        spent = zip(self._library.kinds, self._seconds, strict=True)
        return {name: seconds for name, seconds in spent if seconds}
