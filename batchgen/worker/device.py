"""What this machine has: device, threads, memory. Asked once, at start."""

import ctypes
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from batchgen.errors import DeviceError
from batchgen.kernels.cpu.build import isa_cap
from batchgen.version import __version__

_CGROUP = Path("/sys/fs/cgroup")
# glibc's parameters (malloc.h): from which size memory is asked of the system for itself, and up to how much
# that is free is kept. Afterwards: the most that glibc learns by itself.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_KEPT_WHILE_LOADING, _KEPT_AFTERWARDS = 256 << 10, 32 << 20


def pick_device(wanted: str) -> tuple[torch.device, str]:
    """The device to run on, and why.

    Raises:
        DeviceError: "cuda" was asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise DeviceError("device: cuda was asked for, but torch sees no CUDA device here; use device: cpu")
    if wanted != "auto":
        return torch.device(wanted), "as set"
    if has_cuda:
        return torch.device("cuda"), "a CUDA device is there"
    return torch.device("cpu"), "torch sees no CUDA device"


def cpu_threads() -> tuple[int, str]:
    """How many threads to compute with, and why: torch's own number, but never more than the CPUs allowed."""
    threads = torch.get_num_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    if quota is not None and quota < min(threads, allowed):
        return max(1, math.ceil(quota)), f"the container may use {quota:g} CPUs"
    if allowed < threads:
        return allowed, f"the process may use {allowed} CPUs"
    return threads, "torch's choice"


def available_memory() -> int:
    """Bytes that this process can still take: of the machine, and of its cgroup where that has a limit."""
    available = _meminfo("MemAvailable")
    limit = _read_number(_CGROUP / "memory.max")
    used = _read_number(_CGROUP / "memory.current")
    if limit is None:
        limit = _read_number(_CGROUP / "memory" / "memory.limit_in_bytes")
        used = _read_number(_CGROUP / "memory" / "memory.usage_in_bytes")
    if limit is not None and used is not None:
        # Page cache counts as used but is given back under pressure.
        available = min(available, limit - used + _inactive_file())
    return max(0, available)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on a device."""
    if device.type == "cpu":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch holds without using it is free as well.
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def is_host(device: torch.device) -> bool:
    """Whether the device's memory is that of the host."""
    return device.type == "cpu"


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hand_back_memory() -> None:
    """Hand freed memory on to the operating system, where an allocator would keep it for itself."""
    torch.cuda.empty_cache()  # does nothing without a GPU in use
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)


@contextmanager
def frugal_memory() -> Iterator[None]:
    """Within it freed memory goes back to the operating system at once, where glibc would keep it.

    Its allocator learns from each tensor that is freed to keep the next ones of that size, in pieces that do
    not fit later: the way of a model's weights would take as much as the model. Afterwards it keeps them, as
    it would have learned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None

    def keep_below(num_bytes: int) -> None:
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, num_bytes)
            mallopt(_TRIM_THRESHOLD, 2 * num_bytes)

    keep_below(_KEPT_WHILE_LOADING)
    try:
        yield
    finally:
        keep_below(_KEPT_AFTERWARDS)


def environment(
    device: torch.device, dtype: str, quantization: str | None, kv_dtype: str, backends: str
) -> dict[str, str]:
    """What the bytes of a result may depend on, as text."""
    described = {
        "batchgen": __version__,
        # The plain text: a TorchVersion would have whoever unpickles it import torch.
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": str(device),
        "dtype": dtype,
        "quantization": quantization or "none",
        "kv_cache_dtype": kv_dtype,
        "kernels": backends,
        "threads": str(torch.get_num_threads()),
        "instruction_set": _instruction_set(),
        "machine": platform.machine(),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def _instruction_set() -> str:
    widest, cap = torch.backends.cpu.get_cpu_capability(), isa_cap()
    return widest if cap is None else f"{widest}, kernels up to {cap}"


def _meminfo(key: str) -> int:
    path = Path("/proc/meminfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def _inactive_file() -> int:
    for path in (_CGROUP / "memory.stat", _CGROUP / "memory" / "memory.stat"):
        if path.is_file():
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "total_inactive_file"):
                    return int(value)
    return 0


def _cpu_quota() -> float | None:
    path = _CGROUP / "cpu.max"
    if path.is_file():
        quota, _, period = path.read_text().strip().partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us = _read_number(_CGROUP / "cpu" / "cpu.cfs_quota_us")
    period_us = _read_number(_CGROUP / "cpu" / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.lstrip("-").isdigit() else None
