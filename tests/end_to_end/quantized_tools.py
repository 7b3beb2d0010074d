"""How each tool makes a checkpoint, and reads the weights in it; for make_quantized.py."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is made, and read by its own tool.

    Args:
        tool: its package.
        make: gets the float model's folder and the new one.
        read: gets the float model and the new folder; the weights that it holds, by module.
        reader: another package that reads it.
        rounds_inputs: whether batchgen rounds activations for it, so that logits are only near.
    """

    tool: str
    make: Callable[[Path, Path], None]
    read: Callable[[Any, Path], Weights]
    rounds_inputs: bool = False
    reader: str | None = None


def float_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


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


def auto_round(form: str, bits: int, group_size: int, is_symmetric: bool = True) -> Recipe:
    def make(model: Path, out: Path) -> None:
        from auto_round import AutoRound

        rounder = AutoRound(
            str(model), bits=bits, group_size=group_size, sym=is_symmetric, iters=0, disable_opt_rtn=True,
            nsamples=4, seqlen=64, device_map="cpu", disable_model_free=True, enable_torch_compile=False,
        )  # fmt: skip
        rounder.quantize_and_save(str(out), format=form)
        for file in [*out.glob("*/*")]:  # it may make a folder of a name of its own
            file.rename(out / file.name)
        for left in [each for each in out.iterdir() if each.is_dir()]:
            left.rmdir()

    def read(model: Any, out: Path) -> Weights:
        if form == "auto_gptq":  # its own layers read symmetric ones alone
            return gptqmodel(bits, group_size).read(model, out)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        if "awq" in config.get("packing_format", form):  # its own form may be that, too
            return by_awq(out, group_size)
        from transformers import AutoRoundConfig

        # Its layers want halves; widened after that, they decode to float32.
        settings = {"dtype": torch.float16, "quantization_config": AutoRoundConfig(backend="torch")}
        loaded = AutoModelForCausalLM.from_pretrained(out, **settings)
        return by_identity(model, torch.nn.Module.float(loaded))

    return Recipe("auto-round", make, read, reader="gptqmodel")


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
            shutil.copytree(out, folder, dirs_exist_ok=True)
            config = json.loads((out / "config.json").read_text())
            config["quantization_config"]["meta"] = {"quantizer": ["gptqmodel:7.7.0"]}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            loaded = GPTQModel.load(
                folder, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16
            ).model
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
    rounds_inputs: bool = False, skips: tuple[str, ...] = ("lm_head",),
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
        data = {
            "dataset": Dataset.from_list(calibration(model)),
            "num_calibration_samples": 8,
            "max_seq_length": 64,
        }
        made = float_model(model, dtype)
        modifier = (GPTQModifier if by_gptq else QuantizationModifier)(**schemes)
        oneshot(model=made, recipe=[modifier], **(data if has_data or by_gptq else {}))
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


def deepseek(block: int) -> Recipe:
    """8-bit floats in blocks: transformers reads them anywhere, but makes them on a GPU alone."""

    def make(model: Path, out: Path) -> None:
        shutil.copytree(model, out)
        tensors = stored_tensors(model)
        for name, _ in linears(float_model(model)):
            if name == "lm_head":
                continue
            wide = tensors.pop(f"{name}.weight").float()
            blocks = wide.unflatten(0, (-1, block)).unflatten(2, (-1, block))
            scale = blocks.abs().amax(dim=(1, 3)) / 448
            spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            tensors[f"{name}.weight"] = (wide / spread).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_inv"] = scale
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]
        }  # fmt: skip
        (out / "config.json").write_text(json.dumps(config))

    def read(model: Any, out: Path) -> Weights:
        from transformers import FineGrainedFP8Config

        settings = {"dtype": torch.float32, "quantization_config": FineGrainedFP8Config(dequantize=True)}
        loaded = AutoModelForCausalLM.from_pretrained(out, **settings)
        return {name: loaded.get_submodule(name).weight for name, _ in linears(model) if name != "lm_head"}

    return Recipe("transformers", make, read)
