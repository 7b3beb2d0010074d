"""Rows of Arrow batches picked and joined so that equal values always give equal bytes."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def take_rows(batch: pa.RecordBatch, offsets: Any) -> pa.RecordBatch:
    """The rows at these offsets, in this order, in canonical form.

    Values under nulls are zeroed, and dictionaries hold the values in use in the order of their first row.
    (Ordered dictionaries keep theirs, for there the order has a meaning.) Exceptions: list views, and string
    views and run-end encoding inside other types, keep their values but not always their bytes.

    Args:
        batch: where from.
        offsets: integers, a list or an array.
    """
    picked = pa.array(offsets, pa.int64())
    columns = [_canonical(_take(column, picked)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def join_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows, in order."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def sorted_metadata(schema: pa.Schema) -> pa.Schema:
    """The schema with its own and its fields' metadata in the order of their keys."""
    fields = [field.with_metadata(_sorted(field.metadata)) if field.metadata else field for field in schema]
    return pa.schema(fields, metadata=_sorted(schema.metadata))


def _sorted(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    return dict(sorted(metadata.items())) if metadata else None


def _take(array: Any, offsets: Any) -> Any:
    kind = array.type
    if (plain := _plain_type(kind)) is not None:
        return array.cast(plain).take(offsets).cast(kind)
    try:
        return array.take(offsets)
    except pa.ArrowNotImplementedError:
        rows = offsets.to_pylist()
        return pa.concat_arrays([array.slice(row, 1) for row in rows]) if rows else array.slice(0, 0)


def _plain_type(kind: Any) -> Any:
    """The type by way of which views are picked: Arrow has no `take` for them."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return None


def _canonical(array: Any) -> Any:
    """An array fresh from `take`, with its unordered dictionaries, nested ones too, in canonical form."""
    kind = array.type
    if not _holds_dictionary(kind):
        return array
    if pa.types.is_dictionary(kind):
        return _canonical_dictionary(array)
    if pa.types.is_struct(kind):
        children = [_canonical(array.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.ListArray if pa.types.is_list(kind) else pa.LargeListArray
        return make.from_arrays(array.offsets, _canonical(array.values), type=kind, mask=array.is_null())
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_canonical(array.values), type=kind, mask=array.is_null())
    if pa.types.is_map(kind):
        keys, items = _canonical(array.keys), _canonical(array.items)
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=kind, mask=array.is_null())
    return array


def _canonical_dictionary(array: Any) -> Any:
    kind = array.type
    if kind.ordered:
        return array
    try:
        encoded = array.dictionary_decode().dictionary_encode()
    except pa.ArrowNotImplementedError:
        return array
    return pa.DictionaryArray.from_arrays(pc.cast(encoded.indices, kind.index_type), encoded.dictionary)


def _holds_dictionary(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_holds_dictionary(kind.field(i).type) for i in range(kind.num_fields))
