"""text_pieces: a file of texts as pieces of token ids, to round a model for or to measure it with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.errors import InputError

if TYPE_CHECKING:
    from batchgen.jobs.sources import Source


def text_pieces(data: str, encode: Callable[..., list[int]], *, length: int, count: int) -> list[list[int]]:
    """The first pieces of a file's texts, which are put together with an empty line between.

    Args:
        data: "FILE" or "FILE:COLUMN", a file as jobs read them. "FILE:A,B.0.C" takes two columns, and what
            lies in the second. Without a column: `text`, or the only one that holds text.
        encode: text to token ids; takes `add_special_tokens`.
        length: token ids of a piece.
        count: pieces at most.

    Raises:
        InputError: no such file or column, or not enough text for one piece.
    """
    ids: list[int] = []
    for text in _texts(data):
        ids += encode(text, add_special_tokens=False)
        if len(ids) >= length * count:
            break
    pieces = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)][:count]
    if not pieces:
        raise InputError(f"data {data!r} holds {len(ids)} tokens, less than one piece of {length}")
    return pieces


def _texts(data: str) -> Iterator[str]:
    from batchgen.jobs.row import RowPosition
    from batchgen.jobs.sections import InputSpec
    from batchgen.jobs.sources import open_source

    file, columns = _split(data)
    source = open_source(InputSpec(path=(file,)), Path.cwd())
    columns = columns or _text_columns(source, data)
    for column in columns:
        if column.split(".")[0] not in source.schema.names:
            raise InputError(
                f"data {data!r}: there is no column {column!r}; there are {', '.join(source.schema.names)}"
            )
    # The lines of a plain file are its text; rows of other files have one each.
    between = "\n" if file.endswith(".txt") else "\n\n"
    for batch in source.batches(RowPosition(0, 0, 0)):
        for row in batch.columns.to_pylist():
            cells = [_cell(row, column) for column in columns]
            yield "\n".join(str(cell) for cell in cells if cell is not None) + between


def _split(data: str) -> tuple[str, list[str]]:
    """File and columns; what is there counts whole, whatever is in its name."""
    if ":" not in data or Path(data).expanduser().exists():
        return data, []
    file, _, columns = data.rpartition(":")
    return file, [each.strip() for each in columns.split(",")]


def _text_columns(source: "Source", data: str) -> list[str]:
    import pyarrow as pa

    names = [
        field.name
        for field in source.schema
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    ]
    if "text" in names or len(names) == 1:
        return ["text"] if "text" in names else names
    raise InputError(
        f"data {data!r}: which column is it? Write {data}:COLUMN; there are {', '.join(source.schema.names)}"
    )


def _cell(cell: Any, column: str) -> Any:
    """A cell of a row, or what a path such as "instances.0.input" leads to in it; None: nothing."""
    for word in column.split("."):
        if isinstance(cell, list):
            cell = cell[int(word)] if word.isdigit() and int(word) < len(cell) else None
        else:
            cell = cell.get(word) if isinstance(cell, dict) else None
    return cell
