"""Reading a row template and checking its names against the columns, before any row."""

import re
from collections.abc import Iterable
from typing import Any

import jinja2
import pyarrow as pa
from jinja2 import meta, nodes

from batchgen.errors import TemplateError, nearest
from batchgen.jobs.template_environment import environment

# Jinja turns every line end into "\n". Characters that it takes for space stand in for "\r" while it parses.
_STAND_INS = "\x1c\x1d\x1e\x1f\x0b\x0c\x85"
# A str.format placeholder: one brace on each side.
_FORMAT_FIELD = re.compile(r"(?<!\{)\{\s*(\w+)\s*\}(?!\})")
_REFUSED_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_MAX_LISTED = 50


def parse(source: str, place: str) -> nodes.Template:
    """The syntax tree of a template, line ends as written.

    Raises:
        TemplateError: bad syntax, with the line.
    """
    stand_in = None
    if "\r" in source:
        stand_in = next((each for each in _STAND_INS if each not in source), None)
        if stand_in is None:
            raise TemplateError(
                f"{place}: has carriage returns and every control character that can stand for them"
            )
        source = source.replace("\r", stand_in)
    try:
        # Without globals a column may have the name of one ("range", "dict").
        tree = environment(with_globals=False).parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{place}, line {error.lineno}: {error.message}") from None
    if stand_in is not None:
        for node in tree.find_all((nodes.TemplateData, nodes.Const)):
            field = "data" if isinstance(node, nodes.TemplateData) else "value"
            text = getattr(node, field)
            if isinstance(text, str):
                setattr(node, field, text.replace(stand_in, "\r"))
    return tree


def check_nodes(tree: nodes.Template, place: str, schema: pa.Schema) -> None:
    """Refuse what could only go wrong in a row, or in every row without a word.

    Raises:
        TemplateError: an unknown filter or test, an include, a struct field that is not there, or a
            placeholder written with single braces.
    """
    engine = environment()
    for node in tree.find_all((nodes.Filter, nodes.Test)):
        kind, known = ("filter", engine.filters) if isinstance(node, nodes.Filter) else ("test", engine.tests)
        if node.name not in known:
            raise TemplateError(unknown(kind, node.name, known, f"{place}, line {node.lineno}"))
    for refused in tree.find_all(_REFUSED_NODES):
        raise TemplateError(f"{place}, line {refused.lineno}: other templates cannot be included")
    for data in tree.find_all(nodes.TemplateData):
        for match in _FORMAT_FIELD.finditer(data.data):
            if match[1] in schema.names:
                line = data.lineno + data.data.count("\n", 0, match.start())
                raise TemplateError(
                    f"{place}, line {line}: {match[0]} is written out as it stands; a column is "
                    f"{{{{ {match[1]} }}}} (and if the braces are meant: {{{{ '{match[0]}' }}}})"
                )
    _check_fields(tree, place, schema)


def _check_fields(tree: nodes.Template, place: str, schema: pa.Schema) -> None:
    """Refuse fields that a struct column does not have."""
    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    accesses: list[nodes.Getattr | nodes.Getitem] = [
        *tree.find_all(nodes.Getattr),
        *tree.find_all(nodes.Getitem),
    ]
    for node in accesses:
        name, kind = _field_name(node), _type_of(node.node, schema, assigned)
        if name is None or kind is None or not pa.types.is_struct(kind):
            continue
        fields = [kind.field(i).name for i in range(kind.num_fields)]
        is_method = isinstance(node, nodes.Getattr) and hasattr(dict, name)
        if name not in fields and not is_method:
            raise TemplateError(unknown("field", name, fields, f"{place}, line {node.lineno}"))


def _field_name(node: nodes.Getattr | nodes.Getitem) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    if (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and isinstance(node.arg.value, str)
    ):
        return node.arg.value
    return None


def _type_of(node: nodes.Node, schema: pa.Schema, assigned: set[str]) -> Any:
    """The Arrow type of an expression that is a column or a field in one; None for all else."""
    if isinstance(node, nodes.Name):
        return (
            schema.field(node.name).type if node.name in schema.names and node.name not in assigned else None
        )
    name = _field_name(node) if isinstance(node, nodes.Getattr | nodes.Getitem) else None
    if name is None:
        return None
    kind = _type_of(node.node, schema, assigned)  # type: ignore[attr-defined]  # both kinds have it
    if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
        return None
    return kind.field(name).type


def free_names(tree: nodes.Template, place: str) -> set[str]:
    """The names that a template takes from outside; loops, `set` and macros define their own.

    Raises:
        TemplateError: something that only shows when code is made of it, such as a block given twice.
    """
    try:
        return meta.find_undeclared_variables(tree)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{place}, line {error.lineno}: {error.message}") from None


def unknown(what: str, name: str, known: Iterable[str], place: str) -> str:
    """The message about a name that is not there: the nearest, and all when they are few."""
    names = list(known)
    guess = nearest(name, names)
    shown = f"; did you mean {guess!r}?" if guess else ""
    few = f" ({what}s: {', '.join(names) or 'none'})" if len(names) <= _MAX_LISTED else ""
    return f"{place}: no {what} {name!r}{shown}{few}"
