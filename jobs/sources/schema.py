"""Schemas of several files joined without loss, and the checks that a schema must pass."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError, nearest

_HUGGINGFACE = b"huggingface"


def join_schemas(schemas: Sequence[pa.Schema], names: Sequence[str], *, as_json: bool = False) -> pa.Schema:
    """One schema that holds the rows of all files without loss; columns in the order of their first file.

    Joined are: null with anything; integers of any width that a signed or unsigned 64-bit one holds; text,
    binary and lists of any offset width; a dictionary with its value type; structs by the union of fields.

    Args:
        schemas: one of each file.
        names: the files' names, for messages.
        as_json: whether a column may be missing in some files, and whole numbers join with fractions.

    Raises:
        SourceError: types that cannot be joined, or a column that only some files have.
    """
    if not as_json:
        _refuse_lacking(schemas, names)
    joined: dict[str, pa.Field] = {}
    origin: dict[str, str] = {}
    for schema, name in zip(schemas, names, strict=True):
        for field in schema:
            known = joined.setdefault(field.name, field)
            origin.setdefault(field.name, name)
            if known is field:
                continue
            kind = join_types(known.type, field.type, as_json=as_json)
            if kind is None:
                raise SourceError(
                    f"column {field.name!r} is {known.type} in {origin[field.name]} but {field.type} in "
                    f"{name}, which cannot be joined without loss; convert one of the files, or leave the "
                    f"column out (input.columns)"
                )
            if kind != known.type:
                origin[field.name] = name
            joined[field.name] = known.with_type(kind).with_nullable(known.nullable or field.nullable)
    return pa.schema(list(joined.values()), metadata=_shared_features(schemas))


def join_types(left: Any, right: Any, *, as_json: bool = False) -> Any:
    """The narrowest type that holds the values of both without loss, or None.

    Args:
        left: a type.
        right: another.
        as_json: whether whole numbers join with fractions; one that a double cannot hold then fails its row.
    """
    if left.equals(right) or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    if pa.types.is_dictionary(left):
        plain = right.value_type if pa.types.is_dictionary(right) else right
        return join_types(left.value_type, plain, as_json=as_json)
    if pa.types.is_dictionary(right):
        return join_types(left, right.value_type, as_json=as_json)
    for family, widest in ((_is_text, pa.large_string()), (_is_bytes, pa.large_binary())):
        if family(left) and family(right):
            return widest
    if pa.types.is_integer(left) and pa.types.is_integer(right):
        return _join_integers(left, right)
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        return _join_structs(left, right, as_json=as_json)
    if _is_list(left) and _is_list(right):
        item = join_types(left.value_type, right.value_type, as_json=as_json)
        make = pa.large_list if pa.types.is_large_list(left) or pa.types.is_large_list(right) else pa.list_
        return None if item is None else make(left.value_field.with_type(item).with_nullable(True))
    if as_json and _is_number(left) and _is_number(right):
        return pa.float64()
    return None


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _join_integers(left: Any, right: Any) -> Any:
    if pa.types.is_signed_integer(left) == pa.types.is_signed_integer(right):
        return left if left.bit_width >= right.bit_width else right
    signed, unsigned = (left, right) if pa.types.is_signed_integer(left) else (right, left)
    if unsigned.bit_width == 64:
        return None
    needed = max(signed.bit_width, 2 * unsigned.bit_width)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[needed]


def _join_structs(left: Any, right: Any, *, as_json: bool) -> Any:
    fields = {field.name: field for field in left}
    for field in right:
        known = fields.get(field.name)
        kind = field.type if known is None else join_types(known.type, field.type, as_json=as_json)
        if kind is None:
            return None
        fields[field.name] = (known or field).with_type(kind)
    shared = {field.name for field in left} & {field.name for field in right}
    return pa.struct(
        [
            field if name in shared and not field.nullable else field.with_nullable(True)
            for name, field in fields.items()
        ]
    )


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _refuse_lacking(schemas: Sequence[pa.Schema], names: Sequence[str]) -> None:
    for schema, name in zip(schemas[1:], names[1:], strict=True):
        for here, there, lacking in ((schemas[0], schema, name), (schema, schemas[0], names[0])):
            for column in here.names:
                if column not in there.names:
                    having = names[0] if lacking == name else name
                    raise SourceError(
                        f"column {column!r} is in {having} but not in {lacking}; leave it out "
                        f"(input.columns), or add it to the files that lack it"
                    )


def _shared_features(schemas: Sequence[pa.Schema]) -> dict[bytes, bytes] | None:
    """The Hugging Face features, when all files agree on them; pandas' notes would be wrong in the output."""
    found = {(schema.metadata or {}).get(_HUGGINGFACE) for schema in schemas}
    features = found.pop()
    return {_HUGGINGFACE: features} if not found and features is not None else None


def select_columns(schema: pa.Schema, columns: Sequence[str] | None, name: str) -> pa.Schema:
    """The schema with only these columns, in this order; all of them for None.

    Raises:
        SourceError: a column that is not there, with the nearest; or two columns of one name.
    """
    twice = {column for column in schema.names if schema.names.count(column) > 1}
    wanted = schema.names if columns is None else columns
    for position, column in enumerate(wanted):
        if column not in schema.names:
            raise SourceError(
                f"input.columns.{position}: {name} has no column {column!r}{hint(column, schema.names)}"
            )
        if column in twice:
            raise SourceError(
                f"{name} has two columns named {column!r}; leave it out (input.columns) or rename one"
            )
    return (
        schema if columns is None else pa.schema([schema.field(c) for c in columns], metadata=schema.metadata)
    )


def rename_columns(schema: pa.Schema, renames: Mapping[str, str]) -> pa.Schema:
    """The schema under new names.

    Raises:
        SourceError: a column that is not there, or two columns that would share a name.
    """
    if not renames:
        return schema
    for old in renames:
        if old not in schema.names:
            raise SourceError(f"input.rename: no column {old!r}{hint(old, schema.names)}")
    fields = [field.with_name(renames.get(field.name, field.name)) for field in schema]
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise SourceError(f"input.rename: two columns would be named {name!r}")
    return pa.schema(fields)


def conform(batch: pa.RecordBatch, read: pa.Schema, written: pa.Schema) -> pa.RecordBatch:
    """A batch with the columns of `read`, cast to its types without loss, under the names of `written`."""
    arrays = []
    for field in read:
        array = batch.column(field.name)
        arrays.append(array if array.type.equals(field.type) else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=written)


def hint(name: str, known: Iterable[str]) -> str:
    """What to say after "no column 'x'": the nearest, or all."""
    known = list(known)
    guess = nearest(name, known)
    return f"; did you mean {guess!r}?" if guess else f"; columns: {', '.join(known) or 'none'}"
