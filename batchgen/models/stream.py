"""The residual stream of a decoder: which modules read it, behind which norm; which write it. No torch."""

# Names in the Hugging Face form; a linear layer's input comes from the norm beside it.
_READERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
FINAL_NORM, HEAD, TABLE = "model.norm", "lm_head", "model.embed_tokens"


def norm_before(module: str) -> str | None:
    """The norm whose result a linear module multiplies; None: it reads something else than the stream."""
    if module == HEAD:
        return FINAL_NORM
    place, in_layer = _split(module)
    return f"{place}.{_READERS[in_layer]}" if in_layer in _READERS else None


def writes_stream(module: str) -> bool:
    """Whether what a linear module gives is added to the stream."""
    return _split(module)[1] in _WRITERS


def is_norm_of_stream(module: str) -> bool:
    """Whether a module norms the stream for linear modules behind it."""
    return module == FINAL_NORM or _split(module)[1] in _READERS.values()


def _split(module: str) -> tuple[str, str]:
    """A layer and the module in it: model.layers.3 and mlp.up_proj; nothing in it for other modules."""
    parts = module.split(".")
    if parts[:2] != ["model", "layers"]:
        return module, ""
    return ".".join(parts[:3]), ".".join(parts[3:])
