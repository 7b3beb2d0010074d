"""The types of job-file values: strict, except that text which is a number is one where a number is due."""

import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BeforeValidator, Strict
from pydantic_core import PydanticCustomError

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


def _as_number(value: Any) -> Any:
    if isinstance(value, str):
        if _INTEGER.fullmatch(value):
            return int(value)
        if _FLOAT.fullmatch(value):
            return float(value)
    return value


def _as_whole_number(value: Any) -> Any:
    value = _as_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        raise PydanticCustomError("quote_it", "must be text; quote it")
    return value


def _as_list(value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return value
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Int = Annotated[int, Strict(), BeforeValidator(_as_whole_number)]
Float = Annotated[float, Strict(), BeforeValidator(_as_number)]
Bool = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), BeforeValidator(_as_text)]
# One text, or a list of them.
Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_list)]

_LEAVES: dict[Any, Any] = {int: Int, float: Float, bool: Bool, str: Text}


def field_type(annotation: Any) -> Any:
    """The job-file type of a settings dataclass' annotation: strict leaves; a lone value is a list of one."""
    if annotation in _LEAVES:
        return _LEAVES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        if len([each for each in arguments if each is not types.NoneType]) > 1:
            # One message of the class that has the rule says more than one for each type.
            return Any
        return Union[tuple(field_type(argument) for argument in arguments)]  # noqa: UP007
    if origin is tuple:
        return Annotated[tuple[field_type(arguments[0]), ...], BeforeValidator(_as_list)]  # type: ignore[misc]
    if origin is not None and issubclass(origin, Mapping):
        return dict[field_type(arguments[0]), field_type(arguments[1])]  # type: ignore[misc]
    return annotation
