"""The cpu backend: plain C with OpenMP, compiled at first use for the machine's own vectors."""

from batchgen.kernels.backend import BACKENDS
from batchgen.kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]

BACKENDS.register("cpu")(CpuBackend())
