import pytest

from batchgen.quantities import counted, duration


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (2000, "2,000 rows")]
)
def test_one_thing_is_no_plural(number: int, text: str) -> None:
    assert counted(number, "row") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.4, "0s"), (59, "59s"), (61, "1m01s"), (7500, "2h05m"), (3 * 86400 + 4 * 3600, "3d04h")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
