import dataclasses
import json
import math
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import pydantic
import pytest

from batchgen.engine.messages import EngineInfo
from batchgen.errors import ConfigError, UnknownNameError
from batchgen.sampling_checks import check_engine_limits
from batchgen.sampling_params import (
    REFUSED,
    BeamSearchParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)


def test_max_tokens_has_no_hidden_limit() -> None:  # BS-13
    assert SamplingParams().max_tokens is None


@pytest.mark.parametrize(
    ("given", "becomes"), [(0, 0), (1e-6, 1e-6), (1e-5, 0.01), (0.005, 0.01), (0.01, 0.01), (0.7, 0.7)]
)
def test_low_temperatures(given: float, becomes: float) -> None:
    params = SamplingParams(temperature=given)
    assert params.temperature == becomes
    assert params.is_greedy == (becomes < 0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 16385),
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {5: 101}),
        ("seed", 1.5),
        ("stop", 5),
        ("stop", b"x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {5: None}),
        ("ignore_eos", "no"),
        ("output_kind", "delta"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", [5]),
        ("logprobs", -2),
        ("logprobs", True),
        ("logprob_token_ids", list(range(129))),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", "all"),
        ("prompt_logprob_start", -1),
        ("prompt_logprob_token_ids", "12"),
        ("flat_logprobs", 1),
        ("structured_outputs", "json"),
        ("repetition_detection", 5),
        ("thinking_token_budget", -1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("stream_interval", 0),
        ("best_of", 0),
        ("best_of", 16385),
        ("use_beam_search", "yes"),
        ("length_penalty", "x"),
        ("length_penalty", 300),
        ("early_stopping", "always"),
        ("skip_reading_prefix_cache", 1),
        ("seed", 2**64),
    ],
)
def test_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        SamplingParams(**{name: value})


def test_more_min_tokens_than_max_tokens_is_refused() -> None:  # BG-13
    with pytest.raises(ConfigError, match=r"'min_tokens' must be at most max_tokens \(3\); got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_stop_texts_need_text() -> None:
    with pytest.raises(ConfigError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_values_are_brought_to_one_form() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], seed=-1, top_k=-1, logit_bias={"7": 1})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.seed is None
    assert params.top_k == 0
    assert params.logit_bias == {7: 1.0}


def test_fields_that_are_not_offered_are_refused_by_name() -> None:
    specs = {spec.name: spec for spec in dataclasses.fields(SamplingParams)}
    assert set(specs) >= REFUSED
    for name in REFUSED:
        other = True if specs[name].default in (None, False) else 0.5
        with pytest.raises(ConfigError, match=f"'{name}' is not offered"):
            SamplingParams(**{name: other})


def test_from_mapping_knows_the_other_name_of_max_tokens() -> None:
    assert SamplingParams.from_mapping({"max_new_tokens": 9}).max_tokens == 9
    with pytest.raises(ConfigError, match="the same setting"):
        SamplingParams.from_mapping({"max_new_tokens": 9, "max_tokens": 9})


def test_from_mapping_refuses_unknown_names_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'temprature'; did you mean 'temperature'\?"):
        SamplingParams.from_mapping({"temprature": 1})


def test_to_mapping_round_trips_through_json() -> None:
    params = SamplingParams(
        n=2, best_of=4, stop=["a", "b"], bad_words="x", logit_bias={1: 2.0}, max_tokens=5, prompt_logprobs=2,
        allowed_token_ids=[1, 2], logprob_token_ids=range(3), structured_outputs={"choice": ["a", "b"]},
        repetition_detection={"max_pattern_size": 8, "min_count": 3},
    )  # fmt: skip
    stored = json.loads(json.dumps(params.to_mapping()))
    assert SamplingParams.from_mapping(stored) == params
    assert stored["structured_outputs"] == {"choice": ["a", "b"]}


def test_a_mapping_stands_for_its_part() -> None:
    schema = {"type": "object"}
    params = SamplingParams(structured_outputs={"json": schema}, repetition_detection={"max_pattern_size": 4})
    assert params.structured_outputs == StructuredOutputsParams(json=schema)
    assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=4)
    assert SamplingParams(repetition_detection={}).repetition_detection is None, "0 looks for none"
    with pytest.raises(UnknownNameError, match="'jsn'; did you mean 'json'"):
        SamplingParams(structured_outputs={"jsn": {}})


def test_structured_outputs_have_exactly_one_grammar() -> None:
    for wrong, words in [
        ({}, "got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"structural_tag": "<a>"}, "'structural_tag' is not offered"),
        ({"json": "{not json"}, "'json' is a text that is no JSON: Expecting property name .*column 2"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "'whitespace_pattern' is for json and json_object; leave",
        ),
        ({"choice": ["a"], "disable_any_whitespace": True}, "leave it out beside 'choice'"),
        ({"json_object": True, "disable_additional_properties": True}, "is for json; leave it out"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "exclude each other"),
        ({"json": [1]}, "'json' must be a JSON schema"),
        ({"regex": ""}, "'regex' must be a non-empty text"),
        ({"choice": []}, "'choice' must be a list of texts"),
        ({"choice": "yes"}, "'choice' must be a list of texts"),
        ({"json": {}, "disable_any_whitespace": 1}, "'disable_any_whitespace' must be true or false"),
    ]:
        with pytest.raises(ConfigError, match=words):
            StructuredOutputsParams(**wrong)


def test_a_pydantic_model_is_a_schema() -> None:
    class Person(pydantic.BaseModel):
        name: str

    made = StructuredOutputsParams(json=Person)
    assert made.json == Person.model_json_schema()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n": 3, "best_of": 2}, "'best_of' must be at least n"),
        ({"best_of": 2, "temperature": 0}, "'best_of' .* needs a temperature above 0"),
        ({"length_penalty": 2.0}, "'length_penalty' needs use_beam_search"),
        ({"early_stopping": "never"}, "'early_stopping' needs use_beam_search"),
        ({"use_beam_search": True}, "'use_beam_search' needs temperature: 0"),
        (
            {"thinking_token_budget": 3, "structured_outputs": {"regex": "a"}},
            "'thinking_token_budget' excludes 'structured_outputs'",
        ),
        (
            {"use_beam_search": True, "temperature": 0, "seed": 1, "top_p": 0.5, "top_k": 2, "min_p": 0.1},
            "'use_beam_search' excludes 'top_p', 'top_k', 'min_p', 'seed'",
        ),
        ({"prompt_logprob_start": 3}, "'prompt_logprob_start' needs prompt_logprobs"),
        ({"prompt_logprob_token_ids": [3]}, "'prompt_logprob_token_ids' needs prompt_logprobs"),
    ],
)
def test_fields_that_exclude_each_other_are_refused_by_name(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):  # BG-19: beams combined with drawing
        SamplingParams(**values)
    for name, value in values.items():
        SamplingParams.check_field(**{name: value})


def test_a_beam_search_is_as_wide_as_best_of_or_n() -> None:
    beams = SamplingParams(use_beam_search=True, temperature=0, n=2, best_of=5, early_stopping="never")
    assert beams.num_samples == 5
    assert SamplingParams(use_beam_search=True, temperature=0, n=2, length_penalty=0.5).num_samples == 2


def test_scores_of_a_prompt_leave_the_prefix_cache_unread() -> None:  # BG-17
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams(prompt_logprobs=0, prompt_logprob_start=9).skip_reading_prefix_cache is None
    assert (
        SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    )
    assert SamplingParams().skip_reading_prefix_cache is None


@pytest.mark.parametrize(
    ("values", "most", "words"),
    [
        ({"logprobs": 21}, 20, "'logprobs' is 21, but the engine gives at most 20"),
        ({"logprobs": -1}, 20, "'logprobs' is -1"),
        ({"prompt_logprobs": 5}, 4, "'prompt_logprobs' is 5"),
        ({"allowed_token_ids": [99, 100]}, 20, "'allowed_token_ids' has token id 100.*end at 99"),
        ({"logit_bias": {100: 1}}, 20, "'logit_bias' has token id 100"),
        ({"logprob_token_ids": [100]}, 20, "'logprob_token_ids' has token id 100"),
        ({"logprobs": 20, "logit_bias": {99: 1}}, 20, None),
        ({"logprobs": -1}, -1, None),
        ({"logprobs": -1}, 100, None),
    ],
)
def test_limits_of_the_engine(values: dict[str, object], most: int, words: str | None) -> None:  # BG-11c
    info = EngineInfo(
        model="", architecture="", max_model_len=9, vocab_size=100, eos_token_ids=(), num_blocks=1,
        block_size=16, reproducible=True, resolved={"max_logprobs": most},
    )  # fmt: skip
    if words is None:
        return check_engine_limits(SamplingParams(**values), info)
    with pytest.raises(ConfigError, match=words):
        check_engine_limits(SamplingParams(**values), info)


def test_a_budget_of_thinking_needs_a_model_that_thinks() -> None:
    info = EngineInfo(
        model="", architecture="", max_model_len=9, vocab_size=100, eos_token_ids=(), num_blocks=1,
        block_size=16, reproducible=True, resolved={}, no_thinking="there is no token '<think>'",
    )  # fmt: skip
    check_engine_limits(SamplingParams(), info)
    with pytest.raises(ConfigError, match="'thinking_token_budget': there is no token '<think>'"):
        check_engine_limits(SamplingParams(thinking_token_budget=3), info)


def test_beam_search_params_are_checked() -> None:
    assert BeamSearchParams(beam_width=2, max_tokens=3).temperature == 0
    for name in ("beam_width", "max_tokens"):
        with pytest.raises(ConfigError, match=f"'{name}' must be a whole number, 1 or more"):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: 0})


class Label(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Count(IntEnum):
    TWO = 2


def test_values_of_a_class_of_their_own_are_kept_as_plain_ones() -> None:
    # Another process, which knows no such classes, gets them.
    params = SamplingParams(
        n=Count.TWO,
        stop=[Label.GOOD],
        stop_token_ids=[Count.TWO],
        structured_outputs={"json": MappingProxyType({"enum": tuple(Label), "maxLength": Count.TWO})},
    )
    choice = StructuredOutputsParams(choice=list(Label)).choice
    assert choice is not None
    schema: Any = params.structured_outputs and params.structured_outputs.json
    assert schema == {"enum": ["good", "bad"], "maxLength": 2}
    values = [params.n, *params.stop, *params.stop_token_ids, *choice, *schema["enum"], schema["maxLength"]]
    assert [type(each) for each in values] == [int, str, int, str, str, str, str, int]


def test_a_schema_that_no_process_could_be_sent_is_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    for schema in (deep, '{"items":' * 5000 + "{}" + "}" * 5000):
        with pytest.raises(ConfigError, match="'json' is nested too deeply"):
            StructuredOutputsParams(json=schema)
    with pytest.raises(ConfigError, match="'json' must be a JSON schema"):
        StructuredOutputsParams(json={"const": object()})
