"""SmolLM3: every fourth layer has no rotation."""

from batchgen.models.family import MODELS, Family

MODELS.register("SmolLM3ForCausalLM")(
    Family(
        name="SmolLM3",
        qkv_bias="config",
        output_bias="config",
        mlp_bias="config",
        windows="config",
        skips_rope=True,
        defaults={
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "num_key_value_heads": 4,
        },
        gguf=("smollm3",),
        gguf_rope_is_interleaved=True,
    )
)
