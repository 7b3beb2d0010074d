"""Names that users know from elsewhere are refused with what to do; mistyped ones with the nearest name."""

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from batchgen import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from batchgen.config import EngineConfig, engine_arg_homes
from batchgen.errors import ConfigError, UnknownNameError
from batchgen.foreign_names import (
    ASYNC_METHODS,
    ENGINE_ARGUMENTS,
    GRAMMAR_OPTIONS,
    METHODS,
    SAMPLING_PARAMETERS,
)
from batchgen.sampling_params import RepetitionDetectionParams


@pytest.mark.parametrize("name", sorted(ENGINE_ARGUMENTS))
def test_an_engine_argument_of_elsewhere_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(UnknownNameError) as refused:
        EngineConfig.from_engine_args("LLM", model="m", **{name: "x"})
    assert str(refused.value) == f"LLM: setting {name!r} is not offered: {ENGINE_ARGUMENTS[name]}"


@pytest.mark.parametrize("name", sorted(SAMPLING_PARAMETERS))
def test_a_sampling_parameter_of_elsewhere_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not offered: "):
        SamplingParams(**{name: 1})


def test_no_name_of_ours_is_called_foreign() -> None:
    assert not set(ENGINE_ARGUMENTS) & set(engine_arg_homes())
    assert not set(SAMPLING_PARAMETERS) & {spec.name for spec in fields(SamplingParams)}
    assert not set(GRAMMAR_OPTIONS) & {spec.name for spec in fields(StructuredOutputsParams)}


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (SamplingParams, {"temprature": 1}, "unknown sampling parameter 'temprature'; did you mean 'temp"),
        (
            StructuredOutputsParams,
            {"jsn": {}},
            "unknown field of structured_outputs 'jsn'; did you mean 'json'",
        ),
        (
            StructuredOutputsParams,
            {"json": {}, "backend": "x"},
            "'backend' is not offered: there is one backend",
        ),
        (RepetitionDetectionParams, {"max_patern_size": 3}, "did you mean 'max_pattern_size'"),
        (BeamSearchParams, {"beam_width": 2, "max_tokens": 3, "beams": 4}, "unknown field of a beam search"),
    ],
)
def test_a_mistyped_keyword_is_answered_with_the_nearest(cls: Any, given: Any, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        cls(**given)


def test_a_draft_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'model' is not offered: draft models are not built yet"):
        EngineConfig.from_engine_args(
            model="m", speculative_config={"model": "x", "num_speculative_tokens": 3}
        )


def test_checked_classes_are_plain_dataclasses_otherwise() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert replace(params, temperature=0.7) == SamplingParams(temperature=0.7, stop=["a"])
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(TypeError, match="missing"):
        BeamSearchParams(beam_width=2)  # type: ignore[call-arg]


def test_methods_of_elsewhere_are_refused_with_what_to_do() -> None:
    with LLM("echo:") as llm:
        for name, instead in METHODS.items():
            with pytest.raises(AttributeError) as refused:
                getattr(llm, name)
            assert str(refused.value) == f"LLM.{name} is not offered: {instead}"
        with pytest.raises(AttributeError, match="'LLM' object has no attribute 'genrate'"):
            llm.genrate  # type: ignore[attr-defined]  # noqa: B018
        assert not hasattr(llm, "__array__")  # numpy and others ask for such names


def test_no_method_of_ours_is_called_foreign() -> None:
    assert not [name for name in METHODS if hasattr(LLM, name)]
    assert not [name for name in ASYNC_METHODS if hasattr(AsyncLLM, name)]
