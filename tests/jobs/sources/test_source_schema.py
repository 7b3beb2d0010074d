import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import SourceError
from batchgen.jobs.sources.arrow_types import parse_type
from batchgen.jobs.sources.schema import join_schemas, join_types

i8, i16, i32, i64 = pa.int8(), pa.int16(), pa.int32(), pa.int64()
u8, u16, u32, u64 = pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()


@pytest.mark.parametrize(
    ("left", "right", "joined"),
    [
        (pa.null(), pa.map_(pa.string(), i8), pa.map_(pa.string(), i8)),
        (i8, i64, i64),
        (u8, u32, u32),
        (u8, i8, i16),
        (u16, i64, i64),
        (u32, i32, i64),
        (u64, i8, None),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.string_view(), pa.string(), pa.large_string()),
        (pa.binary(), pa.large_binary(), pa.large_binary()),
        (pa.list_(i8), pa.large_list(i32), pa.large_list(i32)),
        (pa.list_(pa.null()), pa.list_(pa.string()), pa.list_(pa.string())),
        (pa.dictionary(i8, pa.string()), pa.string(), pa.string()),
        (pa.dictionary(i8, pa.string()), pa.dictionary(i32, pa.large_string()), pa.large_string()),
        (pa.dictionary(i8, pa.string()), pa.dictionary(i8, pa.string()), pa.dictionary(i8, pa.string())),
        (pa.struct([("a", i8)]), pa.struct([("b", i8)]), pa.struct([("a", i8), ("b", i8)])),
        (pa.struct([("a", i8)]), pa.struct([("a", pa.string())]), None),
        (
            pa.list_(pa.struct([("a", i8)])),
            pa.list_(pa.struct([("a", i16)])),
            pa.list_(pa.struct([("a", i16)])),
        ),
        (pa.string(), pa.struct([("a", i8)]), None),
        (pa.string(), pa.binary(), None),
        (i64, pa.float64(), None),
        (pa.float32(), pa.float64(), None),
        (pa.bool_(), i8, None),
        (pa.timestamp("us"), pa.timestamp("ns"), None),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC"), None),
        (pa.decimal128(5, 2), pa.decimal128(6, 2), None),
        (pa.list_(i8), pa.list_(i8, 2), None),
    ],
)
def test_types_join_only_without_loss(left, right, joined):
    assert join_types(left, right) == joined
    assert join_types(right, left) == joined or pa.types.is_struct(left)


kinds = st.recursive(
    st.sampled_from(
        [
            pa.null(),
            i8,
            i64,
            u8,
            u64,
            pa.string(),
            pa.large_string(),
            pa.bool_(),
            pa.float64(),
            pa.dictionary(i8, pa.string()),
        ]
    ),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.dictionaries(st.sampled_from("ab"), inner, min_size=1).map(
            lambda fields: pa.struct(list(fields.items()))
        ),
    ),
    max_leaves=4,
)


@given(left=kinds, right=kinds)
def test_both_sides_cast_to_the_joined_type(left, right):
    joined = join_types(left, right)
    if joined is not None:
        for kind in (left, right):
            assert pa.nulls(2, kind).cast(joined).type == joined
        assert join_types(joined, right) == joined


def test_nullability_and_order_come_from_all_files():
    left = pa.schema([pa.field("a", i8, nullable=False), pa.field("b", i8, nullable=False)])
    right = pa.schema([pa.field("b", i8), pa.field("a", i8, nullable=False)])
    joined = join_schemas([left, right], ["l", "r"])
    assert joined.names == ["a", "b"]
    assert [field.nullable for field in joined] == [False, True]


def test_a_clash_names_the_file_that_set_the_type():
    schemas = [pa.schema([("a", pa.null())]), pa.schema([("a", pa.string())]), pa.schema([("a", i8)])]
    with pytest.raises(SourceError, match="column 'a' is string in two but int8 in three"):
        join_schemas(schemas, ["one", "two", "three"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("int64", i64),
        (" double ", pa.float64()),
        ("list<string>", pa.list_(pa.string())),
        ("large_list<item: list<int8>>", pa.large_list(pa.list_(i8))),
        (
            "struct<a: int64, b: list<struct<c: string, d: decimal128(9, 2)>>>",
            pa.struct(
                [("a", i64), ("b", pa.list_(pa.struct([("c", pa.string()), ("d", pa.decimal128(9, 2))])))]
            ),
        ),
        ("timestamp[us, tz=Europe/Berlin]", pa.timestamp("us", tz="Europe/Berlin")),
        ("timestamp[ns]", pa.timestamp("ns")),
    ],
)
def test_types_are_read_as_arrow_prints_them(text, kind):
    assert parse_type(text, "input.schema.x") == kind
    assert parse_type(str(kind), "input.schema.x") == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strin", r"input\.schema\.x: unknown type 'strin'; did you mean 'string'\?"),
        ("list<strin>", "unknown type 'strin'"),
        ("struct<a int8>", r"'a int8' in struct<\.\.\.> must be written as name: type"),
        ("decimal128(99, 2)", "decimal128"),
        ("zzz", "unknown type 'zzz'; known: bool, "),
    ],
)
def test_unknown_types_are_named(text, message):
    with pytest.raises(SourceError, match=message):
        parse_type(text, "input.schema.x")
