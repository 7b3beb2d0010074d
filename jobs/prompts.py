"""PromptRenderer: a row becomes a prompt, tokenized and within limits, or says why it cannot."""

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError
from batchgen.jobs.adapters import AdapterChoice
from batchgen.jobs.messages import is_text_type
from batchgen.jobs.prompt_text import make_prompt_text, need_column
from batchgen.jobs.row import Prompt, Row
from batchgen.jobs.row_values import RowReader, guarded
from batchgen.jobs.sections import PromptSpec, TruncateSpec
from batchgen.jobs.settings_sections import SamplingSpec
from batchgen.jobs.template import RowTemplateError
from batchgen.jobs.truncate import cut_text, longest_fitting
from batchgen.outputs import FailureCode, RowFailure
from batchgen.quantities import counted
from batchgen.seeds import row_seed

DOUBLE_BOS = (
    "the prompt begins with two beginning-of-text tokens: one is written in it, one added by the tokenizer "
    "(prompt.add_special_tokens: false leaves that out)"
)
_SEEDS = range(-(2**63), 2**63)


class PromptRenderer:
    """Renders and tokenizes rows; pure and thread-safe.

    Args:
        prompt: the job file's section.
        sampling: likewise; its seed, seed column and `max_tokens` are used.
        schema: the input's columns.
        tokenizer: the model's `Tokenizer`.
        max_model_len: longest prompt and answer together; None leaves lengths unchecked.
        is_typed: whether the input declares its types. Of one that does not, a cell that is no text is the
            row's failure and not the input's.
        adapters: names of those that a row may ask for.

    Raises:
        TemplateError: a template is wrong, or the model has no chat template.
        SourceError: a column is not there or of the wrong type.
    """

    def __init__(
        self,
        prompt: PromptSpec,
        sampling: SamplingSpec,
        schema: pa.Schema,
        tokenizer: Any,
        max_model_len: int | None,
        *,
        is_typed: bool = True,
        adapters: Collection[str] = (),
    ):
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._guards = not prompt.allow_special_tokens
        self._guard = tokenizer.guard if self._guards else None
        self._text = make_prompt_text(prompt, schema, tokenizer, self._guard, is_typed=is_typed)
        self._reader = RowReader(self._text.columns, schema, self._guard)
        # The chat template writes the special tokens itself; adding them again would double them.
        added = prompt.add_special_tokens
        self._adds_special_tokens = not prompt.is_chat if added is None else added
        self._truncate = prompt.truncate
        self._limit: int | None = None
        if prompt.truncate is not None:
            _check_truncate(prompt, prompt.truncate, self._text.columns, schema)
            self._limit = _prompt_limit(prompt.truncate, max_model_len, sampling.max_tokens)
        self._adapter = AdapterChoice(prompt, adapters, schema, is_typed=is_typed)
        self._job_seed = sampling.job_seed
        self._seed_reader = None
        if sampling.seed_column is not None:
            _check_seed_column(sampling.seed_column, schema, is_typed=is_typed)
            self._seed_reader = RowReader((sampling.seed_column,), schema, None)
            self._seed_column = sampling.seed_column

    def render(self, row: Row) -> Prompt | RowFailure:
        """The row's prompt, or why there is none."""
        failure = row.batch.failures.get(row.offset)
        if failure is not None:
            return failure
        try:
            return self._render(row)
        except RowTemplateError as error:
            return RowFailure(error.code, str(error))

    def _render(self, row: Row) -> Prompt:
        seed, adapter = self._seed(row), self._adapter.of(row)
        values = self._reader.read(row)
        text = self._text.text(row, values)
        if not text:
            raise RowTemplateError(FailureCode.EMPTY_PROMPT, "the prompt is empty")
        ids = self._encode(text)
        warnings = row.batch.warnings.get(row.offset, ())
        if self._limit is not None and len(ids) > self._limit:
            text, ids, warning = self._cut(row, values, len(ids))
            warnings = (*warnings, warning)
        if not ids:
            raise RowTemplateError(FailureCode.EMPTY_PROMPT, "the prompt has no tokens")
        if self._max_model_len is not None and len(ids) >= self._max_model_len:
            raise RowTemplateError(
                FailureCode.PROMPT_TOO_LONG,
                f"the prompt has {counted(len(ids), 'token')}, which leaves no room for an answer under "
                f"max_model_len {self._max_model_len}",
            )
        if ids[0] == self._tokenizer.bos_token_id and ids[1:2] == ids[:1]:
            warnings = (*warnings, DOUBLE_BOS)
        shown = self._tokenizer.unguard(text) if self._guards else text
        return Prompt(row, shown, ids, seed, warnings, adapter)

    def _encode(self, text: str) -> list[int]:
        ids: list[int]
        if self._guards:
            ids = self._tokenizer.encode_guarded(text, add_special_tokens=self._adds_special_tokens)
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=self._adds_special_tokens)
        return ids

    def _seed(self, row: Row) -> int:
        if self._seed_reader is None:
            return row_seed(self._job_seed, row.file, row.row)
        value = self._seed_reader.raw(row, self._seed_column)
        if not isinstance(value, int) or isinstance(value, bool) or value not in _SEEDS:
            raise RowTemplateError(
                FailureCode.INVALID_PARAMETER,
                f"seed column {self._seed_column!r} holds {value!r}, not a seed",
            )
        return value

    def _cut(self, row: Row, values: dict[str, Any], num_tokens: int) -> tuple[str, list[int], str]:
        """The prompt with the truncated column cut as little as the limit allows."""
        rule, limit = self._truncate, self._limit
        assert rule is not None and limit is not None
        value = self._reader.raw(row, rule.column)
        if not isinstance(value, str):
            value = ""
        best: tuple[str, list[int]] | None = None

        def fits(kept: int) -> bool:
            nonlocal best
            cut = guarded(cut_text(value, kept, rule.side), self._guard)
            text = self._text.text(row, {**values, rule.column: cut})
            ids = self._encode(text)
            if len(ids) > limit:
                return False
            best = text, ids
            return True

        kept = longest_fitting(len(value), len(value) * limit // num_tokens, fits) if value else None
        if kept is None or best is None:
            raise RowTemplateError(
                FailureCode.PROMPT_TOO_LONG,
                f"the prompt has {counted(num_tokens, 'token')}, more than {limit} even without column "
                f"{rule.column!r}",
            )
        text, ids = best
        warning = (
            f"column {rule.column!r} was cut ({rule.side}) from {len(value)} to {kept} characters, "
            f"the prompt from {num_tokens} to {len(ids)} tokens"
        )
        return text, ids, warning


def _prompt_limit(rule: TruncateSpec, max_model_len: int | None, max_tokens: int | None) -> int | None:
    """The longest prompt that is left whole: what the answer leaves, but at least half of the context."""
    if max_model_len is None:
        return rule.max_tokens
    room = min(max_tokens or 1, max(1, max_model_len // 2))
    return min(rule.max_tokens or max_model_len, max_model_len - room)


def _check_truncate(
    prompt: PromptSpec, rule: TruncateSpec, columns: tuple[str, ...], schema: pa.Schema
) -> None:
    need_column(rule.column, "prompt.truncate.column", schema)
    if rule.column not in columns:
        raise SourceError(
            f"prompt.truncate.column: column {rule.column!r} is not in the prompt, which uses "
            f"{', '.join(columns)}"
        )
    if prompt.kind == "messages_column":
        raise SourceError("prompt.truncate: a messages column cannot be cut; build the prompt with messages")
    kind = schema.field(rule.column).type
    if not is_text_type(kind):
        raise SourceError(f"prompt.truncate.column: column {rule.column!r} is {kind}, not text")


def _check_seed_column(name: str, schema: pa.Schema, *, is_typed: bool) -> None:
    need_column(name, "sampling.seed_column", schema)
    kind = schema.field(name).type
    # A column that was seen to be text holds no seeds, though its type was guessed; one of nulls may.
    is_text = is_text_type(kind) and not pa.types.is_null(kind)
    if not pa.types.is_integer(kind) and (is_typed or is_text):
        fix = "" if is_typed else f"; declare it with `input: {{schema: {{{name}: int64}}}}`"
        raise SourceError(f"sampling.seed_column: column {name!r} is {kind}, not an integer{fix}")
