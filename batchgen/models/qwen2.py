"""Qwen2 and Qwen2.5: a bias on query, key and value."""

from batchgen.models.family import MODELS, Family

MODELS.register("Qwen2ForCausalLM")(
    Family(
        name="Qwen2",
        qkv_bias=True,
        windows="config",
        defaults={"sliding_window": 4096, "max_window_layers": 28},
        gguf=("qwen2",),
    )
)
