import dataclasses
import pickle

import pytest

from batchgen.config import EngineConfig, NgramSettings, engine_arg_homes
from batchgen.errors import ConfigError, UnknownNameError


def test_flat_names_reach_their_parts_and_come_back() -> None:
    config = EngineConfig.from_engine_args(model="m", block_size=32, max_num_seqs=7, num_threads=2)
    assert (config.cache.block_size, config.scheduler.max_num_seqs, config.model.num_threads) == (32, 7, 2)
    assert EngineConfig.from_engine_args(**config.to_engine_args()) == config


def test_every_flat_name_has_one_home() -> None:
    parts = [part.type for part in dataclasses.fields(EngineConfig)]
    counted = sum(len(dataclasses.fields(part)) for part in parts)
    assert len(engine_arg_homes()) == counted


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"engine: unknown setting 'blok_size'; did you mean 'block_size'\?"
    ):
        EngineConfig.from_engine_args(model="m", blok_size=16)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("block_size", 24, "a multiple of 16"),
        ("block_size", 0, "a multiple of 16"),
        ("max_num_seqs", 0, "1 or more"),
        ("max_num_seqs", True, "1 or more"),
        ("max_model_len", -1, "1 or more"),
        ("gpu_memory_utilization", 0, "above 0"),
        ("gpu_memory_utilization", 1.5, "at most 1"),
        ("dtype", "int8", "auto, float32"),
        ("kernel_backend", "cuda", "reference, cpu or gpu"),
        ("scheduling_policy", "lifo", "fcfs or priority"),
        ("preemption_mode", "drop", "recompute or swap"),
        ("model", "", "a folder"),
        ("revision", 5, "a text"),
        ("block_size", "16", "a multiple of 16"),
        ("gpu_memory_utilization", "all", "above 0"),
        ("seed", "x", "a whole number"),
        ("reproducible", "yes", "true, false or null"),
        ("enable_prefix_caching", "yes", "true or false"),
        ("num_threads", 10**9, "1 to 1024"),
        ("swap_space", -1, "a number of GiB"),
        ("swap_space", "4", "a number of GiB"),
        ("delay_factor", -0.5, "a number, 0 or more"),
        ("long_prefill_token_threshold", -1, "a number of tokens"),
        ("enable_chunked_prefill", "no", "true or false"),
        ("max_logprobs", -2, "0 or more, or -1 for no limit"),
        ("logprobs_mode", "raw", "raw_logprobs, processed_logprobs, raw_logits or processed_logits"),
        ("reasoning_config", "think", "a mapping"),
        ("disable_log_stats", "no", "true or false"),
        ("kv_cache_dtype", "fp4", "auto, float32, float16, bfloat16, int8 or fp8"),
        ("quantization", "awq", "auto, int8, fp8, int4, gguf or null"),
    ],
)
def test_value_out_of_range_is_refused_by_name(name: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' must be .*{rule}"):
        EngineConfig.from_engine_args(**{"model": "m", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("trust_remote_code", True),
    ],
)
def test_what_is_not_built_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*not built yet"):
        EngineConfig.from_engine_args(**{"model": "m", name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle"}, "speculative.method='eagle'.*only 'ngram'"),
        ({"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"num_speculative_tokens": 0}, "'speculative.num_speculative_tokens' must be from 1 to 64"),
        ({"num_speculative_tokens": "3"}, "'speculative.num_speculative_tokens' must be"),
        (
            {"prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "'speculative.prompt_lookup_min' must be from 1 to 2",
        ),
        ("ngram", "'speculative' must be a mapping"),
    ],
)
def test_wrong_settings_of_speculation_are_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_engine_args(model="m", speculative=given)


def test_speculation_by_either_name() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    config = EngineConfig.from_engine_args(model="m", speculative_config=given)
    assert config == EngineConfig.from_engine_args(model="m", speculative=given)
    assert config.speculative.ngram == NgramSettings(
        num_speculative_tokens=3, prompt_lookup_max=1, prompt_lookup_min=1
    )
    assert EngineConfig.from_engine_args(model="m").speculative.ngram is None
    with pytest.raises(ConfigError, match="the same setting"):
        EngineConfig.from_engine_args(model="m", speculative_config=given, speculative=given)


def test_with_values_changes_a_copy() -> None:
    config = EngineConfig.from_engine_args(model="m")
    changed = config.with_values(block_size=48, max_num_seqs=3)
    assert (changed.cache.block_size, changed.scheduler.max_num_seqs) == (48, 3)
    assert config.cache.block_size == 16


def test_config_is_frozen_and_picklable() -> None:
    config = EngineConfig.from_engine_args(model="m", seed=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.seed = 6  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(("name", "value"), [("quantization", "int8"), ("reproducible", True)])
@pytest.mark.parametrize(
    ("other", "wrong"), [("dtype", "bfloat16"), ("dtype", "float16"), ("device", "cuda")]
)
def test_settings_that_are_built_for_a_cpu_exclude_others(
    name: str, value: object, other: str, wrong: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'=.*not for {other}='{wrong}'; leave one of the two out"):
        EngineConfig.from_engine_args(model="m", **{name: value, other: wrong})
    EngineConfig.from_engine_args(model="m", **{name: value, "dtype": "float32", "device": "cpu"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_lora": "yes"}, "'enable_lora' must be true or false"),
        ({"max_loras": 0}, "'max_loras' must be 1 or more"),
        ({"max_lora_rank": 513}, "'max_lora_rank' must be from 1 to 512"),
        ({"max_cpu_loras": 7}, "'max_cpu_loras'=7: less than max_loras=8"),
    ],
)
def test_wrong_settings_of_adapters_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_engine_args(model="m", **given)
