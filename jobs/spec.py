"""JobSpec: a whole job as one strict, frozen object; read from a job file, a mapping and --set overrides."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from batchgen.config import EngineConfig
from batchgen.errors import ConfigError, InputError, ModelError, TemplateError, nearest
from batchgen.jobs.field_types import Int
from batchgen.jobs.output_folder import check_writable
from batchgen.jobs.section import refuse
from batchgen.jobs.sections import InputSpec, ModelSpec, OutputSpec, PromptSpec, rooted
from batchgen.jobs.settings_sections import EngineSpec, LoraSpec, SamplingSpec
from batchgen.jobs.spec_errors import explain
from batchgen.jobs.yaml_file import YamlDocument, parse_yaml, read_yaml

_IN_MEMORY = "job"
# The key that a message begins with.
_KEY = re.compile(r"(?:model|engine|lora|input|prompt|sampling|output)(?:\.\w+)+")
# The engine setting that a message of the engine begins with; it knows no sections.
_SETTING = re.compile(r"(\w+)[:=]")
_Spec = TypeVar("_Spec", bound="JobSpec")


def _bare_model(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _empty_section(value: Any) -> Any:
    return {} if value is None else value


class JobSpec(BaseModel):
    """Everything a job is: model, engine, lora, input, prompt, sampling, output.

    Args:
        limit: run only the first rows of the input.
        base_dir: folder that relative paths start from; a job file's own.
        notes: remarks for the user about how the job file was read.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    model: Annotated[ModelSpec, BeforeValidator(_bare_model)]
    engine: Annotated[EngineSpec, BeforeValidator(_empty_section)] = EngineSpec()
    lora: Annotated[LoraSpec, BeforeValidator(_empty_section)] = LoraSpec()
    input: InputSpec
    prompt: PromptSpec
    sampling: Annotated[SamplingSpec, BeforeValidator(_empty_section)] = SamplingSpec()
    output: OutputSpec
    limit: Annotated[Int, Field(ge=1)] | None = None
    base_dir: Path = Path(".")
    notes: tuple[str, ...] = ()

    _document: YamlDocument = PrivateAttr(default_factory=lambda: YamlDocument(_IN_MEMORY))

    @classmethod
    def from_mapping(
        cls,
        data: Mapping[str, Any],
        base_dir: str | Path = ".",
        *,
        overrides: Sequence[str] = (),
        limit: int | None = None,
        output: str | Path | None = None,
    ) -> Self:
        """Build from plain values, with the checks of a job file; the other arguments as in `load_spec`.

        Raises:
            ConfigError: every mistake that was found, each with its key, value and nearest valid name.
        """
        document = YamlDocument(_IN_MEMORY, data=deepcopy(dict(data)))
        return _build(cls, document, Path(base_dir), overrides, limit, output)

    def with_overrides(
        self, overrides: Sequence[str] = (), *, limit: int | None = None, output: str | Path | None = None
    ) -> Self:
        """A copy with some settings changed; the arguments as in `load_spec`."""
        given = self.model_dump(by_alias=True, exclude_unset=True, exclude={"base_dir", "notes"})
        return self.from_mapping(given, self.base_dir, overrides=overrides, limit=limit, output=output)

    @property
    def output_dir(self) -> Path:
        """The output folder, absolute."""
        return rooted(self.output.path, self.base_dir).absolute()

    def engine_config(self) -> EngineConfig:
        """The engine's settings; local model paths start from the job file's folder."""
        model = self.model.model_dump(exclude={"path", "tokenizer", "chat_template"})
        return EngineConfig.from_engine_args(
            model=self.located(self.model.path),
            tokenizer=None if self.model.tokenizer is None else self.located(self.model.tokenizer),
            chat_template=self.chat_template_text(),
            **model,
            **self.engine.given(),
            **self.lora.engine_args(),
        )

    def located(self, model: str) -> str:
        """A model's name as the engine takes it: an existing local path becomes absolute, all else stays."""
        path = rooted(model, self.base_dir)
        return str(path.absolute()) if path.exists() else model

    def chat_template_text(self) -> str | None:
        """The chat template that replaces the model's own: the file's text, or what the job file holds.

        Raises:
            ConfigError: it names a file that is not there.
        """
        template = self.model.chat_template
        if template is None or "{" in template or "\n" in template:
            return template
        path = rooted(template, self.base_dir)
        try:
            return path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat template file {path}: {error}") from None

    def place(self, *path: str | int) -> str:
        """Where that key stands, as in "job.yaml:12: " before a message; "" in a job that is no file's."""
        place = self._document.place(path)
        return "" if place == _IN_MEMORY else f"{place}: "

    @contextmanager
    def placing_errors(self, section: str = "input") -> Iterator[None]:
        """Within it, an error about what the job file names gets the file's name and line put before it.

        Args:
            section: whose line it is when the error names no key; of an error about a template, the prompt's,
                of one about the model's files, the model's.

        Raises:
            InputError, ConfigError, ModelError: what was raised inside, with the place.
        """
        try:
            yield
        except (InputError, ModelError) as error:
            section = "prompt" if isinstance(error, TemplateError) else section
            section = "model" if isinstance(error, ModelError) else section
            raise type(error)(self._with_place(str(error), section)) from error
        except ConfigError as error:
            raise ConfigError(self._with_place(str(error), section)) from error

    def _with_place(self, message: str, section: str) -> str:
        setting = _SETTING.match(message) if section == "engine" else None
        if setting and setting[1] in EngineSpec.model_fields:
            message = f"engine.{message}"
        elif setting and setting[1] in LoraSpec.model_fields:
            message = f"lora.{message}"
        named = _KEY.match(message)
        keys = (named[0] if named else section).split(".")
        path = tuple(int(key) if key.isdecimal() else key for key in keys)
        return f"{self.place(*path)}{message}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.chat_template_text()
        except ConfigError as error:
            raise refuse("model.chat_template", str(error)) from None
        _check_adapter_names(self.prompt, self.lora.adapters)
        problem = check_writable(self.output_dir)
        if problem is not None:
            raise refuse("output.path", problem)
        return self


def _check_adapter_names(prompt: PromptSpec, adapters: Mapping[str, str]) -> None:
    """Refuse a prompt section that asks for an adapter that is not there."""
    if prompt.adapter is not None and prompt.adapter not in adapters:
        guess = nearest(prompt.adapter, adapters)
        known = f"there are: {', '.join(sorted(adapters))}" if adapters else "it names none; add it there"
        hint = f"did you mean {guess!r}?" if guess else known
        raise refuse("prompt.adapter", f"no adapter {prompt.adapter!r} in lora.adapters; {hint}")
    if prompt.adapter_column is not None and not adapters:
        raise refuse("prompt.adapter_column", "lora.adapters names no adapter; add those that cells may name")


def load_spec(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    limit: int | None = None,
    output: str | Path | None = None,
) -> JobSpec:
    """Read and check a job file.

    Args:
        path: the YAML file. Relative paths in it start from its folder.
        overrides: "section.key=value" texts, the value in YAML; they win over the file, later over earlier.
        limit: run only the first rows; wins over the file.
        output: output folder, relative to the working directory; wins over the file.

    Raises:
        ConfigError: a line for each mistake, such as "job.yaml:12: sampling.temprature: unknown key; did you
            mean 'temperature'?".
    """
    document = read_yaml(Path(path), str(path))
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        raise ConfigError(f"{path}: a job file is a mapping of sections (model, input, prompt, output, ...)")
    return _build(JobSpec, document, Path(path).absolute().parent, overrides, limit, output)


def _override(document: YamlDocument, override: str) -> None:
    keys, equals, text = override.partition("=")
    place = f"--set {override}"
    path = tuple(key.strip() for key in keys.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{place}: write it as section.key=value")
    try:
        value = parse_yaml(text, place)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; the value is YAML: put quotes inside ('\"...\"') if it is text"
        ) from None
    is_bare_model = path == ("model",) and not isinstance(value.data, dict)
    document.put(("model", "path") if is_bare_model else path, value, place)


def _build(
    cls: type[_Spec],
    document: YamlDocument,
    base_dir: Path,
    overrides: Sequence[str],
    limit: int | None,
    output: str | Path | None,
) -> _Spec:
    if isinstance(document.data.get("model"), str):
        document.data["model"] = {"path": document.data["model"]}
    for override in overrides:
        _override(document, override)
    if limit is not None:
        document.put(("limit",), YamlDocument("--limit", data=limit), "--limit")
    if output is not None:
        folder = YamlDocument("--output", data=str(Path(output).absolute()))
        document.put(("output", "path"), folder, "--output")
    return _validated(cls, document, base_dir.absolute())


def _validated(cls: type[_Spec], document: YamlDocument, base_dir: Path) -> _Spec:
    data, notes = _with_aliases(document)
    reserved = [key for key in ("base_dir", "notes") if key in data]
    values = {key: value for key, value in data.items() if key not in reserved}
    problems = [f"{document.place((key,))}: {key}: unknown key" for key in reserved]
    spec = None
    try:
        spec = cls.model_validate(values | {"base_dir": base_dir, "notes": notes})
    except ValidationError as error:
        problems += explain(error, document, cls)
    if spec is None or problems:
        listed = "\n".join(problems)
        header = f"{document.name}: {len(problems)} mistakes\n" if len(problems) > 1 else ""
        raise ConfigError(header + listed)
    spec._document = document
    return spec


def _with_aliases(document: YamlDocument) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The data with `max_new_tokens` under its standard name, and the remark that says so."""
    data: dict[str, Any] = document.data
    sampling = data.get("sampling")
    if not isinstance(sampling, Mapping) or "max_new_tokens" not in sampling or "max_tokens" in sampling:
        return data, ()
    renamed = {"max_tokens" if key == "max_new_tokens" else key: value for key, value in sampling.items()}
    document.places[("sampling", "max_tokens")] = document.place(("sampling", "max_new_tokens"))
    return data | {"sampling": renamed}, ("sampling.max_new_tokens is read as sampling.max_tokens",)
