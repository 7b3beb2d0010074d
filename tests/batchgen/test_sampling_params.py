import dataclasses
import math

import pytest

from batchgen.errors import ConfigError, UnknownNameError
from batchgen.sampling_params import REFUSED, SamplingParams


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


def test_fields_that_are_not_built_are_refused_by_name() -> None:
    specs = {spec.name: spec for spec in dataclasses.fields(SamplingParams)}
    assert set(specs) >= REFUSED
    for name in REFUSED:
        other = True if specs[name].default in (None, False) else 0.5
        with pytest.raises(ConfigError, match=f"'{name}' is not built yet"):
            SamplingParams(**{name: other})


def test_from_mapping_knows_the_other_name_of_max_tokens() -> None:
    assert SamplingParams.from_mapping({"max_new_tokens": 9}).max_tokens == 9
    with pytest.raises(ConfigError, match="the same setting"):
        SamplingParams.from_mapping({"max_new_tokens": 9, "max_tokens": 9})


def test_from_mapping_refuses_unknown_names_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'temprature'; did you mean 'temperature'\?"):
        SamplingParams.from_mapping({"temprature": 1})


def test_to_mapping_round_trips() -> None:
    params = SamplingParams(n=2, stop=["a", "b"], logit_bias={1: 2.0}, max_tokens=5)
    assert SamplingParams.from_mapping(params.to_mapping()) == params
