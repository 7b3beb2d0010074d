"""JSON values into Arrow columns of a fixed schema: nothing lost in silence, every misfit named."""

import json
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

_NONE = type(None)
# Python types that pyarrow puts into a column of that type without changing any value.
_EXACT: dict[Any, frozenset[type]] = {
    pa.string(): frozenset({str, _NONE}),
    pa.large_string(): frozenset({str, _NONE}),
    pa.int64(): frozenset({int, _NONE}),
    pa.float64(): frozenset({float, _NONE}),
    pa.bool_(): frozenset({bool, _NONE}),
}
_MANTISSA_BITS = {16: 11, 32: 24, 64: 53}
_MAX_SHOWN = 60


class Misfit(Exception):
    """A value that its column's type cannot hold; says where in the column."""

    def __init__(self, value: Any, kind: Any, path: str = ""):
        super().__init__(path)
        self.value, self.kind, self.path = value, kind, path

    def describe(self, column: str) -> str:
        """Column, value and type in words."""
        shown = to_json(self.value)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
        if self.kind is None:
            return f"column {column + self.path!r} ({shown}) is not in the schema; declare it in input.schema"
        return f"column {column + self.path!r}: {shown} is not {self.kind}"


def to_json(value: Any) -> str:
    """Compact JSON text, all characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def make_column(
    values: list[Any],
    kind: Any,
    on_misfit: Callable[[int, Misfit], None],
    on_json_text: Callable[[int], None],
) -> Any:
    """An Arrow array of JSON values.

    Args:
        values: one a row, as `json.loads` gives them, without lone surrogates.
        kind: the column's type.
        on_misfit: told of each row whose value does not fit; that row becomes null.
        on_json_text: told of each row of a text column whose value is no text; it is stored as JSON text.
    """
    exact = _EXACT.get(kind)
    if exact is not None and exact.issuperset(map(type, values)):
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, OverflowError):
            pass  # a whole number out of range; found below
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    cells: list[Any] = []
    for row, value in enumerate(values):
        if is_text and value is not None and not isinstance(value, str):
            cells.append(to_json(value))
            on_json_text(row)
            continue
        try:
            cells.append(fit(value, kind))
        except Misfit as misfit:
            cells.append(None)
            on_misfit(row, misfit)
    return pa.array(cells, kind)


def fit(value: Any, kind: Any) -> Any:
    """The value as pyarrow takes it for that type.

    Raises:
        Misfit: it would lose something.
    """
    if value is None:
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _need(value, kind, isinstance(value, str))
    if pa.types.is_boolean(kind):
        return _need(value, kind, isinstance(value, bool))
    if pa.types.is_integer(kind):
        return _fit_integer(value, kind)
    if pa.types.is_floating(kind):
        return _fit_float(value, kind)
    if pa.types.is_struct(kind):
        return _fit_struct(value, kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _need(value, kind, isinstance(value, list))
        return [_inside(each, kind.value_type, f"[{i}]") for i, each in enumerate(value)]
    return _fit_by_text(value, kind)


def _need(value: Any, kind: Any, is_right: bool) -> Any:
    if not is_right:
        raise Misfit(value, kind)
    return value


def _fit_integer(value: Any, kind: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    _need(value, kind, isinstance(value, int) and not isinstance(value, bool))
    low = -(1 << (kind.bit_width - 1)) if pa.types.is_signed_integer(kind) else 0
    return int(_need(value, kind, low <= value < low + (1 << kind.bit_width)))


def _fit_float(value: Any, kind: Any) -> float:
    if isinstance(value, float):
        return value
    # A whole number must survive; a fraction is rounded to the type, as everywhere.
    _need(value, kind, isinstance(value, int) and not isinstance(value, bool))
    return float(_need(value, kind, abs(value) <= 1 << _MANTISSA_BITS[kind.bit_width]))


def _fit_struct(value: Any, kind: Any) -> dict[str, Any]:
    _need(value, kind, isinstance(value, dict))
    fields = {field.name: field.type for field in kind}
    for key, each in value.items():
        if key not in fields and each is not None:
            raise Misfit(each, None, f".{key}")
    return {name: _inside(value.get(name), inner, f".{name}") for name, inner in fields.items()}


def _inside(value: Any, kind: Any, step: str) -> Any:
    try:
        return fit(value, kind)
    except Misfit as misfit:
        raise Misfit(misfit.value, misfit.kind, step + misfit.path) from None


def _fit_by_text(value: Any, kind: Any) -> Any:
    """Dates, timestamps and decimals, which JSON writes as text or numbers."""
    if pa.types.is_decimal(kind):
        _need(value, kind, isinstance(value, str | int | float) and not isinstance(value, bool))
        try:
            return pa.scalar(Decimal(str(value))).cast(kind).as_py()
        except (pa.ArrowException, InvalidOperation, ValueError):
            raise Misfit(value, kind) from None
    _need(value, kind, isinstance(value, str))
    try:
        scalar = pa.scalar(value).cast(kind)
    except pa.ArrowException:
        raise Misfit(value, kind) from None
    # As a count of units: Python's own datetime has no nanoseconds.
    return scalar.value if pa.types.is_timestamp(kind) else scalar.as_py()


def mend_surrogates(value: Any) -> Any:
    """The value with every lone surrogate replaced by U+FFFD; pairs are joined."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [mend_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {mend_surrogates(key): mend_surrogates(each) for key, each in value.items()}
    return value
