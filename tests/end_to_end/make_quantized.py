"""Makes checkpoints with the tools that publish them, and beside each what the tool itself reads in it.

    python make_quantized.py MODEL FOLDER [--only WORD ...]

MODEL is a folder of float weights, or tiny-llama or tiny-qwen2: random ones made here. FOLDER gets, for each
recipe, the checkpoint MODEL-RECIPE and MODEL-RECIPE.safetensors: prompts, float32 logits and greedy tokens of
transformers' model with the weights that the tool decodes, and some of these weights. Then, with FOLDER in
BATCHGEN_QUANTIZED_BY_TOOLS, test_quantized_by_tools.py holds batchgen to all of them.

The tools want packages of different versions: run it in an environment of each, with the same FOLDER. Recipes
of a tool that cannot be imported are named and skipped (GPTQ's and AWQ's of auto-round are read by
gptqmodel). It imports nothing of batchgen.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from quantized_tools import (
    Recipe,
    Weights,
    auto_round,
    bitsandbytes,
    deepseek,
    float_model,
    gptqmodel,
    llmcompressor,
    stored_tensors,
    torchao,
)
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = (
    "The history of all hitherto existing society is",
    "def fibonacci(n):\n",
    "Water boils at",
    "Größe und Gewicht von Elefanten:",
)
NUM_TOKENS = 32


def main() -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than what it compiles
    os.environ.setdefault("AR_ALLOW_W8_ASYM", "1")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="recipes whose names hold one of these words")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.folder / options.model if options.model in TINY else Path(options.model)
    if options.model in TINY and not model.exists():
        write_tiny(options.model, model)
    missing: set[str] = set()
    failed: list[str] = []
    for name, recipe in recipes(divides_by_128=options.model in TINY).items():
        out = options.folder / f"{options.model if options.model in TINY else 'model'}-{name}"
        if (options.only and not any(word in name for word in options.only)) or expected_file(out).exists():
            continue
        wanted = [tool for tool in (recipe.tool, recipe.reader) if tool]
        absent = {tool for tool in wanted if importlib.util.find_spec(tool.replace("-", "_")) is None}
        missing |= absent
        if absent:
            continue
        version = importlib.metadata.version(recipe.tool)
        begin = time.monotonic()
        try:
            if not (out / "config.json").exists():
                recipe.make(model, out)
            save_expected(model, out, recipe, f"{recipe.tool} {version}")
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"tools that are missing, and skipped: {', '.join(sorted(missing)) or 'none'}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def expected_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.safetensors")


@torch.no_grad()
def save_expected(model: Path, out: Path, recipe: Recipe, tool: str) -> None:
    """Put the weights that the tool reads into the float model, and save what it computes with them."""
    made = float_model(model)
    weights = recipe.read(float_model(model), out)
    assert weights, "the tool reads no quantized weight"
    tensors = made.state_dict()
    for name, tensor in stored_tensors(out).items():
        if name in tensors and name.removesuffix(".weight") not in weights:
            tensors[name].copy_(tensor)  # norms, biases and what was left in floats
    for module, weight in weights.items():
        tensors[f"{module}.weight"].copy_(weight)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(out)
    made.generation_config.eos_token_id = None  # every text has its full length
    expected: Weights = {}
    for number, text in enumerate(TEXTS):
        prompt = torch.tensor([tokenizer(text)["input_ids"]])
        greedy = made.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS,
            repetition_penalty=1.0,
        )  # fmt: skip
        # Logits of what was generated too, so that many positions are compared.
        expected[f"ids.{number}"], expected[f"length.{number}"] = greedy[0], torch.tensor(prompt.shape[1])
        expected[f"logits.{number}"] = made(greedy).logits[0].contiguous()
    ends = (".layers.0.", f".layers.{made.config.num_hidden_layers - 1}.", "lm_head")
    for module, weight in weights.items():
        if any(end in f".{module}" for end in ends):
            expected[f"weight.{module}"] = weight.to(torch.float32).contiguous()
    notes = {"tool": tool, "rounds_inputs": json.dumps(recipe.rounds_inputs)}
    save_file(expected, expected_file(out), metadata=notes)


TINY: dict[str, dict[str, Any]] = {
    "tiny-llama": {"attention_bias": False},
    "tiny-qwen2": {"rope_theta": 10000.0},
}


def write_tiny(name: str, folder: Path) -> None:
    """A random model whose sizes divide by 128, with biases that matter, and a tokenizer of bytes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = ["<|end|>", *(f"<|{number}|>" for number in range(63))]
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate([*letters, *others])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(
        folder
    )
    kind = {"tiny-llama": transformers.LlamaConfig, "tiny-qwen2": transformers.Qwen2Config}[name]
    config = kind(
        vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=256, pad_token_id=256,
        bos_token_id=None,
        **TINY[name],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.0 if "embed" in name else 1.2 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.to(torch.bfloat16).save_pretrained(folder)


INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def integers(bits: int, group_size: int | None = 64, **settings: Any) -> dict[str, Any]:
    strategy = "group" if group_size else "channel"
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
    }
    return {"weights": weights | settings}


def recipes(*, divides_by_128: bool) -> dict[str, Recipe]:
    """By name; fewer for a real model, whose layers take their time."""
    found: dict[str, Recipe] = {}
    sizes = [(bits, 64) for bits in (2, 3, 4, 8)] + ([(4, 32), (4, -1), (3, 32)] if divides_by_128 else [])
    for bits, size in sizes:
        for sym in (True, False):
            name = f"{bits}bit-g{size}-{'sym' if sym else 'asym'}"
            found[f"ar-gptq-{name}"] = auto_round("auto_gptq", bits, size, sym)
            found[f"ar-native-{name}"] = auto_round("auto_round", bits, size, sym)
            if bits == 4:
                found[f"ar-awq-{name}"] = auto_round("auto_awq", bits, size, sym)
                found[f"ar-native-awq-{name}"] = auto_round("auto_round:auto_awq", bits, size, sym)
    for bits in (2, 3, 4, 8):
        found[f"gm-{bits}bit-g64-act-order"] = gptqmodel(bits, 64, desc_act=True)
        found[f"gm-{bits}bit-g64-v2"] = gptqmodel(bits, 64, "gptq_v2", sym=False)
    found["gm-4bit-g-1"] = gptqmodel(4, -1, act_group_aware=False)
    found["gm-4bit-g64-act-order-asym"] = gptqmodel(4, 64, desc_act=True, sym=False)
    found["gm-4bit-dynamic"] = gptqmodel(
        4, 64, dynamic={r"+:.*\.down_proj": {"bits": 8, "group_size": 32}, r"-:.*\.o_proj": {}}
    )
    w8 = integers(8, None)
    whole = {**INT8_TOKEN, "strategy": "tensor", "dynamic": False}
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    skips = ("lm_head", "re:.*o_proj", "model.layers.0.mlp.down_proj")
    found |= {
        "ct-w8a8": llmcompressor("W8A8", rounds_inputs=True),
        "ct-w8a8-static": llmcompressor(
            {**w8, "input_activations": whole},
            has_data=True, rounds_inputs=True,
        ),
        "ct-w8a8-static-asym": llmcompressor(
            {**w8, "input_activations": {**whole, "symmetric": False}},
            has_data=True, rounds_inputs=True,
        ),
        "ct-w8a16": llmcompressor(w8),
        "ct-w8a16-float32": llmcompressor(w8, dtype=torch.float32),
        **{f"ct-w{bits}a16-g64": llmcompressor(integers(bits)) for bits in (2, 3, 4, 5, 6, 7, 8)},
        "ct-w4a16-g64-asym": llmcompressor(integers(4, symmetric=False)),
        "ct-w4a16-g64-float16": llmcompressor(integers(4), dtype=torch.float16),
        "ct-w4a16-channel": llmcompressor(integers(4, None)),
        "ct-w4a16-g64-skips": llmcompressor(integers(4), skips=skips),
        # Older versions had actorder="group" as well, which left a g_idx.
        "ct-gptq-static": llmcompressor(integers(4, actorder="static"), by_gptq=True),
        "ct-gptq-weight-asym": llmcompressor(
            integers(4, actorder="weight", symmetric=False), by_gptq=True
        ),
        "ct-fp8-dynamic": llmcompressor("FP8_DYNAMIC"),
        "ct-fp8-static": llmcompressor("FP8", has_data=True),
        "bnb-nf4": bitsandbytes(**nf4),
        "bnb-nf4-double": bitsandbytes(**nf4, bnb_4bit_use_double_quant=True),
        "bnb-fp4": bitsandbytes(load_in_4bit=True),
        "bnb-fp4-double": bitsandbytes(load_in_4bit=True, bnb_4bit_use_double_quant=True),
        "bnb-nf4-bf16-storage": bitsandbytes(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="bfloat16"
        ),
        "bnb-int8": bitsandbytes(load_in_8bit=True),
        "ao-int8": torchao("Int8WeightOnlyConfig"),
        "ao-int8-g64": torchao("Int8WeightOnlyConfig", group_size=64),
        "ao-int8-dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
        "ao-int4-g64": torchao("IntxWeightOnlyConfig", weight_dtype="int4", group_size=64),
        "ao-int3-g32-float32": torchao(
            "IntxWeightOnlyConfig", torch.float32, weight_dtype="int3", group_size=32
        ),
        "ao-int8-dynamic-int4": torchao(
            "Int8DynamicActivationIntxWeightConfig", weight_dtype="int4", group_size=32
        ),
        "ao-float8": torchao("Float8WeightOnlyConfig"),
    }  # fmt: skip
    if divides_by_128:
        found["fp8-deepseek"] = deepseek(128)
        found["ct-fp8-block"] = llmcompressor("FP8_BLOCK")
    return found


if __name__ == "__main__":
    main()
