"""Checkpoints by the formats' own tools (make_quantized.py): their weights, logits and greedy tokens."""

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from batchgen import LLM, SamplingParams
from batchgen.kernels.ops import choose
from batchgen.models.weight_source import SafetensorsSource
from batchgen.quantization.base import method_for
from batchgen.quantization.stored import Rounded, Stored

FOLDER = os.environ.get("BATCHGEN_QUANTIZED_BY_TOOLS", "")
MADE = sorted(file.with_suffix("") for file in Path(FOLDER).glob("*.safetensors")) if FOLDER else []

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not MADE, reason="BATCHGEN_QUANTIZED_BY_TOOLS names no folder that make_quantized.py has filled"
    ),
]
TOP = 20
each_checkpoint = pytest.mark.parametrize("made", MADE, ids=lambda made: made.name)


@cache
def expected(made: Path) -> tuple[dict[str, Tensor], bool]:
    """What the tool read, and whether our activations are rounded."""
    with safe_open(f"{made}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["rounds_inputs"])


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


@each_checkpoint
def test_weights_are_those_that_the_tool_decodes(made: Path) -> None:
    kernels = choose("cpu", "float32", backend="reference", head_dim=64, block_size=16)
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    method = method_for(config, made.name)(kernels, torch.float32, torch.device("cpu"), config, made.name)
    assert isinstance(method, Stored)
    source = SafetensorsSource(made)
    modules = [name.removeprefix("weight.") for name in expected(made)[0] if name.startswith("weight.")]
    assert len(modules) > 6
    worst = 0.0
    for module in modules:
        right = expected(made)[0][f"weight.{module}"]
        scheme = method.scheme(module)
        assert scheme is not None, f"{module} is read as floats"
        names = {name: f"{module}.{name}" for name in scheme.layouts}
        tensors = {name: source.read(place) for name, place in names.items() if place in source.shapes}
        weight = scheme.decode(tensors, *right.shape)
        found = weight.values * weight.scale[:, None] if isinstance(weight, Rounded) else weight.dense()
        worst = max(worst, float((found - right).abs().max() / right.abs().max()))
    print(f"{made.name}: weights differ by {worst:.1e} of the largest")
    assert worst < 1e-6


@each_checkpoint
def test_logits_and_greedy_tokens(made: Path) -> None:
    right, rounds_inputs = expected(made)
    count = sum(name.startswith("ids.") for name in right)
    ids = [right[f"ids.{number}"].tolist() for number in range(count)]
    lengths = [int(right[f"length.{number}"]) for number in range(count)]
    logits = [right[f"logits.{number}"] for number in range(count)]
    with LLM(
        str(made), in_process=True, dtype="float32", kv_cache_dtype="float32", max_model_len=256,
        max_logprobs=TOP,
    ) as llm:  # fmt: skip
        scored = llm.generate(
            [{"prompt_token_ids": each} for each in ids],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP),
            use_tqdm=False,
        )
        written = llm.generate(
            [{"prompt_token_ids": each[:length]} for each, length in zip(ids, lengths, strict=True)],
            [SamplingParams(temperature=0, max_tokens=len(each) - length, ignore_eos=True)
             for each, length in zip(ids, lengths, strict=True)],
            use_tqdm=False,
        )  # fmt: skip
    differences, sizes = [], []
    for output, values in zip(scored, logits, strict=True):
        for entry, row in zip(output.prompt_logprobs[1:], values[:-1], strict=True):
            tokens = torch.tensor(list(entry))
            found = torch.tensor([each.logprob for each in entry.values()])
            differences.append(found - row.log_softmax(0)[tokens])
            sizes.append(row[tokens])
    logit_error = float(torch.cat(differences).norm() / torch.cat(sizes).norm())
    same = [
        sum(mine == theirs for mine, theirs in zip(output.outputs[0].token_ids, each[length:], strict=True))
        for output, each, length in zip(written, ids, lengths, strict=True)
    ]
    total = sum(map(len, ids)) - sum(lengths)
    print(
        f"{made.name}: logits differ by {logit_error:.1e}, {sum(same)} of {total} greedy tokens are the same"
    )
    if rounds_inputs:
        assert logit_error < 0.1
    else:
        assert logit_error < 1e-3
        assert sum(same) == total
