"""Tiny random models for tests, made with transformers' own classes: as folders, and as GGUF files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Two layers, nothing a power of two that need not be, grouped queries.
SIZES: Mapping[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}

SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_model(architecture: str = "LlamaForCausalLM", seed: int = 0, **config: Any) -> Any:
    """A transformers model with random weights, biases and norms large enough to matter, in float32.

    Args:
        architecture: name of a transformers class.
        seed: of the weights.
        **config: in place of, or beside, `SIZES`.
    """
    import transformers

    model_class = getattr(transformers, architecture)
    settings = model_class.config_class(**{**SIZES, **config})
    settings._attn_implementation = "eager"
    model = model_class(settings).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.2 * parameter.shape[1] ** -0.5))
            else:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
    return model


def write_folder(model: Any, folder: Path, **generation: Any) -> Path:
    """Save a model with a byte-level tokenizer; `generation` goes to generation_config.json."""
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with one id per byte (0 to 255) and the special tokens from 256 on."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast as HubTokenizer

    backend = Tokenizer(BPE({letter: byte for byte, letter in enumerate(_byte_letters())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer: Any = HubTokenizer(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[1]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def write_gguf(
    model: Any, path: Path, quantization: str = "F32", extra: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a tiny model as a GGUF file with the tokenizer of `write_tokenizer`.

    Args:
        model: Llama, Qwen2, Qwen3 or SmolLM3.
        path: of the file.
        quantization: storage type of the matrices, one that the gguf package can write.
        extra: more tensors, by their name in the file.
    """
    import gguf

    config = model.config
    arch = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
            "SmolLM3ForCausalLM": "smollm3"}[type(model).__name__]  # fmt: skip
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    _add_tokenizer(writer, config.vocab_size)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_in_gguf(name, tensor, config, arch).float().numpy()
        if values.ndim == 2 and quantization != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_in_gguf(name: str, tensor: Tensor, config: Any, arch: str) -> Tensor:
    """Query and key rows of llama-like files: the two halves of a head interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if arch not in ("llama", "smollm3") or projection not in heads:
        return tensor
    count = heads[projection]
    halves = tensor.view(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    module, _, parameter = name.rpartition(".")
    if module in names:
        return f"{names[module]}.{parameter}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{parameter}"


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    tokens = [*_byte_letters(), *SPECIAL_TOKENS]
    types = [1] * 256 + [3] * len(SPECIAL_TOKENS)
    # As converters do: ids without a token are padded with unused ones.
    padding = vocab_size - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"[PAD{len(tokens) + index}]" for index in range(padding))])
    writer.add_token_types(types + [5] * padding)
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def random_ids(count: int, seed: int, vocab_size: int = SIZES["vocab_size"]) -> list[int]:
    """Random token ids of a tiny model, special ones included."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return drawn
