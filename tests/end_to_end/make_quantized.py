"""Makes checkpoints with the tools that publish them, and beside each what the tool itself reads in it.

    python make_quantized.py MODEL FOLDER [--only WORD ...]

MODEL is a folder of float weights, or tiny-llama or tiny-qwen2: random ones made here. FOLDER gets, for each recipe, the
checkpoint MODEL-RECIPE and MODEL-RECIPE.safetensors: prompts, float32 logits and greedy tokens of transformers' model
with the weights that the tool decodes, and some of these weights. Then, with FOLDER in BATCHGEN_QUANTIZED_BY_TOOLS,
test_quantized_by_tools.py holds batchgen to all of them.

The tools want packages of different versions: run it in an environment of each, with the same FOLDER. Recipes of a
tool that cannot be imported are named and skipped. It imports nothing of batchgen.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = (
    "The history of all hitherto existing society is", "def fibonacci(n):\n", "Water boils at", "Größe und Gewicht von Elefanten:"
)  # fmt: skip
NUM_TOKENS = 32
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is made, and read by its own tool.

    Args:
        tool: its package.
        make: gets the float model's folder and the new one.
        read: gets the float model and the new folder; the weights that it holds, by module.
        rounds_inputs: whether batchgen rounds activations for it, so that logits are only near.
    """

    tool: str
    make: Callable[[Path, Path], None]
    read: Callable[[Any, Path], Weights]
    rounds_inputs: bool = False


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
    missing, failed = set(), []
    for name, recipe in recipes(divides_by_128=options.model in TINY).items():
        out = options.folder / f"{options.model if options.model in TINY else 'model'}-{name}"
        if (options.only and not any(word in name for word in options.only)) or expected_file(out).exists():
            continue
        try:
            version = importlib.metadata.version(recipe.tool)
        except importlib.metadata.PackageNotFoundError:
            missing.add(recipe.tool)
            continue
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


def float_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


# --- what is right ---------------------------------------------------------------------------------------------


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
    expected |= {f"weight.{module}": weight.to(torch.float32).contiguous() for module, weight in weights.items()
                 if any(end in f".{module}" for end in ends)}  # fmt: skip
    notes = {"tool": tool, "rounds_inputs": json.dumps(recipe.rounds_inputs)}
    save_file(expected, expected_file(out), metadata=notes)


def linears(model: Any) -> Iterator[tuple[str, Any]]:
    """The linear layers of a float model."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name, module


@torch.no_grad()
def by_identity(model: Any, loaded: Any) -> Weights:
    """The weights of a model whose layers are the tool's own: what they make of the identity."""
    found = {}
    for name, plain in linears(model):
        layer = loaded.get_submodule(name)
        if type(layer) is torch.nn.Linear:
            continue
        result = layer(torch.eye(plain.in_features)).to(torch.float32)
        found[name] = (result - layer.bias.to(torch.float32) if layer.bias is not None else result).T
    return found


# --- the tools -------------------------------------------------------------------------------------------------


def auto_round(form: str, bits: int, group_size: int, is_symmetric: bool = True) -> Recipe:
    def make(model: Path, out: Path) -> None:
        from auto_round import AutoRound

        rounder = AutoRound(
            str(model), bits=bits, group_size=group_size, sym=is_symmetric, iters=0, disable_opt_rtn=True, nsamples=4,
            seqlen=64, device_map="cpu", disable_model_free=True, enable_torch_compile=False,
        )  # fmt: skip
        rounder.quantize_and_save(str(out), format=form)
        for file in [*out.glob("*/*")]:  # it may make a folder of a name of its own
            file.rename(out / file.name)

    def read(model: Any, out: Path) -> Weights:
        if form == "auto_gptq":  # its own layers read symmetric ones alone
            return gptqmodel(bits, group_size).read(model, out)
        if "awq" in form:
            return by_awq(out, group_size)
        from transformers import AutoRoundConfig

        # Its layers want halves; widened after that, they decode to float32.
        settings = {"dtype": torch.float16, "quantization_config": AutoRoundConfig(backend="torch")}
        loaded = AutoModelForCausalLM.from_pretrained(out, **settings)
        return by_identity(model, torch.nn.Module.float(loaded))

    return Recipe("auto-round", make, read)


def by_awq(out: Path, group_size: int) -> Weights:
    """What gptqmodel makes of the tensors; its layers would round that to halves."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    tensors = stored_tensors(out)
    found = {}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        words, zeros, scales = (tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        size = words.shape[0] if group_size == -1 else group_size
        found[module] = dequantize_gemm(words, zeros, scales.float(), 4, size).T
    return found


def gptqmodel(bits: int, group_size: int, form: str = "gptq", **settings: Any) -> Recipe:
    def make(model: Path, out: Path) -> None:
        from gptqmodel import GPTQModel, QuantizeConfig
        from gptqmodel.quantization import FORMAT

        config = QuantizeConfig(
            bits=bits,
            group_size=group_size,
            format=FORMAT(form),
            device="cpu",
            offload_to_disk=False,
            **settings,
        )
        rounder = GPTQModel.load(str(model), config)
        rounder.quantize(calibration(model), batch_size=1)
        rounder.save(str(out))

    def read(model: Any, out: Path) -> Weights:
        from gptqmodel import BACKEND, GPTQModel

        with tempfile.TemporaryDirectory() as folder:
            # It reads zero points of nobody else, though they are the same.
            for file in out.iterdir():
                shutil.copy(file, folder)
            config = json.loads((out / "config.json").read_text())
            config["quantization_config"]["meta"] = {"quantizer": ["gptqmodel:7.7.0"]}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            loaded = GPTQModel.load(folder, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model
        torch.nn.Module.float(loaded)  # halves until here, as its layers want them
        found = {}
        for name, _ in linears(model):
            layer = loaded.get_submodule(name)
            if hasattr(layer, "dequantize_weight"):
                found[name] = layer.dequantize_weight().T.to(torch.float32)
        return found

    return Recipe("gptqmodel", make, read)


def calibration(model: Path) -> list[dict[str, list[int]]]:
    """Texts of many words, as the rounding methods that look at activations want them."""
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics)[:40]))["input_ids"]
    pieces = [ids[64 * at : 64 * at + 64] for at in range(8)]
    return [{"input_ids": piece, "attention_mask": [1] * len(piece)} for piece in pieces]


def llmcompressor(
    scheme: Any, *, dtype: torch.dtype = torch.bfloat16, has_data: bool = False, by_gptq: bool = False,
    rounds_inputs: bool = False, kv: bool = False, skips: tuple[str, ...] = ("lm_head",),
) -> Recipe:  # fmt: skip
    def make(model: Path, out: Path) -> None:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier

        schemes: dict[str, Any] = {"ignore": list(skips)}
        if isinstance(scheme, str):
            schemes |= {"targets": "Linear", "scheme": scheme}
        else:
            schemes |= {"config_groups": {"group_0": {"targets": ["Linear"], **scheme}}}
        if kv:
            schemes["kv_cache_scheme"] = {
                "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True
            }  # fmt: skip
        data = {
            "dataset": Dataset.from_list(calibration(model)),
            "num_calibration_samples": 8,
            "max_seq_length": 64,
        }
        made = float_model(model, dtype)
        modifier = (GPTQModifier if by_gptq else QuantizationModifier)(**schemes)
        oneshot(model=made, recipe=[modifier], **(data if has_data or by_gptq or kv else {}))
        made.save_pretrained(out, save_compressed=True)

    def read(model: Any, out: Path) -> Weights:
        from transformers import CompressedTensorsConfig

        with tempfile.TemporaryDirectory() as folder:
            # Scales of 16 bits would make it round weights to as many.
            stored = stored_tensors(out)
            halves = (torch.bfloat16, torch.float16)
            wide = {
                name: tensor.float() if tensor.dtype in halves else tensor for name, tensor in stored.items()
            }
            save_file(wide, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((out / "config.json").read_text()) | {"dtype": "float32"}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            settings = {
                "dtype": torch.float32,
                "quantization_config": CompressedTensorsConfig(dequantize=True),
            }
            loaded = AutoModelForCausalLM.from_pretrained(folder, **settings)
        return {
            name: loaded.get_submodule(name).weight
            for name, _ in linears(model)
            if {f"{name}.weight_scale", f"{name}.weight_packed"} & stored.keys()
        }

    return Recipe("llmcompressor", make, read, rounds_inputs)


def stored_tensors(out: Path) -> Weights:
    return {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}


def bitsandbytes(**settings: Any) -> Recipe:
    def make(model: Path, out: Path) -> None:
        from transformers import BitsAndBytesConfig

        made = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**settings), device_map="cpu"
        )
        made.save_pretrained(out)  # before it runs: then it would write its scales for its own kernels

    def read(model: Any, out: Path) -> Weights:
        from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, device_map="cpu")
        found = {}
        for name, _ in linears(model):
            weight = loaded.get_submodule(name).weight
            if getattr(weight, "quant_state", None) is not None:
                weight.quant_state.dtype = torch.float32
                found[name] = dequantize_4bit(weight.data, weight.quant_state)
            elif getattr(weight, "SCB", None) is not None:
                found[name] = int8_vectorwise_dequant(weight.data, weight.SCB)
        return found

    return Recipe("bitsandbytes", make, read)


def torchao(kind: str, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Recipe:
    def make(model: Path, out: Path) -> None:
        import torchao.quantization
        from transformers import TorchAoConfig

        if "weight_dtype" in settings:
            settings["weight_dtype"] = getattr(torch, settings["weight_dtype"])
        if "group_size" in settings:
            group_size = settings.pop("group_size")
            key = "weight_granularity" if "Dynamic" in kind else "granularity"
            settings[key] = torchao.quantization.PerGroup(group_size)
        config = TorchAoConfig(quant_type=getattr(torchao.quantization, kind)(**settings))
        made = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, quantization_config=config, device_map="cpu"
        )
        made.save_pretrained(out)

    def read(model: Any, out: Path) -> Weights:
        from torchao.quantization.quant_primitives import dequantize_affine

        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, device_map="cpu")
        found = {}
        for name, _ in linears(model):
            weight = loaded.get_submodule(name).weight
            if not hasattr(weight, "qdata"):
                continue
            if weight.qdata.dtype is torch.int8:
                scale, size = weight.scale.float(), weight.block_size
                found[name] = dequantize_affine(
                    weight.qdata, size, scale, weight.zero_point, torch.int8, output_dtype=torch.float32
                )
            else:
                found[name] = weight.dequantize(torch.float32)
        return found

    return Recipe("torchao", make, read)


# --- which -----------------------------------------------------------------------------------------------------

TINY: dict[str, dict[str, Any]] = {
    "tiny-llama": {"attention_bias": False},
    "tiny-qwen2": {"rope_theta": 10000.0},
}


def write_tiny(name: str, folder: Path) -> None:
    """A random model whose sizes divide by 128, with large biases where it has any, and a tokenizer of bytes."""
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
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=256, pad_token_id=256, bos_token_id=None,
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
    found |= {
        "ct-w8a8": llmcompressor("W8A8", rounds_inputs=True),
        "ct-w8a8-static": llmcompressor(
            {**w8, "input_activations": {**INT8_TOKEN, "strategy": "tensor", "dynamic": False}},
            has_data=True, rounds_inputs=True,
        ),
        "ct-w8a8-static-asym": llmcompressor(
            {**w8, "input_activations": {**INT8_TOKEN, "strategy": "tensor", "dynamic": False, "symmetric": False}},
            has_data=True, rounds_inputs=True,
        ),
        "ct-w8a16": llmcompressor(w8),
        "ct-w8a16-float32": llmcompressor(w8, dtype=torch.float32),
        **{f"ct-w{bits}a16-g64": llmcompressor(integers(bits)) for bits in (2, 3, 4, 5, 6, 7, 8)},
        "ct-w4a16-g64-asym": llmcompressor(integers(4, symmetric=False)),
        "ct-w4a16-g64-float16": llmcompressor(integers(4), dtype=torch.float16),
        "ct-w4a16-channel": llmcompressor(integers(4, None)),
        "ct-w4a16-g64-skips": llmcompressor(integers(4), skips=("lm_head", "re:.*o_proj", "model.layers.0.mlp.down_proj")),
        # Older versions had actorder="group" as well, which left a g_idx.
        "ct-gptq-static": llmcompressor(integers(4, actorder="static"), by_gptq=True),
        "ct-gptq-weight-asym": llmcompressor(
            integers(4, actorder="weight", symmetric=False), by_gptq=True
        ),
        "ct-fp8-dynamic": llmcompressor("FP8_DYNAMIC"),
        "ct-fp8-static": llmcompressor("FP8", has_data=True),
        "ct-kv-scales": llmcompressor("FP8_DYNAMIC", kv=True),
        "bnb-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "bnb-nf4-double": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
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
        "ao-int3-g32-float32": torchao("IntxWeightOnlyConfig", torch.float32, weight_dtype="int3", group_size=32),
        "ao-int8-dynamic-int4": torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype="int4", group_size=32),
        "ao-float8": torchao("Float8WeightOnlyConfig"),
    }  # fmt: skip
    if divides_by_128:
        found["ct-fp8-block"] = llmcompressor("FP8_BLOCK")
    return found


if __name__ == "__main__":
    main()
