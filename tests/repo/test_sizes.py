"""Files and functions stay short enough to be read at once; whoever needs more says why here."""

import ast
from pathlib import Path

MOST_LINES_OF_A_FILE = 300
MOST_LINES_OF_A_TEST_FILE = 500
MOST_LINES_OF_A_FUNCTION = 65

LONG_FILES = {
    "batchgen/echo.py": "a whole engine: its clock, its queue and its pool know each other",
}
LONG_FUNCTIONS = {
    "batchgen/cli/generate.py:generate": "its signature is the command's options, one after the other",
    "kernels/gpu/attention.py:_attention_kernel": "one Triton kernel, a third of it arguments",
}


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_long_without_a_reason(sources: dict[str, Path]) -> None:
    long = {name for name, path in sources.items() if _num_lines(path) > MOST_LINES_OF_A_FILE}
    assert long == set(LONG_FILES), "split it by subject, or take it off the list if it is short again"


def test_no_test_file_is_long(repository: Path) -> None:
    paths = (repository / "tests").rglob("*.py")
    long = [str(path) for path in paths if _num_lines(path) > MOST_LINES_OF_A_TEST_FILE]
    assert long == []


def test_no_function_is_long_without_a_reason(sources: dict[str, Path]) -> None:
    long = {
        f"{name}:{node.name}"
        for name, path in sources.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    }
    assert long == set(LONG_FUNCTIONS), "split it, or take it off the list if it is short again"
