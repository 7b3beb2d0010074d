"""RowReader: the cells that a prompt needs out of a row, as Python values with their data guarded."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from batchgen.jobs.row import Row
from batchgen.jobs.template import RowTemplateError
from batchgen.jobs.template_environment import null_column
from batchgen.outputs import FailureCode

Guard = Callable[[str], str]


class RowReader:
    """Reads some columns of rows; pure and thread-safe.

    Args:
        columns: the columns to read.
        schema: the schema of the rows' batches.
        guard: marks control-token text in data; None leaves data as it is.
    """

    def __init__(self, columns: Sequence[str], schema: pa.Schema, guard: Guard | None):
        self._places = {name: schema.get_field_index(name) for name in columns}
        self._guard = guard

    def read(self, row: Row) -> dict[str, Any]:
        """Column -> guarded value; a null is a template's `Null`.

        Raises:
            RowTemplateError: a value has no Python form.
        """
        values = {}
        for name in self._places:
            value = self.raw(row, name)
            values[name] = null_column(name) if value is None else guarded(value, self._guard)
        return values

    def raw(self, row: Row, column: str) -> Any:
        """One column's value as it is in the data; what is kept as JSON text is again what it was.

        Raises:
            RowTemplateError: it has no Python form.
        """
        try:
            value = row.batch.columns.column(self._places[column])[row.offset].as_py()
        except UnicodeDecodeError as error:
            message = f"column {column!r} holds text that is no UTF-8: {error.reason}"
            raise RowTemplateError(FailureCode.INVALID_ENCODING, message) from None
        except (ValueError, OverflowError, pa.ArrowException) as error:
            message = f"column {column!r} holds a value that Python cannot show: {error}"
            raise RowTemplateError(FailureCode.TEMPLATE_ERROR, message) from None
        return json.loads(value) if row.offset in row.batch.json_text.get(column, ()) else value


def guarded(value: Any, guard: Guard | None) -> Any:
    """The value with every text in it guarded."""
    if guard is None:
        return value
    if type(value) is str:
        return guard(value)
    if type(value) is list:
        return [guarded(each, guard) for each in value]
    if type(value) is tuple:
        return tuple(guarded(each, guard) for each in value)
    if type(value) is dict:
        return {key: guarded(each, guard) for key, each in value.items()}
    return value
