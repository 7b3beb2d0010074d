"""RowTemplate: a strict, sandboxed Jinja2 template over a row's columns; its names are checked first."""

from collections.abc import Mapping
from typing import Any

import jinja2
import pyarrow as pa
from jinja2 import nodes

from batchgen.errors import TemplateError
from batchgen.jobs.template_checks import check_nodes, free_names, parse, unknown
from batchgen.jobs.template_environment import NullColumnError, environment
from batchgen.outputs import FailureCode


class RowTemplateError(Exception):
    """A row that the template cannot render; becomes a row failure of that code."""

    def __init__(self, code: FailureCode, message: str):
        super().__init__(message)
        self.code = code


class RowTemplate:
    """A compiled template. Rendering is pure and thread-safe.

    Data is never evaluated. Line ends and a trailing newline are kept as written. A null that is written out
    is an error, unless the template gives a default; a null column is falsy and `is none`.

    Args:
        source: Jinja2 text.
        place: the job-file key it stands under, for messages.
        schema: the columns there are.

    Raises:
        TemplateError: bad syntax, a name that is no column (says the nearest), or what `check_nodes` refuses.
    """

    def __init__(self, source: str, place: str, schema: pa.Schema):
        self.place = place
        tree = parse(source, place)
        check_nodes(tree, place, schema)
        names = free_names(tree, place)
        for name in sorted(names):
            if name not in schema.names and name not in environment().globals:
                line = min(node.lineno for node in tree.find_all(nodes.Name) if node.name == name)
                raise TemplateError(unknown("column", name, schema.names, f"{place}, line {line}"))
        self.columns = tuple(name for name in schema.names if name in names)
        self._template = environment().from_string(tree)

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for a row.

        Args:
            values: each of `columns`; nulls as `null_column`.

        Raises:
            RowTemplateError: the template cannot make a text of this row.
        """
        try:
            text: str = self._template.render(values)
            return text
        except NullColumnError as error:
            raise RowTemplateError(FailureCode.NULL_PROMPT, f"{self.place}: {error.message}") from None
        # A template is the user's function: whatever it raises is the row's failure.
        except Exception as error:
            what = (
                error.message
                if isinstance(error, jinja2.TemplateError)
                else f"{type(error).__name__}: {error}"
            )
            raise RowTemplateError(FailureCode.TEMPLATE_ERROR, f"{self.place}: {what}") from None
