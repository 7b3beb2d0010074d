"""The engine, lora and sampling sections, made from the settings classes: no key is listed twice."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from batchgen.config import EngineConfig, LoRAConfig, engine_arg_homes
from batchgen.errors import ConfigError
from batchgen.jobs.field_types import Text, field_type
from batchgen.jobs.section import Section, refuse
from batchgen.sampling_params import (
    GREEDY_BELOW,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

# Engine settings that a job file keeps elsewhere: their name here -> the key that has them.
MOVED_ENGINE_KEYS = {
    "model": "model.path",
    "revision": "model.revision",
    "tokenizer": "model.tokenizer",
    "tokenizer_revision": "model.tokenizer_revision",
    "chat_template": "model.chat_template",
    "generation_config": "model.generation_config",
    "seed": "sampling.seed",
    "enable_lora": "lora.adapters",
    **{spec.name: f"lora.{spec.name}" for spec in fields(LoRAConfig) if spec.name != "enable_lora"},
}
MOVED_SAMPLING_KEYS = {"truncate_prompt_tokens": "prompt.truncate"}
# What a job decides itself: it always stores text, whole.
_NOT_FOR_JOBS = frozenset(
    {"output_kind", "detokenize", "stream_interval", "flat_logprobs", *MOVED_SAMPLING_KEYS}
)


def _checked(build: Callable[..., Any], name: str) -> Callable[[Any], Any]:
    """A validator: the settings class accepts this value by itself."""

    def check(value: Any) -> Any:
        try:
            build(**{name: value})
        except ConfigError as error:
            raise refuse("", str(error)) from None
        return value

    return check


def _settings_fields(cls: type, build: Callable[..., Any], left_out: frozenset[str]) -> dict[str, Any]:
    """A settings dataclass' fields as pydantic ones, each checked by the class itself."""
    hints = get_type_hints(cls)
    return {
        spec.name: (
            Annotated[field_type(hints[spec.name]), AfterValidator(_checked(build, spec.name))],
            spec.default,
        )
        for spec in fields(cls)
        if spec.name not in left_out
    }


def _engine_fields() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, cls in get_type_hints(EngineConfig).items():
        if part in set(engine_arg_homes().values()):
            found |= _settings_fields(cls, _part_builder(cls), frozenset(MOVED_ENGINE_KEYS))
    return found


def _part_builder(cls: type) -> Callable[..., Any]:
    required = {"model": "any"} if "model" in {spec.name for spec in fields(cls)} else {}
    return lambda **values: cls(**required, **values)


class PartSection(Section):
    """A sampling parameter that has keys of its own."""

    model_config = ConfigDict(populate_by_name=False)
    part: ClassVar[type]  # the class that checks it

    def value(self) -> Any:
        """It as that class."""
        names = {name: info.alias or name for name, info in type(self).model_fields.items()}
        return self.part(**{names[name]: value for name, value in self.given().items()})

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.value()
        except ConfigError as error:
            raise refuse("", str(error)) from None
        return self


def _part_section(part: type) -> type[PartSection]:
    """A section of a settings dataclass' fields."""
    hints = get_type_hints(part)
    found: dict[str, Any] = {}
    for spec in fields(part):
        # pydantic has a method of the name `json`.
        name = f"{spec.name}_" if hasattr(BaseModel, spec.name) else spec.name
        found[name] = (field_type(hints[spec.name]), Field(spec.default, alias=spec.name))
    section = create_model(f"{part.__name__}Section", __base__=PartSection, __module__=__name__, **found)
    section.part = part
    return section


def _lora_fields() -> dict[str, Any]:
    def build(**values: Any) -> LoRAConfig:
        # One slot: the settings that must be no less are looked at one by one.
        return LoRAConfig(**({"enable_lora": True, "max_loras": 1} | values))

    return _settings_fields(LoRAConfig, build, frozenset({"enable_lora"}))


PARTS = {
    "structured_outputs": _part_section(StructuredOutputsParams),
    "repetition_detection": _part_section(RepetitionDetectionParams),
}


def _sampling_fields() -> dict[str, Any]:
    return _settings_fields(SamplingParams, SamplingParams.check_field, _NOT_FOR_JOBS | set(PARTS)) | {
        name: (section | None, None) for name, section in PARTS.items()
    }


if TYPE_CHECKING:

    class _EngineFields(Section):
        pass

    class _LoraFields(Section):
        max_lora_rank: int | None = None

    class _SamplingFields(Section):
        n: int = 1
        temperature: float = 1.0
        max_tokens: int | None = None
        seed: int | None = None
        use_beam_search: bool = False
else:
    _EngineFields = create_model("_EngineFields", __base__=Section, __module__=__name__, **_engine_fields())
    _LoraFields = create_model("_LoraFields", __base__=Section, __module__=__name__, **_lora_fields())
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=Section,
        __module__=__name__,
        **_sampling_fields(),
    )


class EngineSpec(_EngineFields):
    """Engine settings under vLLM's names: every one of `EngineConfig` that no other section has."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            EngineConfig.from_engine_args(model="any", **self.given())
        except ConfigError as error:
            raise refuse("", str(error)) from None
        return self


class LoraSpec(_LoraFields):
    """The adapters that rows may name, and the engine's slots for them.

    Args:
        adapters: name -> folder or hub id.
    """

    adapters: dict[Annotated[str, Field(min_length=1)], Annotated[Text, Field(min_length=1)]] = Field(
        default_factory=dict
    )

    def engine_args(self) -> dict[str, Any]:
        """What of it the engine takes: nothing, where there are no adapters."""
        if not self.adapters:
            return {}
        return {"enable_lora": True} | {
            name: value for name, value in self.given().items() if name != "adapters"
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            EngineConfig.from_engine_args(model="any", **self.engine_args())
        except ConfigError as error:
            raise refuse("", str(error)) from None
        return self


class SamplingSpec(_SamplingFields):
    """How tokens are drawn: the fields of `SamplingParams`, and `seed_column`.

    Args:
        seed_column: an integer column with each row's own seed; without it, `seed` (default 0) is mixed with
            the row's place in the input.
    """

    seed_column: Text | None = None

    @property
    def job_seed(self) -> int:
        """The seed that is mixed with each row's place."""
        return 0 if self.seed in (None, -1) else int(self.seed or 0)

    def given_params(self) -> dict[str, Any]:
        """The `SamplingParams` fields that the job file sets."""
        return {
            name: value.value() if isinstance(value, PartSection) else value
            for name, value in self.given().items()
            if name != "seed_column"
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.seed_column is not None and "seed" in self.model_fields_set:
            raise refuse("seed", "seed_column gives every row its own seed; leave one of the two out")
        if "temperature" in self.model_fields_set and not self.use_beam_search:
            check_copies(self.n, self.temperature)
        try:
            SamplingParams(**self.given_params())
        except ConfigError as error:
            raise refuse("", str(error)) from None
        return self


def check_copies(n: int, temperature: float) -> None:
    """Refuse several samples at temperature 0: they would be copies."""
    if n > 1 and temperature < GREEDY_BELOW:
        raise refuse(
            "n", f"{n} samples at temperature {temperature:g} are {n} copies; raise temperature or set n: 1"
        )
