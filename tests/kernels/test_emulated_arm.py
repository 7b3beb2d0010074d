"""Every kernel on other processors: ARM under emulation, and paths this machine would not take by itself.

`emulation/driver.c` runs cases whose results the reference has computed; it needs no Python where it runs.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FOLDER = Path(__file__).parent / "emulation"


@pytest.fixture(scope="module")
def targets():
    """What run.py knows: its modules are no package."""
    sys.path.insert(0, str(FOLDER))
    try:
        from run import TARGETS
    finally:
        sys.path.remove(str(FOLDER))
    return TARGETS


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The file of all cases."""
    path = tmp_path_factory.mktemp("emulation") / "cases"
    subprocess.run([sys.executable, str(FOLDER / "write_cases.py"), str(path)], check=True)
    return path


NAMES = [
    "arm", "arm-dot-products", "x86", "x86-avx2", "x86-avx512", "x86-vnni", "x86-sanitizers", "x86-amx",
    "x86-amx-refused",
]  # fmt: skip


def test_all_targets_are_tested(targets):
    assert sorted(NAMES) == sorted(targets)


@pytest.fixture(scope="module")
def first_results():
    """Of the target that ran first: a line for each case, with a digest of its results."""
    return []


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_the_reference(name, targets, cases, first_results, tmp_path):
    target = targets[name]
    if missing := target.missing():
        pytest.skip(missing)
    try:
        target.compile(tmp_path / "driver")
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stdout)
    result = target.run(tmp_path / "driver", cases)
    lines = result.stdout.splitlines()
    wrong = [line for line in lines if not line.startswith("ok ")][1:-1]
    assert result.returncode == 0, "\n".join([*wrong, result.stderr])
    # That path and no other has run, and all cases to the end.
    assert lines[0].startswith(f"integers: {target.integers};")
    assert lines[-1].endswith(" cases, 0 failed")
    if target.is_fused:
        # All processors that round alike give the same bits.
        results = [re.sub(r"error .* allowed", "", line) for line in lines[1:]]
        assert results == (first_results or results)
        first_results[:] = results
