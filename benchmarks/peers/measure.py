"""Processor time, memory and idleness of this process, its children and the machine, read from /proc.

Where there is no /proc the answers are None: a run is then neither noisy nor quiet.
"""

import os
import time
from pathlib import Path

PROC = Path("/proc")
# Processor seconds a second that others may use while the machine still counts as idle, or a run as quiet.
IDLE, QUIET = 0.15, 0.1
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 0, 1, 2, 5, 6, 7


def here() -> bool:
    """Whether this machine can be asked at all."""
    return (PROC / "stat").is_file() and hasattr(os, "sysconf")


def tree() -> list[int]:
    """Ids of this process and of all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        fields = _stat(entry.name) if entry.name.isdigit() else None
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ids = [], [os.getpid()]
    while open_ids:
        pid = open_ids.pop()
        found.append(pid)
        open_ids += children.get(pid, [])
    return found


def own_cpu_s() -> float:
    """Processor seconds of the tree so far, its finished and waited-for children included."""
    stats = [fields for pid in tree() if (fields := _stat(str(pid)))]
    return sum(int(value) for fields in stats for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Processor seconds that anybody used since the machine started; what a host took away counts as used."""
    first = (PROC / "stat").read_text().splitlines()[0].split()[1:]
    used = sum(int(first[field]) for field in (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL))
    return used / os.sysconf("SC_CLK_TCK")


def forget_peaks() -> None:
    """Let the peak of each process of the tree begin again from what it holds now."""
    for pid in tree() if here() else []:
        try:
            (PROC / str(pid) / "clear_refs").write_text("5")
        except OSError:
            continue


def peak_mib() -> int | None:
    """Sum over the tree of each process's own peak of resident memory."""
    if not here():
        return None
    total_kib = 0
    for pid in tree():
        try:
            lines = (PROC / str(pid) / "status").read_text().splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return round(total_kib / 1024)


def wait_until_idle(limit_s: float) -> None:
    """Return once others leave the machine alone, or after `limit_s`."""
    end = time.monotonic() + limit_s
    while here() and time.monotonic() < end:
        watch = Watch()
        time.sleep(1.5)
        if (watch.others() or 0) < IDLE:
            return


class Watch:
    """What others used of the processor since this object was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._used = machine_cpu_s() - own_cpu_s() if here() else 0.0

    def others(self) -> float | None:
        """Processor seconds a second; None where it cannot be known."""
        if not here():
            return None
        used = machine_cpu_s() - own_cpu_s() - self._used
        return max(0.0, used / max(time.monotonic() - self._start, 1e-9))


def _stat(pid: str) -> list[str] | None:
    """Fields of /proc/PID/stat after the name: state, parent, ...; None if it has gone."""
    try:
        return (PROC / pid / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
