"""OutputColumns: the columns of the output, and row results made into batches of them."""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from batchgen.errors import ConfigError
from batchgen.jobs.arrays import join_batches, sorted_metadata, take_rows
from batchgen.jobs.logprob_arrays import POSITIONS, logprob_array, nested_logprob_array
from batchgen.jobs.row import RowResult, Sample
from batchgen.logprobs import FlatLogprobs
from batchgen.outputs import FinishReason

_ERROR = pa.struct([("code", pa.string()), ("message", pa.string())])
# Columns that are there when asked for, in this order.
EXTRAS = ("valid", "logprobs", "prompt_logprobs")
# Said on a row whose generated text could not be written as it was.
SURROGATES_REPLACED = "lone surrogates in the generated text were replaced by U+FFFD"


class OutputColumns:
    """Where the row came from, the source's columns as they came, and what was generated.

    Per row: `row_index`, `source_file`, `source_row`, the source's columns, `generated_text`,
    `finish_reason`, `num_input_tokens`, `num_generated_tokens`, `error`, `warnings`. With more than one
    sample a row, the columns of a sample (text, reason, generated tokens) are lists. A row that failed before
    the engine has no text (null), the reason "error" and null token counts; of several samples, the reason
    for each, and null lists. `valid`, `logprobs` and `prompt_logprobs` are there when asked for.

    Args:
        source: schema of the pass-through columns.
        source_files: names of the source's files, by ordinal.
        num_samples: samples a row (`n`).
        prefix: put before our own names.
        extras: which of `EXTRAS` there are.

    Raises:
        ConfigError: a source column has a name of ours.
    """

    def __init__(
        self,
        source: pa.Schema,
        source_files: Sequence[str],
        *,
        num_samples: int = 1,
        prefix: str = "",
        extras: Collection[str] = (),
    ):
        self.source = source
        self.source_files = tuple(source_files)
        self.num_samples = num_samples
        self.extras = tuple(name for name in EXTRAS if name in extras)
        self.row_index = f"{prefix}row_index"
        self.source_file = f"{prefix}source_file"
        self.source_row = f"{prefix}source_row"
        self.error = f"{prefix}error"
        self.finish_reason = f"{prefix}finish_reason"
        self.num_input_tokens = f"{prefix}num_input_tokens"
        self.num_generated_tokens = f"{prefix}num_generated_tokens"
        before = [
            pa.field(self.row_index, pa.int64()),
            pa.field(self.source_file, pa.string()),
            pa.field(self.source_row, pa.int64()),
        ]
        after = [
            pa.field(f"{prefix}generated_text", self._each_sample(pa.string())),
            pa.field(self.finish_reason, self._each_sample(pa.string())),
            pa.field(self.num_input_tokens, pa.int32()),
            pa.field(self.num_generated_tokens, self._each_sample(pa.int32())),
            pa.field(self.error, _ERROR),
            pa.field(f"{prefix}warnings", pa.list_(pa.string())),
            *(pa.field(f"{prefix}{name}", self._extra_type(name)) for name in self.extras),
        ]
        _refuse_clashes({field.name for field in before + after}, source.names, prefix)
        fields = [*before, *source, *after]
        self.schema = sorted_metadata(pa.schema(fields, metadata=source.metadata))

    @property
    def counted(self) -> list[str]:
        """The columns that a `Tally` reads."""
        return [self.finish_reason, self.num_input_tokens, self.num_generated_tokens, self.error]

    def batch(self, results: Sequence[RowResult]) -> pa.RecordBatch:
        """One batch of the output schema.

        Args:
            results: in the order of their rows; at least one.
        """
        pieces, files = [], []
        for _, group in groupby(results, key=lambda result: id(result.row.batch)):
            rows = [result.row for result in group]
            pieces.append(take_rows(rows[0].batch.columns, [row.offset for row in rows]))
            files.extend([self.source_files[rows[0].file]] * len(rows))
        passed = join_batches(pieces)
        texts = [self._samples(result, _text) for result in results]
        text, replaced = _text_array(texts, self.num_samples > 1)
        columns = [
            pa.array([result.row.index for result in results], pa.int64()),
            pa.array(files, pa.string()),
            pa.array([result.row.row for result in results], pa.int64()),
            *passed.columns,
            text,
            pa.array(
                [self._samples(result, _reason, FinishReason.ERROR) for result in results],
                self._each_sample(pa.string()),
            ),
            pa.array([result.num_input_tokens or None for result in results], pa.int32()),
            pa.array(
                [self._samples(result, _num_generated) for result in results], self._each_sample(pa.int32())
            ),
            pa.array([_error(result) for result in results], _ERROR),
            pa.array(
                [_warnings(result, i in replaced) for i, result in enumerate(results)], pa.list_(pa.string())
            ),
            *(self._extra(name, results) for name in self.extras),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _extra_type(self, name: str) -> Any:
        if name == "prompt_logprobs":
            return POSITIONS
        return self._each_sample(pa.bool_() if name == "valid" else POSITIONS)

    def _extra(self, name: str, results: Sequence[RowResult]) -> Any:
        if name == "valid":
            return pa.array([self._samples(result, _valid) for result in results], self._extra_type(name))
        if name == "prompt_logprobs":
            return logprob_array([result.prompt_logprobs for result in results])
        if self.num_samples == 1:
            return logprob_array([self._samples(result, _logprobs) for result in results])
        return nested_logprob_array(
            [[sample.logprobs for sample in result.samples] or None for result in results]
        )

    def _each_sample(self, kind: Any) -> Any:
        return pa.list_(kind) if self.num_samples > 1 else kind

    def _samples(self, result: RowResult, value: Any, failed: Any = None) -> Any:
        if not result.samples:
            return [failed] * self.num_samples if failed is not None and self.num_samples > 1 else failed
        if self.num_samples > 1:
            return [value(sample) for sample in result.samples]
        return value(result.samples[0])


def repaired(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(sample: Sample) -> str:
    return sample.text


def _reason(sample: Sample) -> str:
    return sample.finish_reason


def _valid(sample: Sample) -> bool | None:
    return sample.valid


def _logprobs(sample: Sample) -> FlatLogprobs | None:
    return sample.logprobs


def _num_generated(sample: Sample) -> int:
    return sample.num_generated_tokens


def _error(result: RowResult) -> dict[str, str] | None:
    if result.failure is None:
        return None
    return {"code": str(result.failure.code), "message": repaired(result.failure.message)}


def _warnings(result: RowResult, is_replaced: bool) -> list[str]:
    said = [repaired(warning) for warning in result.warnings]
    return [*said, SURROGATES_REPLACED] if is_replaced else said


def _text_array(texts: list[Any], is_nested: bool) -> tuple[Any, set[int]]:
    """The texts as an array, and which rows had to be repaired for it."""
    kind = pa.list_(pa.string()) if is_nested else pa.string()
    try:
        return pa.array(texts, kind), set()
    except UnicodeEncodeError:
        fixed = [_repaired_value(text) for text in texts]
        changed = {i for i, (before, after) in enumerate(zip(texts, fixed, strict=True)) if before != after}
        return pa.array(fixed, kind), changed


def _repaired_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_repaired_value(item) for item in value]
    return value if value is None else repaired(value)


def _refuse_clashes(ours: Iterable[str], theirs: Iterable[str], prefix: str) -> None:
    clashes = sorted(set(ours) & set(theirs))
    if clashes:
        listed = ", ".join(map(repr, clashes))
        raise ConfigError(
            f"input column {listed} has the name of an output column; rename it with "
            f"`input: {{rename: {{{clashes[0]}: NEW_NAME}}}}` or give our columns a prefix with "
            f"`output: {{prefix: {prefix or 'gen'}_}}`"
        )
