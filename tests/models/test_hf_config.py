"""config.json: Hugging Face's keys in their several spellings, and what is refused by name."""

from typing import Any

import pytest

from batchgen.errors import ModelError, UnsupportedModelError
from batchgen.models.hf_config import config_from_hf
from batchgen.models.model_config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def read(architecture: str = "LlamaForCausalLM", **keys: Any) -> ModelConfig:
    return config_from_hf({**LLAMA, "architectures": [architecture], **keys})


def test_the_plain_shape() -> None:
    config = read()
    assert (config.head_dim, config.num_kv_heads, config.max_len) == (16, 2, 128)
    assert (config.rope.theta, config.rope.dim, config.rope.kind) == (5000.0, 16, "default")
    assert config.tie_embeddings
    assert config.dtype == "bfloat16"
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
)
def test_rope_scaling_in_old_and_new_spelling(keys: dict[str, Any]) -> None:
    rope = read(**keys).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5000.0)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su"])
def test_other_rope_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'.*built: default, linear, llama3"):
        read(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_a_scaling_without_its_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match="'llama3' has no 'low_freq_factor'"):
        read(rope_scaling={"rope_type": "llama3", "factor": 8.0})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not built .built: .*Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "'mrope'"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3"),
        ({"head_dim": 15}, "15 rotated dimensions"),
    ],
)
def test_what_is_not_built_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf({**LLAMA, **keys})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "architectures"])
def test_a_missing_key_is_named(key: str) -> None:
    data = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ModelError, match=key):
        config_from_hf(data, "config.json")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": "x"}, "num_kv_heads must be a whole number"),
        ({"head_dim": "16"}, "wrong kind|head_dim"),
        ({"max_position_embeddings": -5}, "max_len must be a whole number"),
        ({"rms_norm_eps": "x"}, "config.json: a value of the wrong kind"),
        ({"rope_parameters": [1]}, "config.json: a value of the wrong kind"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope theta must be a number above 0; got nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope factor must be a number above 0"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "x"}, "'sliding_window' must be"),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error_of_ours(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf({**LLAMA, **keys})


class TestWindows:
    """An absent key means the family's own default; null means none."""

    def test_mistral(self) -> None:
        assert read("MistralForCausalLM").windows == (4096,) * 4
        assert read("MistralForCausalLM", sliding_window=None).windows == (None,) * 4
        assert read("MistralForCausalLM", sliding_window=32).windows == (32,) * 4

    def test_qwen2(self) -> None:
        assert read("Qwen2ForCausalLM", sliding_window=32).windows == (None,) * 4
        windows = {"use_sliding_window": True, "sliding_window": 32}
        assert read("Qwen2ForCausalLM", **windows, max_window_layers=3).windows == (None, None, None, 32)
        kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
        assert read("Qwen2ForCausalLM", **windows, layer_types=kinds).windows == (32, None, None, 32)
        with pytest.raises(UnsupportedModelError, match="layer_types"):
            read("Qwen2ForCausalLM", **windows, layer_types=["linear_attention"] * 4)


def test_smollm3_leaves_the_rotation_out_of_some_layers() -> None:
    keys = {name: value for name, value in LLAMA.items() if name not in ("tie_word_embeddings", "rope_theta")}
    config = config_from_hf({**keys, "architectures": ["SmolLM3ForCausalLM"]})
    assert config.uses_rope == (True, True, True, False)
    assert config.tie_embeddings, "the family's default where config.json does not say"
    assert config.rope.theta == 2_000_000.0
    assert read("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0]).uses_rope == (False, True, True, False)


def test_biases() -> None:
    assert read("Qwen2ForCausalLM").qkv_bias
    assert not read("Qwen2ForCausalLM", attention_bias=True).output_bias
    config = read(attention_bias=True, mlp_bias=True)
    assert config.qkv_bias
    assert config.output_bias
    assert config.mlp_bias
