"""Mistral 7B and its successors of the same shape; the first ones have a sliding window on every layer."""

from batchgen.models.family import MODELS, Family

MODELS.register("MistralForCausalLM")(
    Family(name="Mistral", windows="all", defaults={"sliding_window": 4096, "num_key_value_heads": 8})
)
