"""Llama 1, 2, 3 and what is shaped like it: SmolLM, SmolLM2, TinyLlama, Yi."""

from batchgen.models.family import MODELS, Family

MODELS.register("LlamaForCausalLM")(
    Family(
        name="Llama",
        qkv_bias="config",
        output_bias="config",
        mlp_bias="config",
        gguf=("llama",),
        gguf_rope_is_interleaved=True,
    )
)
