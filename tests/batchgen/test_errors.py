import inspect
import re

import pytest

from batchgen import errors


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    lines = re.findall(r"^( *)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    path: list[str] = []
    drawn = {}
    for indent, name in lines:
        path = [*path[: len(indent) // 4], name]
        drawn[name] = path[-2] if len(path) > 1 else "Exception"
    real = {
        name: cls.__mro__[1].__name__
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, Exception)
    }
    assert drawn == real


@pytest.mark.parametrize(
    ("name", "nearest"), [("temprature", "temperature"), ("TOP_P", "top_p"), ("zzz", None), ("", None)]
)
def test_nearest(name: str, nearest: str | None) -> None:
    assert errors.nearest(name, ["temperature", "top_p", "seed"]) == nearest


def test_unknown_name_without_a_near_one_lists_what_there_is() -> None:
    error = errors.UnknownNameError("format", "zzz", ["csv", "arrow"], "job.yaml:3")
    assert str(error) == "job.yaml:3: unknown format 'zzz'; known: arrow, csv"
    assert (error.name, error.nearest, error.known) == ("zzz", None, ["arrow", "csv"])
