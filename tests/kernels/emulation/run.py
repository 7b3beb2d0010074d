"""Builds driver.c with the kernels for a processor and runs cases on it, emulated where it is another one.

    python run.py [TARGET ...]       by default all that this machine has compilers and emulators for

To try a machine without Python: `Target.compile` there or here, write_cases.py here, and `driver FILE` there.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transcript import CALLED

from batchgen.kernels.cpu import build

HERE = Path(__file__).resolve().parent
SOURCES = Path(build.__file__).resolve().parent
# The library's own flags but for the processor, as a program.
FLAGS = tuple(flag for flag in build.FLAGS if flag not in ("-march=native", "-fPIC", "-shared"))
WARNINGS = ("-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Target:
    """A way to build and run.

    Args:
        machine: that it is built for, as `platform.machine()` calls it.
        flags: of the compiler.
        integers: how the driver says that it multiplies integers.
        features: of the processor, as Linux calls them; not asked for where the machine is emulated.
        arguments: of the driver.
        is_fused: whether it multiplies and adds with one rounding.
    """

    machine: str
    flags: tuple[str, ...]
    integers: str
    features: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    is_fused: bool = True

    @property
    def compiler(self) -> str:
        """Of this machine, or one for the other."""
        return "gcc" if self.machine == platform.machine() else f"{self.machine}-linux-gnu-gcc"

    @property
    def emulator(self) -> tuple[str, ...]:
        """Empty for this machine."""
        if self.machine == platform.machine():
            return ()
        names = f"qemu-{self.machine}-static", f"qemu-{self.machine}"
        return (next(filter(shutil.which, names), names[0]),)

    def missing(self) -> str | None:
        """What is needed and not there."""
        for program in (self.compiler, *self.emulator):
            if not shutil.which(program):
                return f"{program} is not installed"
        lacking = self.features - set(build.cpu_features().replace("=", " ").replace(";", " ").split())
        if not self.emulator and lacking:
            return f"the processor lacks {', '.join(sorted(lacking))}"
        return None

    def compile(self, driver: Path) -> None:
        """Build the driver with all kernels.

        Raises:
            subprocess.CalledProcessError: the compiler refuses, or warns.
        """
        functions = " ".join(f"X({name})" for name in sorted(CALLED))
        # An emulated program would look for shared libraries among those of this machine.
        static = ("-static",) if self.emulator else ()
        command = [self.compiler, *FLAGS, *WARNINGS, *static, *self.flags, f"-I{SOURCES}"]
        command += [f"-DFUNCTIONS={functions}", "-o", str(driver), str(HERE / "driver.c")]
        subprocess.run(
            [*command, *map(str, sorted(SOURCES.glob("*.c"))), "-lm"],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, driver: Path, cases: Path) -> subprocess.CompletedProcess[str]:
        """Run all cases; the exit status is 0 if they are right."""
        return subprocess.run(
            [*self.emulator, str(driver), str(cases), *self.arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip


# Reading or writing past memory, and what C does not define, end the program.
_SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_V3 = frozenset({"avx2", "fma", "f16c"})
_V4 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
TARGETS = {
    "arm": Target("aarch64", ("-march=armv8-a",), "NEON"),
    "arm-dot-products": Target("aarch64", ("-march=armv8.2-a+dotprod+fp16",), "NEON dot products"),
    "x86": Target("x86_64", ("-march=x86-64",), "SSE2, 16 bits", is_fused=False),
    "x86-avx2": Target("x86_64", ("-march=x86-64-v3",), "AVX2, 16 bits", _V3),
    "x86-avx512": Target("x86_64", ("-march=x86-64-v4",), "AVX-512, 16 bits", _V4),
    "x86-vnni": Target("x86_64", ("-march=x86-64-v4", "-mavx512vnni"), "AVX-512 VNNI", _V4 | {"avx512_vnni"}),
    "x86-sanitizers": Target("x86_64", ("-march=x86-64-v3", *_SANITIZERS), "AVX2, 16 bits", _V3),
    "x86-amx": Target("x86_64", ("-march=sapphirerapids",), "AMX", _V4 | {"amx_int8", "avx512_fp16"}),
    "x86-amx-refused": Target(
        "x86_64", ("-march=sapphirerapids",), "AVX-512 VNNI", _V4 | {"avx512_fp16"}, ("--no-amx",)
    ),
}  # fmt: skip


def write_cases(cases: Path) -> None:
    """In a process of its own: it registers backends of its own."""
    subprocess.run([sys.executable, str(HERE / "write_cases.py"), str(cases)], check=True)


def main() -> int:
    """Run some targets one after the other."""
    names, failed = sys.argv[1:], False
    with tempfile.TemporaryDirectory() as folder:
        cases, driver = Path(folder) / "cases", Path(folder) / "driver"
        write_cases(cases)
        for name in names or [name for name, target in TARGETS.items() if target.missing() is None]:
            TARGETS[name].compile(driver)
            result = TARGETS[name].run(driver, cases)
            wrong = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
            print("\n".join([f"{name}: {result.stdout.splitlines()[-1]}", *wrong]), result.stderr)
            failed |= result.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
