"""The ways from a row's values to the text of its prompt: template, column, messages, messages column."""

from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from batchgen.errors import InputError, SourceError, TemplateError
from batchgen.jobs.messages import check_messages_column, conversation, is_text_type
from batchgen.jobs.row import Row
from batchgen.jobs.row_values import Guard, RowReader, guarded
from batchgen.jobs.sections import PromptSpec
from batchgen.jobs.sources.schema import hint
from batchgen.jobs.template import RowTemplate, RowTemplateError
from batchgen.jobs.template_environment import Null
from batchgen.outputs import FailureCode


class PromptText(Protocol):
    """Makes the text of a prompt.

    Args:
        columns: the columns whose values it needs.
    """

    columns: tuple[str, ...]

    def text(self, row: Row, values: Mapping[str, Any]) -> str:
        """The text; values as `RowReader` gives them.

        Raises:
            RowTemplateError: the row has none.
        """
        ...


def make_prompt_text(
    prompt: PromptSpec, schema: pa.Schema, tokenizer: Any, guard: Guard | None, *, is_typed: bool
) -> PromptText:
    """What makes the texts for that prompt section; other arguments as those of `PromptRenderer`.

    Raises:
        TemplateError: a template is wrong, or the model has no chat template.
        SourceError: a column is not there or of the wrong type.
    """
    if prompt.is_chat and not tokenizer.has_chat_template:
        raise TemplateError(
            f"prompt.{'chat' if prompt.chat else prompt.kind}: the model has no chat template; give one "
            f"(model.chat_template) or use a plain template"
        )
    if prompt.messages_column is not None:
        need_column(prompt.messages_column, "prompt.messages_column", schema)
        kind = schema.field(prompt.messages_column).type
        check_messages_column(prompt.messages_column, kind, is_typed=is_typed)
        return _MessagesColumnText(prompt, schema, tokenizer, guard)
    if prompt.messages is not None:
        return _MessagesText(prompt, schema, tokenizer)
    plain: PromptText
    if prompt.column is not None:
        need_column(prompt.column, "prompt.column", schema)
        plain = _ColumnText(prompt.column, schema.field(prompt.column).type, is_typed=is_typed)
    else:
        plain = _TemplateText(RowTemplate(prompt.template or "", "prompt.template", schema))
    return _UserMessageText(plain, prompt, schema, tokenizer) if prompt.is_chat else plain


def need_column(name: str, key: str, schema: pa.Schema) -> None:
    """Refuse a column that is not there, naming the nearest.

    Raises:
        SourceError: it is not there.
    """
    if name not in schema.names:
        raise SourceError(f"{key}: no column {name!r}{hint(name, schema.names)}")


class _TemplateText:
    def __init__(self, template: RowTemplate):
        self._template = template
        self.columns = template.columns

    def text(self, row: Row, values: Mapping[str, Any]) -> str:
        return self._template.render(values)


class _ColumnText:
    def __init__(self, column: str, kind: Any, *, is_typed: bool):
        if is_typed and not is_text_type(kind):
            raise SourceError(
                f"prompt.column: column {column!r} is {kind}, not text; use a template: {{{{ {column} }}}}"
            )
        self._column = column
        self.columns: tuple[str, ...] = (column,)

    def text(self, row: Row, values: Mapping[str, Any]) -> str:
        column = self._column
        value = values[column]
        if isinstance(value, Null):
            raise RowTemplateError(FailureCode.NULL_PROMPT, f"column {column!r} is null")
        if not isinstance(value, str):
            raise RowTemplateError(
                FailureCode.NOT_A_STRING, f"column {column!r} holds {value!r:.60}, not text"
            )
        return value


class _ChatText:
    """Messages through the model's chat template, the system message first."""

    def __init__(self, prompt: PromptSpec, schema: pa.Schema, tokenizer: Any):
        self._tokenizer = tokenizer
        self._kwargs = dict(prompt.chat_template_kwargs)
        self._system = None
        if prompt.system is not None:
            self._system = RowTemplate(prompt.system, "prompt.system", schema)

    def _with_system(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        extra = self._system.columns if self._system is not None else ()
        return tuple(dict.fromkeys((*columns, *extra)))

    def _render(self, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        if self._system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self._system.render(values)}, *messages]
        try:
            text: str = self._tokenizer.render_chat(messages, **self._kwargs)
        except TemplateError as error:
            raise RowTemplateError(FailureCode.TEMPLATE_ERROR, str(error)) from None
        except InputError as error:
            raise RowTemplateError(FailureCode.INVALID_MESSAGES, str(error)) from None
        return text


class _UserMessageText(_ChatText):
    def __init__(self, plain: PromptText, prompt: PromptSpec, schema: pa.Schema, tokenizer: Any):
        super().__init__(prompt, schema, tokenizer)
        self._plain = plain
        self.columns = self._with_system(plain.columns)

    def text(self, row: Row, values: Mapping[str, Any]) -> str:
        content = self._plain.text(row, values)
        # The chat template would wrap even nothing into tokens.
        return content and self._render([{"role": "user", "content": content}], values)


class _MessagesText(_ChatText):
    def __init__(self, prompt: PromptSpec, schema: pa.Schema, tokenizer: Any):
        super().__init__(prompt, schema, tokenizer)
        self._messages = [
            (message.role, RowTemplate(message.content, f"prompt.messages.{number}.content", schema))
            for number, message in enumerate(prompt.messages or ())
        ]
        used = [name for _, template in self._messages for name in template.columns]
        self.columns = self._with_system(tuple(used))

    def text(self, row: Row, values: Mapping[str, Any]) -> str:
        messages = [{"role": role, "content": template.render(values)} for role, template in self._messages]
        return self._render(messages, values)


class _MessagesColumnText(_ChatText):
    def __init__(self, prompt: PromptSpec, schema: pa.Schema, tokenizer: Any, guard: Guard | None):
        super().__init__(prompt, schema, tokenizer)
        self._column = prompt.messages_column or ""
        self._guard = guard
        # Guarded only after JSON is parsed: an escape may hide control-token text.
        self._reader = RowReader((self._column,), schema, None)
        self.columns = self._with_system(())

    def text(self, row: Row, values: Mapping[str, Any]) -> str:
        value = self._reader.raw(row, self._column)
        if value is None:
            raise RowTemplateError(FailureCode.NULL_PROMPT, f"column {self._column!r} is null")
        return self._render(guarded(conversation(value, self._column), self._guard), values)
