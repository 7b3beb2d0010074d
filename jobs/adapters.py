"""A job's adapters: their files checked before the model loads, their loading, and the one of a row."""

from collections.abc import Collection, Mapping

import pyarrow as pa

from batchgen.config import MOST_LORA_RANK
from batchgen.engine.client import EngineClient
from batchgen.errors import CapacityError, ConfigError, ModelError, SourceError, nearest
from batchgen.jobs.events import EventLog
from batchgen.jobs.messages import is_text_type
from batchgen.jobs.output_state import display_path
from batchgen.jobs.progress import Reporter
from batchgen.jobs.prompt_text import need_column
from batchgen.jobs.row import Row
from batchgen.jobs.row_values import RowReader
from batchgen.jobs.sections import PromptSpec
from batchgen.jobs.spec import JobSpec
from batchgen.jobs.template import RowTemplateError
from batchgen.lora.adapter_facts import AdapterFacts, check_adapter
from batchgen.outputs import FailureCode
from batchgen.quantities import counted

# Adapters that the start names; the events have all.
_MOST_SHOWN = 10


def check_adapters(spec: JobSpec) -> dict[str, AdapterFacts]:
    """Read every adapter of the job file, and give those that a row may use.

    Raises:
        ConfigError: a line for each adapter that cannot be used, with its place, its name and what is wrong.
    """
    found: dict[str, AdapterFacts] = {}
    problems = []
    for name, path in spec.lora.adapters.items():
        try:
            found[name] = check_adapter(spec.located(path), spec.base_dir)
            _check_rank(found[name].max_rank, spec.lora.max_lora_rank)
        except (ConfigError, ModelError) as error:
            problems.append(_about(spec, name, error))
    if problems:
        header = f"{len(problems)} adapters cannot be used\n" if len(problems) > 1 else ""
        raise ConfigError(header + "\n".join(problems))
    if spec.prompt.adapter_column is not None:
        return found
    return {name: facts for name, facts in found.items() if name == spec.prompt.adapter}


def _check_rank(rank: int, most: int | None) -> None:
    if rank > MOST_LORA_RANK:
        raise ConfigError(f"has rank {rank}; the kernels take ranks up to {MOST_LORA_RANK}")
    if most is not None and rank > most:
        raise ConfigError(
            f"has rank {rank} (the largest of r and rank_pattern), more than lora.max_lora_rank {most}; set "
            f"lora.max_lora_rank: {rank}, or leave it out for no limit"
        )


def _about(spec: JobSpec, name: str, error: Exception) -> str:
    said = str(error).removeprefix(f"adapter {name!r}: ")
    return f"{spec.place('lora', 'adapters', name)}lora.adapters.{name}: {said}"


def load_adapters(
    spec: JobSpec,
    adapters: Mapping[str, AdapterFacts],
    engine: EngineClient,
    reporter: Reporter,
    events: EventLog,
) -> None:
    """Have the engine load adapters under their names; one that does not fit the model is refused.

    Args:
        spec: the job.
        adapters: of `check_adapters`.
        engine: gets them.
        reporter: told of each.
        events: logs each.

    Raises:
        ConfigError, ModelError, CapacityError: the engine refuses one; with its place and name.
    """
    for number, (name, facts) in enumerate(adapters.items()):
        try:
            loaded = engine.load_adapter(name, str(facts.path))
        except (ConfigError, ModelError, CapacityError) as error:
            kind = ConfigError if isinstance(error, ConfigError) else type(error)
            raise kind(_about(spec, name, error)) from error
        if number < _MOST_SHOWN:
            modules = counted(facts.num_modules, "module")
            reporter.say(f"adapter {name}: rank {facts.max_rank}, {modules} ({display_path(facts.path)})")
        for warning in loaded.warnings:
            reporter.say(f"adapter {name}: {warning}")
        events.put(
            "adapter",
            name=name,
            path=str(facts.path),
            rank=facts.max_rank,
            num_modules=facts.num_modules,
            content_hash=facts.content_hash,
            warnings=list(loaded.warnings),
        )
    if len(adapters) > _MOST_SHOWN:
        reporter.say(f"and {len(adapters) - _MOST_SHOWN:,} more adapters")


class AdapterChoice:
    """Which adapter a row asks for; pure and thread-safe.

    Args:
        prompt: the job file's section.
        names: of the adapters that there are.
        schema: the input's columns.
        is_typed: whether the input declares its types.

    Raises:
        SourceError: the column is not there, or holds no text.
    """

    def __init__(self, prompt: PromptSpec, names: Collection[str], schema: pa.Schema, *, is_typed: bool):
        self._for_all, self._names = prompt.adapter, frozenset(names)
        self._column = column = prompt.adapter_column
        self._reader = None
        if column is not None:
            need_column(column, "prompt.adapter_column", schema)
            kind = schema.field(column).type
            if is_typed and not is_text_type(kind):
                raise SourceError(
                    f"prompt.adapter_column: column {column!r} is {kind}, not names of adapters"
                )
            self._reader = RowReader((column,), schema, None)

    def of(self, row: Row) -> str | None:
        """The name, or None for the model alone.

        Raises:
            RowTemplateError: the cell names no adapter.
        """
        if self._reader is None or self._column is None:
            return self._for_all
        name = self._reader.raw(row, self._column)
        if name is None or name == "":
            return None
        if isinstance(name, str) and name in self._names:
            return name
        guess = nearest(name, self._names) if isinstance(name, str) else None
        hint = f"; did you mean {guess!r}?" if guess else ""
        message = f"column {self._column!r} holds {name!r:.80}, which is not in lora.adapters{hint}"
        raise RowTemplateError(FailureCode.UNKNOWN_ADAPTER, message)
