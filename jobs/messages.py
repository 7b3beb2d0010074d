"""Conversations out of a column: a list of structs, or JSON text, checked message by message."""

import json
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError
from batchgen.jobs.template import RowTemplateError
from batchgen.outputs import FailureCode


def check_messages_column(name: str, kind: Any, *, is_typed: bool) -> None:
    """Refuse a column that cannot hold conversations.

    Raises:
        SourceError: names column and type.
    """
    if is_text_type(kind):
        return
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_type
        if pa.types.is_struct(item) and {"role", "content"} <= {field.name for field in item}:
            return
    if is_typed or pa.types.is_list(kind):
        raise SourceError(
            f"prompt.messages_column: column {name!r} is {kind}; it must be list<struct<role, content>>, or "
            f"text that holds the same as JSON"
        )


def is_text_type(kind: Any) -> bool:
    """Whether a column of that type gives Python strings (or only nulls)."""
    if pa.types.is_dictionary(kind):
        return is_text_type(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )


def conversation(value: Any, column: str) -> list[dict[str, Any]]:
    """The messages in a cell, without null keys.

    Raises:
        RowTemplateError: it is no conversation.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"column {column!r} is not JSON: {error}") from None
    if not isinstance(value, list):
        raise _invalid(f"column {column!r} holds {type(value).__name__}, not a list of messages")
    if not value:
        raise RowTemplateError(FailureCode.EMPTY_PROMPT, f"column {column!r} holds no messages")
    return [_message(message, f"column {column!r}, message {number}") for number, message in enumerate(value)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _invalid(f"{place} is {type(message).__name__}, not a mapping with role and content")
    # A struct has every key in every message; those of other kinds of message are null.
    present = {key: each for key, each in message.items() if each is not None}
    if not isinstance(present.get("role"), str):
        raise _invalid(f"{place} has no role")
    if "content" not in present and "tool_calls" not in present:
        raise _invalid(f"{place} has no content")
    if isinstance(present.get("content"), list):
        present["content"] = [_part(part) for part in present["content"]]
    return present


def _part(part: Any) -> Any:
    return {key: each for key, each in part.items() if each is not None} if isinstance(part, dict) else part


def _invalid(message: str) -> RowTemplateError:
    return RowTemplateError(FailureCode.INVALID_MESSAGES, message)
