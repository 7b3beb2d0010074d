"""Compiles the C sources of this folder into a shared library, once per machine and version of them."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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
COMPILERS = ("gcc", "cc")
COMPILE_TIMEOUT_S = 120


class BuildError(Exception):
    """The library cannot be built; the message says why."""


def library_path(cache_dir: Path | None = None, flags: Sequence[str] = FLAGS) -> Path:
    """Path of the compiled library, built if the cache lacks it.

    Processes may build at the same time: each compiles into a file of its own and renames it.

    Args:
        cache_dir: where libraries are kept; by default the user's cache folder, or a fresh temporary
            folder if that cannot be written.
        flags: flags of the compiler.

    Raises:
        BuildError: no compiler, or it fails.
    """
    compiler = find_compiler()
    stem = f"kernels-{build_key(compiler, flags)}"
    folder = _writable(default_cache_dir() if cache_dir is None else cache_dir)
    for found in sorted(folder.glob(f"{stem}-*.so")):
        # Loading a file that was cut short, by a full disk or a crash, would kill the process.
        if found.stem == f"{stem}-{_content_hash(found)}":
            return found
        found.unlink(missing_ok=True)
    return _compile(compiler, flags, folder, stem)


def default_cache_dir() -> Path:
    """The user's cache folder for compiled kernels, by the XDG rule."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "batchgen" / "kernels"


def find_compiler() -> str:
    """Full path of the C compiler.

    Raises:
        BuildError: there is none.
    """
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C compiler: none of {', '.join(COMPILERS)} is on the PATH; install gcc")


def build_key(compiler: str, flags: Sequence[str]) -> str:
    """What the library depends on, as a hash: sources, compiler, flags, processor."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (_compiler_version(compiler), *flags, platform.machine(), cpu_features()):
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
def _compiler_version(compiler: str) -> str:
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return result.stdout


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="batchgen-kernels-"))


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _compile(compiler: str, flags: Sequence[str], folder: Path, stem: str) -> Path:
    """Compile into a file whose name carries the hash of its content; one rename publishes both."""
    sources = sorted(Path(__file__).parent.glob("*.c"))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{stem}-", suffix=".tmp")
    os.close(handle)
    command = [compiler, *flags, "-o", temporary, *map(str, sources)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S
        )
        if result.returncode != 0:
            last = result.stderr.strip().splitlines()[-3:]
            raise BuildError(f"{compiler} failed with status {result.returncode}: {' | '.join(last)}")
        target = folder / f"{stem}-{_content_hash(Path(temporary))}.so"
        os.replace(temporary, target)
        return target
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} could not be run: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
