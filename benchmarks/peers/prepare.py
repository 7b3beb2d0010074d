"""The files that the peers read, made from one model: every engine then runs the same weights.

    python -m benchmarks.peers.prepare MODEL FOLDER [--openvino PYTHON]

MODEL is a GGUF file, `package:NAME/FILE`, or a folder with safetensors, which OpenVINO cannot be given. In
the environment of batchgen with transformers, accelerate and gguf. Writes to FOLDER; a GGUF's weights are
rounded to bfloat16 first, which every one of these formats holds or starts from:

    hf/                safetensors in bfloat16, and the tokenizer  (batchgen, vLLM, transformers)
    w8a8/              int8 weights with a scale for each output, activations quantized as they come  (vLLM)
    ov-f16/ ov-q8_0/   with --openvino: its own files, from f16.gguf and q8_0.gguf beside them
    model.txt          what all of it was made from, for the results
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchgen.models.location import resolve_model

KINDS = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_COMPILE_FOR_OPENVINO = """
import sys, openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""


def make_gguf(source: Path, target: Path, kind: str) -> None:
    """Copy a GGUF with its matrices in another type; vectors stay float32."""
    stored, file_type = KINDS[kind]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        items = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], items)
    writer.add_file_type(file_type)
    bfloat16 = GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = dequantize(quantize(values, bfloat16), bfloat16).reshape(tensor.shape[::-1])
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_hf(source: Path, target: Path) -> None:
    """A model folder as transformers saves it."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).to(torch.bfloat16)
    config = loaded.config
    # It says GGUF, which the saved folder no longer is.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_w8a8(source: Path, target: Path) -> None:
    """The folder with int8 projections, rounded to nearest, in the layout named compressed-tensors."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        (target / path.name).unlink()
        for name, weight in load_file(path).items():
            stored |= _int8(name, weight) if name.endswith("_proj.weight") else {name: weight}
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _w8a8_config()
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values = weight.float()
    scale = values.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    rounded = (values / scale).round().clamp(-127, 127).to(torch.int8)
    return {name: rounded, name.replace(".weight", ".weight_scale"): scale.to(torch.bfloat16)}


def _w8a8_config() -> dict[str, Any]:
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def make_openvino(python: str, source: Path, target: Path) -> None:
    """OpenVINO reads the GGUF and saves its own files beside it."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    copy = target / "model.gguf"
    shutil.copy(source, copy)
    subprocess.run([python, "-c", _COMPILE_FOR_OPENVINO, str(copy)], check=True)
    copy.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, package:NAME/FILE or a folder with safetensors")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="the interpreter of OpenVINO GenAI's environment"
    )
    args = parser.parse_args()

    source = resolve_model(args.model).path
    if source.is_dir() and args.openvino:
        raise SystemExit(f"{args.model} is a folder; OpenVINO's files are made from a GGUF")
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "model.txt").write_text(args.model.rstrip("/").rsplit("/", 1)[-1] + "\n", encoding="utf-8")
    if source.is_dir():
        shutil.copytree(source, args.folder / "hf", dirs_exist_ok=True)
    else:
        make_hf(source, args.folder / "hf")
    make_w8a8(args.folder / "hf", args.folder / "w8a8")
    for kind in KINDS if args.openvino else ():
        make_gguf(source, args.folder / f"{kind}.gguf", kind)
        make_openvino(args.openvino, args.folder / f"{kind}.gguf", args.folder / f"ov-{kind}")
    print(*sorted(path.name for path in args.folder.iterdir()), f"in {args.folder}")


if __name__ == "__main__":
    main()
