"""Qwen3: each head of query and key is normed."""

from batchgen.models.family import MODELS, Family

MODELS.register("Qwen3ForCausalLM")(
    Family(
        name="Qwen3",
        qkv_bias="config",
        output_bias="config",
        qk_norm=True,
        windows="config",
        defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        gguf=("qwen3",),
    )
)
