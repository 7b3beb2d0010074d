"""Memory while a model of few bits loads: no step of it holds the model in floats."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from batchgen.tiny_models import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HIDDEN, INTERMEDIATE, LAYERS, GROUP = 1024, 4096, 10, 128
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 4, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}  # fmt: skip
WEIGHTS = LAYERS * sum(outputs * inputs for outputs, inputs in PROJECTIONS.values())
# Gate and up, which are one layer here, as float32.
LARGEST_LAYER = 2 * INTERMEDIATE * HIDDEN * 4

PROGRAM = """
import json, sys
from batchgen.api.eval_child import _import_kernels, _own_mib, _peak
from batchgen.config import EngineConfig
from batchgen.worker.load import load_executor
from batchgen.tokenizer import tokenizer_of
_import_kernels()
arguments = json.loads(sys.argv[1])
config = EngineConfig.from_engine_args(kv_cache_memory_bytes=1 << 22, **arguments)
tokenizer_of(config.model)  # what it imports is no memory of the model
before = _own_mib()
with _peak() as most:
    executor = load_executor(config)
weights = sum(each.nbytes for each in executor.model.tensors()) / 2**20
print(json.dumps({"peak": most[0] - before, "end": _own_mib() - before, "weights": weights}))
"""


def packed(module: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // 8), dtype=torch.int32)
    scale = torch.full((outputs, inputs // GROUP), 0.1 / inputs**0.5).half()
    return {f"{module}.weight_packed": words, f"{module}.weight_scale": scale}


def gptq(module: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        f"{module}.qweight": torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs), dtype=torch.int32),
        f"{module}.qzeros": torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": torch.full((inputs // GROUP, outputs), 0.1 / inputs**0.5).half(),
        f"{module}.g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def floats(module: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {f"{module}.weight": (torch.randn(outputs, inputs) / inputs**0.5).bfloat16()}


WEIGHT_ARGUMENTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "compressed-tensors": (packed, {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHT_ARGUMENTS}},
    }),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "floats": (floats, None),
}  # fmt: skip


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def write(form: str) -> Path:
        folder = tmp_path_factory.mktemp(form)
        make, quantization = FORMS[form]
        tensors = {
            "model.norm.weight": torch.ones(HIDDEN),
            "model.embed_tokens.weight": torch.randn(320, HIDDEN),
        }
        for layer in range(LAYERS):
            place = f"model.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{place}.{name}.weight"] = torch.ones(HIDDEN)
            for name, (outputs, inputs) in PROJECTIONS.items():
                tensors |= make(f"{place}.{name}", outputs, inputs)
        save_file(tensors, folder / "model.safetensors")
        write_tokenizer(folder)
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 320, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
        }  # fmt: skip
        if quantization is not None:
            config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def loaded(folder: Path, **arguments: Any) -> dict[str, float]:
    given = json.dumps({"model": str(folder), "dtype": "float32", **arguments})
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    print({name: f"{value:.0f} MiB" for name, value in found.items()})
    return found


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_a_checkpoint_of_4_bits_is_never_in_floats(form: str, write: Any) -> None:
    folder = write(form)
    found = loaded(folder)
    file = (folder / "model.safetensors").stat().st_size / 2**20
    assert found["weights"] < 1.1 * file
    assert found["peak"] < file + 1.3 * LARGEST_LAYER / 2**20
    assert found["peak"] < 0.4 * WEIGHTS * 4 / 2**20


@pytest.mark.parametrize(("scheme", "bytes_per_weight"), [("int4", 0.57), ("fp8", 1.01), ("int8", 1.02)])
def test_floats_that_are_rounded_at_load_come_one_layer_at_a_time(
    scheme: str, bytes_per_weight: float, write: Any
) -> None:
    found = loaded(write("floats"), quantization=scheme)
    end = WEIGHTS * bytes_per_weight / 2**20
    table = 2 * 320 * HIDDEN * 4 / 2**20
    assert found["weights"] < end + table
    # Beside a layer on its way in: the activations of the made-up tokens.
    activations = 1024 * (6 * HIDDEN + 4 * INTERMEDIATE) * 4 / 2**20
    assert found["peak"] < end + table + 1.3 * LARGEST_LAYER / 2**20 + activations
