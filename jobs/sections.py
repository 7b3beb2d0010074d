"""The model, input, prompt and output sections of a job file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from batchgen.jobs.field_types import Bool, Float, Int, Text, Texts
from batchgen.jobs.section import Section, refuse


class ModelSpec(Section):
    """Which model, tokenizer and chat template.

    Args:
        path: a folder, a .gguf file, a hub id, `package:NAME/FILE`, or `echo:` for a dry run without a model.
        chat_template: a template file or the template itself, in place of the model's own.
        generation_config: "auto" takes the model's own sampling defaults, "none" leaves them.
    """

    path: Annotated[Text, Field(min_length=1)]
    revision: Text | None = None
    tokenizer: Text | None = None
    tokenizer_revision: Text | None = None
    chat_template: Text | None = None
    generation_config: Literal["auto", "none"] = "auto"


class InputSpec(Section):
    """What is read.

    Args:
        path: files, folders or globs; a hub id; a `save_to_disk` folder; a builder's name and `data_files`.
        format: parquet, jsonl, csv, arrow, text or dataset; by default seen from the names.
        name: configuration of a hub dataset.
        split: split of a hub dataset or of `data_files`.
        revision: branch, tag or commit of a hub dataset; it is pinned to its commit at the first run.
        data_files: files, or split -> files, as `load_dataset` takes them.
        columns: the columns to read and pass through; all by default.
        rename: column -> its name in templates and output.
        declared_schema: key `schema`; column -> Arrow type, for JSONL, CSV and text.
        streaming: read a hub dataset as a stream.
    """

    path: Annotated[Texts, Field(min_length=1)]
    format: Text | None = None
    name: Text | None = None
    split: Text | None = None
    revision: Text | None = None
    data_files: Annotated[dict[str, Texts] | None, BeforeValidator(lambda value: _by_split(value))] = None
    columns: Texts | None = None
    rename: dict[str, Text] = Field(default_factory=dict)
    declared_schema: dict[str, Text] = Field(default_factory=dict, alias="schema")
    streaming: Bool = False


def _by_split(value: Any) -> Any:
    return value if value is None or isinstance(value, Mapping) else {"train": value}


class MessageSpec(Section):
    """One message of a conversation; the content is a template over columns."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class TruncateSpec(Section):
    """Which column may be cut when the prompt is too long.

    Args:
        column: the column whose text is cut.
        side: where it is cut: its left end, its right end, or its middle.
        max_tokens: longest prompt; by default what `max_model_len` leaves beside `sampling.max_tokens`.
    """

    column: Text
    side: Literal["left", "right", "middle"] = "right"
    max_tokens: Annotated[Int, Field(ge=1)] | None = None


class PromptSpec(Section):
    """How a row becomes a prompt; exactly one of template, messages, messages_column and column.

    Args:
        chat: send a template's or column's text as the user message of the chat template.
        system: the system message, a template over columns.
        chat_template_kwargs: passed on to the chat template.
        add_special_tokens: let the tokenizer add its own; by default for plain text only.
        allow_special_tokens: let control tokens written in the data act as such.
        adapter: the adapter of every row, one of `lora.adapters`.
        adapter_column: a column with the name of each row's adapter; null or empty: none.
    """

    template: Annotated[Text, Field(min_length=1)] | None = None
    messages: Annotated[tuple[MessageSpec, ...], BeforeValidator(lambda value: _as_tuple(value))] | None = (
        None
    )
    messages_column: Text | None = None
    column: Text | None = None
    system: Text | None = None
    chat: Bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: Bool | None = None
    allow_special_tokens: Bool = False
    truncate: TruncateSpec | None = None
    adapter: Annotated[Text, Field(min_length=1)] | None = None
    adapter_column: Text | None = None

    @property
    def kind(self) -> str:
        """Which of the four ways to make a prompt is used."""
        return next(name for name in PROMPT_KINDS if getattr(self, name) is not None)

    @property
    def is_chat(self) -> bool:
        """Whether the prompt goes through the chat template."""
        return bool(self.chat) or self.kind in ("messages", "messages_column")

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in PROMPT_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) + " are both given" if given else "nothing says what the prompt is"
            raise PydanticCustomError(
                "refused", "{message}", {"message": f"{what}; give exactly one of {', '.join(PROMPT_KINDS)}"}
            )
        if "messages" in self.chat_template_kwargs:
            raise refuse(
                "chat_template_kwargs", "the messages are made from the prompt; leave 'messages' out"
            )
        if self.adapter is not None and self.adapter_column is not None:
            raise refuse("adapter_column", "adapter names one for all rows; leave one of the two out")
        if self.messages == ():
            raise refuse("messages", "must hold at least one message")
        if self.chat is False and given[0] in ("messages", "messages_column"):
            raise refuse("chat", f"{given[0]} always goes through the chat template; leave chat out")
        if self.system is not None and given[0] == "messages":
            raise refuse("system", "put the system message first in messages")
        if self.system is not None and not self.is_chat:
            raise refuse("system", "a system message needs the chat template; add chat: true")
        if self.chat_template_kwargs and not self.is_chat:
            raise refuse(
                "chat_template_kwargs", "plain text does not go through the chat template; add chat: true"
            )
        return self


PROMPT_KINDS = ("template", "messages", "messages_column", "column")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class OutputSpec(Section):
    """Where results go.

    Args:
        path: the output folder.
        prefix: put before the names of the columns that batchgen adds.
        shard_rows: rows in one file.
        commit_interval_s: seconds between two commits to disk.
        drain_timeout_s: seconds that running rows get to finish after an interrupt.
    """

    path: Annotated[Text, Field(min_length=1)]
    prefix: Text = ""
    shard_rows: Annotated[Int, Field(ge=1)] = 10_000
    commit_interval_s: Annotated[Float, Field(gt=0)] = 5.0
    drain_timeout_s: Annotated[Float, Field(ge=0, le=9)] = 5.0
    format: Literal["arrow"] = "arrow"


def rooted(path: str, base_dir: Path) -> Path:
    """A path of the job file: relative ones stand beside the file; a leading ~ is the home folder."""
    return base_dir / Path(path).expanduser()
