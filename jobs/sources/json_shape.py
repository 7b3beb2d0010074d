"""The shape of JSON values seen so far, and the Arrow type that holds them all.

A shape is None (only nulls seen), "bool", "string", "mixed", or one of the classes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

# Objects with more different keys than this are dictionaries rather than records; they are kept as JSON text.
MAX_STRUCT_FIELDS = 1000
# Values nested deeper than this are kept as JSON text: Arrow reads no file whose types are nested beyond 64.
MAX_TYPE_DEPTH = 32
_EXACT_IN_DOUBLE = 2**53
_PLAIN = {"bool": pa.bool_(), "string": pa.string()}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers within a range; whole ones only unless `has_fractions`."""

    low: int
    high: int
    has_fractions: bool


@dataclass(frozen=True, slots=True)
class ListOf:
    """Arrays, and the shape of all their items."""

    item: Shape


@dataclass(frozen=True, slots=True)
class StructOf:
    """Objects, and the shape under each of their keys."""

    fields: dict[str, Shape]


Shape = None | str | Numbers | ListOf | StructOf


def shape_of(value: Any, depth: int = 0) -> Shape:
    """The shape of one value as `json.loads` gives it, which stands so deep inside another."""
    if value is None:
        return None
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return Numbers(value, value, has_fractions=False)
    if isinstance(value, float):
        return Numbers(0, 0, has_fractions=True)
    if depth >= MAX_TYPE_DEPTH:
        return "mixed"
    if isinstance(value, list):
        item: Shape = None
        for each in value:
            item = join_shapes(item, shape_of(each, depth + 1))
        return ListOf(item)
    return _bounded({key: shape_of(each, depth + 1) for key, each in value.items()})


def join_shapes(left: Shape, right: Shape) -> Shape:
    """The shape of values of either shape; "mixed" when they are of different kinds."""
    if left == right or right is None:
        return left
    if left is None:
        return right
    if isinstance(left, Numbers) and isinstance(right, Numbers):
        fractions = left.has_fractions or right.has_fractions
        return Numbers(min(left.low, right.low), max(left.high, right.high), fractions)
    if isinstance(left, ListOf) and isinstance(right, ListOf):
        return ListOf(join_shapes(left.item, right.item))
    if isinstance(left, StructOf) and isinstance(right, StructOf):
        fields = dict(left.fields)
        for key, shape in right.fields.items():
            fields[key] = join_shapes(fields.get(key), shape)
        return _bounded(fields)
    return "mixed"


def _bounded(fields: dict[str, Shape]) -> Shape:
    return StructOf(fields) if len(fields) <= MAX_STRUCT_FIELDS else "mixed"


def arrow_type(shape: Shape) -> Any:
    """The Arrow type of a column of that shape: null where only nulls were seen.

    Returns: string, for JSON text, when no type holds all values as they are: those of mixed kinds at any
    depth, numbers beyond every type, and objects without keys or with very many.
    """
    kind = _exact_type(shape)
    return pa.string() if kind is None else kind


def _exact_type(shape: Shape) -> Any:
    if shape is None:
        return pa.null()
    if isinstance(shape, str):
        return _PLAIN.get(shape)
    if isinstance(shape, Numbers):
        return _number_type(shape)
    if isinstance(shape, ListOf):
        item = _exact_type(shape.item)
        return None if item is None else pa.list_(item)
    fields = {name: _exact_type(field) for name, field in shape.fields.items()}
    if not fields or None in fields.values():
        return None
    return pa.struct(list(fields.items()))


def _number_type(shape: Numbers) -> Any:
    if shape.has_fractions:
        return pa.float64() if max(-shape.low, shape.high) <= _EXACT_IN_DOUBLE else None
    if max(-shape.low - 1, shape.high) < 2**63:
        return pa.int64()
    return pa.uint64() if shape.low >= 0 and shape.high < 2**64 else None


def nulls_as_text(kind: Any) -> Any:
    """The type with string wherever only nulls were seen."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(nulls_as_text(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(nulls_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(nulls_as_text(field.type)) for field in kind])
    return kind
