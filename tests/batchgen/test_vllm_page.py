"""docs/vllm.md goes through every name of ours and of vLLM's, and says of each what is true."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from batchgen import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from batchgen.config import EngineConfig, engine_arg_homes
from batchgen.errors import ConfigError
from batchgen.sampling_params import REFUSED

# vLLM 0.32's own names, from its public releases.
VLLM_SAMPLING = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
    stream_interval structured_outputs logit_bias allowed_token_ids bad_words extra_args
    skip_reading_prefix_cache thinking_token_budget repetition_detection watermarking skip_clone
    routed_experts_prompt_start trace_decode_token_ids
""".split()
VLLM_GRAMMARS = """
    json regex choice grammar json_object structural_tag disable_any_whitespace
    disable_additional_properties whitespace_pattern
""".split()
VLLM_BEAMS = """
    beam_width max_tokens ignore_eos temperature length_penalty include_stop_str_in_output
    structured_outputs skip_special_tokens watermarking
""".split()
VLLM_ENGINE = """
    model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code
    allowed_local_media_path allowed_media_domains tensor_parallel_size dtype quantization revision
    tokenizer_revision chat_template seed gpu_memory_utilization cpu_offload_gb enforce_eager
    disable_custom_all_reduce hf_token hf_overrides mm_processor_kwargs pooler_config
    structured_outputs_config profiler_config attention_config kv_cache_memory_bytes
    compilation_config quantization_config logits_processors spec_method spec_model spec_tokens
    max_model_len max_num_seqs max_num_batched_tokens block_size enable_prefix_caching
    prefix_caching_hash_algo enable_chunked_prefill kv_cache_dtype pipeline_parallel_size
    data_parallel_size enable_lora max_loras max_lora_rank max_cpu_loras scheduling_policy
    long_prefill_token_threshold num_gpu_blocks_override speculative_config kv_offloading_size
    generation_config max_logprobs logprobs_mode load_format download_dir served_model_name
    async_scheduling disable_log_stats
""".split()
VLLM_METHODS = """
    generate chat enqueue enqueue_chat wait_for_completion beam_search encode embed classify score
    sleep wake_up reset_prefix_cache get_metrics get_tokenizer get_default_sampling_params
    collective_rpc apply_model
""".split()
OUR_METHODS = {name for name in vars(LLM) if not name.startswith("_")} - {"config", "info", "shutdown"}

NAMES = {
    "SamplingParams": {*VLLM_SAMPLING, *(spec.name for spec in fields(SamplingParams))},
    "StructuredOutputsParams": {*VLLM_GRAMMARS, *(spec.name for spec in fields(StructuredOutputsParams))},
    "BeamSearchParams": {*VLLM_BEAMS, *(spec.name for spec in fields(BeamSearchParams))},
    "Engine arguments": {*VLLM_ENGINE, *engine_arg_homes()},
    "Methods of LLM": {*VLLM_METHODS, *OUR_METHODS},
}
# Arguments that are known and refused with other values than the default; any will do.
OTHER_VALUE = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}


@pytest.fixture(scope="module")
def tables(repository: Path) -> dict[str, dict[str, str]]:
    """Heading -> name -> verdict."""
    text = (repository / "docs" / "vllm.md").read_text(encoding="utf-8")
    parts = re.split(r"^###? (.+)$", text, flags=re.MULTILINE)
    return {
        heading: dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", body, re.MULTILINE))
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("heading", NAMES)
def test_no_name_is_missing_and_none_is_made_up(tables: dict[str, dict[str, str]], heading: str) -> None:
    assert set(tables[heading]) == NAMES[heading]


@pytest.mark.parametrize("heading", NAMES)
def test_every_verdict_is_one_of_three(tables: dict[str, dict[str, str]], heading: str) -> None:
    for name, verdict in tables[heading].items():
        assert re.match(r"same\b|better because |not offered because ", verdict), f"{name}: {verdict}"


def not_offered(table: dict[str, str]) -> set[str]:
    return {name for name, verdict in table.items() if verdict.startswith("not offered")}


def test_what_is_not_offered_is_refused_by_name(tables: dict[str, dict[str, str]]) -> None:
    assert not_offered(tables["SamplingParams"]) == REFUSED
    assert not_offered(tables["StructuredOutputsParams"]) == {"structural_tag"}
    assert not_offered(tables["BeamSearchParams"]) == {"watermarking"}
    for name in sorted(not_offered(tables["Engine arguments"])):
        with pytest.raises(ConfigError, match=name):
            EngineConfig.from_engine_args(model="m", **{name: OTHER_VALUE.get(name, "x")})


def test_what_is_offered_is_there(tables: dict[str, dict[str, str]]) -> None:
    for name in set(tables["Engine arguments"]) - not_offered(tables["Engine arguments"]):
        assert name in engine_arg_homes() or name == "speculative_config", name
    for name, verdict in tables["Methods of LLM"].items():
        assert hasattr(LLM, name) != verdict.startswith("not offered"), name


def test_the_scheduler_has_a_verdict_for_every_rule(repository: Path) -> None:
    text = (repository / "docs" / "vllm.md").read_text(encoding="utf-8").partition("## The scheduler")[2]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text, re.MULTILINE)[1:]
    assert len(rows) > 20
    for rule, verdict in rows:
        assert re.match(r"same\b|better because |not offered because ", verdict), rule
