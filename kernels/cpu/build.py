"""Compiles the C sources of this folder into a shared library, once per machine and version of them."""

import atexit
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from batchgen.errors import ConfigError

log = logging.getLogger("batchgen.kernels")
# A warning, so that who waits in Python sees why without setting a log up.
loading = logging.getLogger("batchgen.loading")

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-shared",
    # A fused multiply-add stands where the source says so, or bits would depend on inlining.
    "-ffp-contract=off",
    "-fno-math-errno",
)
_NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
# What the variable of this name may say, by machine -> flags that take wider instructions away. A processor
# that has none of these keeps what it has.
ISA_VARIABLE = "BATCHGEN_CPU_ISA"
ISA_CAPS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "sse2": ("-march=x86-64",),
        "avx2": ("-mno-avx512f", "-mno-avxvnni", *_NO_AMX),
        "avx512": _NO_AMX,
    },
    "aarch64": {"neon": ("-march=armv8-a",)},
}
COMPILERS = ("gcc", "cc")
COMPILE_TIMEOUT_S = 120
# What a process that compiles has not touched for so long, it has left behind.
_LEFT_OVER_AFTER_S = 3600.0


class BuildError(Exception):
    """The library cannot be built; the message says why."""


def library_path(cache_dir: Path | None = None, flags: Sequence[str] | None = None) -> Path:
    """Path of the compiled library, built if the cache lacks it.

    Processes may build at the same time: each compiles into a file of its own and renames it.

    Args:
        cache_dir: where libraries are kept; by default the user's cache folder. One that cannot hold them
            gives way to a temporary folder of this process.
        flags: flags of the compiler; by default those for this machine.

    Raises:
        BuildError: no compiler, or it fails, or there is no place for what it makes.
        ConfigError: BATCHGEN_CPU_ISA says what this machine does not know.
    """
    if flags is None:
        flags = machine_flags()
    compiler = find_compiler()
    stem = f"kernels-{build_key(compiler, flags)}"
    wanted = default_cache_dir() if cache_dir is None else cache_dir
    folder = _usable(wanted)
    for found in sorted(folder.glob(f"{stem}-*.so")):
        # Loading a file that was cut short, by a full disk or a crash, would kill the process.
        if found.stem == f"{stem}-{_content_hash(found)}":
            return found
        found.unlink(missing_ok=True)
    how_often = "once" if folder == wanted else "for this process"
    loading.warning("compiling the C kernels for this machine (%s, ten seconds or more)", how_often)
    return _compile(compiler, flags, folder, stem)


def default_cache_dir() -> Path:
    """The user's cache folder for compiled kernels, by the XDG rule."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "batchgen" / "kernels"


def isa_cap() -> str | None:
    """The widest instruction set that kernels may use, as BATCHGEN_CPU_ISA names it; None for all there are.

    Raises:
        ConfigError: this machine does not know it.
    """
    cap, known = os.environ.get(ISA_VARIABLE, ""), ISA_CAPS.get(platform.machine(), {})
    if cap and cap not in known:
        raise ConfigError(
            f"{ISA_VARIABLE} is {cap!r}; on {platform.machine()} it may be {', '.join(known) or 'nothing'}; "
            "leave it unset to use all that the processor has"
        )
    return cap or None


def machine_flags() -> tuple[str, ...]:
    """Flags for this machine, or for what BATCHGEN_CPU_ISA leaves of it.

    Raises:
        ConfigError: it says what this machine does not know.
    """
    cap = isa_cap()
    # The last -march counts.
    return FLAGS if cap is None else (*FLAGS, *ISA_CAPS[platform.machine()][cap])


def find_compiler() -> tuple[str, ...]:
    """The C compiler's full path, and what CC says beside its name.

    Raises:
        BuildError: there is none.
    """
    wish = shlex.split(os.environ.get("CC", ""))
    for name, *arguments in [wish] if wish else [[name] for name in COMPILERS]:
        found = shutil.which(name)
        if found:
            return found, *arguments
    if wish:
        raise BuildError(f"no C compiler: CC names {wish[0]!r}, which is not there; correct or unset CC")
    raise BuildError(f"no C compiler: none of {', '.join(COMPILERS)} is on the PATH; install gcc")


def build_key(compiler: tuple[str, ...], flags: Sequence[str]) -> str:
    """What the library depends on, as a hash: sources, compiler, flags, processor."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (_compiler_version(compiler), *compiler[1:], *flags, platform.machine(), cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


@cache
def cpu_features() -> str:
    """Model and instruction sets of the processor, as Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "flags",
        "Features",
        "CPU part",
        "CPU implementer",
    )
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found.setdefault(name.strip(), value.strip())
    return "; ".join(f"{name}={value}" for name, value in found.items())


@cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    command = [*compiler, "--version"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]} could not be run: {error}") from error
    return result.stdout


def _usable(folder: Path) -> Path:
    """The folder, or a temporary one if libraries cannot be written there or loaded from there."""
    trouble = _trouble(folder)
    if trouble is None:
        return folder
    other = Path(tempfile.mkdtemp(prefix="batchgen-kernels-"))
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    advice = "set XDG_CACHE_HOME to a folder that can be written and hold programs"
    if also := _trouble(other):
        raise BuildError(f"no place for the compiled kernels: {folder} {trouble}, {other} {also}; {advice}")
    log.warning("the C kernels are compiled anew by every process: %s %s; %s", folder, trouble, advice)
    return other


def _trouble(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    is_noexec = os.statvfs(folder).f_flag & os.ST_NOEXEC
    return "is mounted noexec, so that no program can be loaded from it" if is_noexec else None


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _compile(compiler: tuple[str, ...], flags: Sequence[str], folder: Path, stem: str) -> Path:
    """Compile into a file whose name carries the hash of its content; one rename publishes both.

    Sources are compiled side by side, the largest first: they take seconds each.
    """
    sources = sorted(Path(__file__).parent.glob("*.c"), key=lambda source: -source.stat().st_size)
    _remove_left_over(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=f"{stem}-", suffix=".tmp", dir=folder) as workshop:
            objects = [f"{workshop}/{source.stem}.o" for source in sources]
            commands = [
                [*compiler, *flags, "-c", "-o", target, str(source)]
                for source, target in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                list(pool.map(_run, commands))
            library = Path(workshop) / "library"
            _run([*compiler, *flags, "-o", str(library), *objects])
            target = folder / f"{stem}-{_content_hash(library)}.so"
            os.replace(library, target)
            return target
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]} could not be run: {error}") from error


def _remove_left_over(folder: Path) -> None:
    """Remove workshops of processes that were killed in the middle."""
    for workshop in folder.glob("kernels-*.tmp"):
        with suppress(OSError):
            if time.time() - workshop.stat().st_mtime > _LEFT_OVER_AFTER_S:
                shutil.rmtree(workshop)


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        said = [line for line in lines if "error" in line][:3] or lines[-3:]
        raise BuildError(f"{command[0]} failed with status {result.returncode}: {' | '.join(said)}")
