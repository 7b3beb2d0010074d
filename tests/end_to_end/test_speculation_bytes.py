"""With speculation a real (tiny, random) model gives the bytes of a run without it."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen import LLM, SamplingParams
from batchgen.outputs import RequestOutput
from batchgen.testing import FreeDrafts
from batchgen.tiny_models import random_ids, tiny_model, write_folder

EOS = 257
FEW = [65, 66, 67, 68]
# Texts of four letters: whatever comes stood there before, and a draft is right now and then.
PROMPTS = [[FEW[each % 4] for each in random_ids(length, length, 256)] for length in (9, 17, 40, 64, 100)]
NGRAM = {"num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(vocab_size=260, max_position_embeddings=256)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), in_process=True, reproducible=True) as llm:
        yield llm


def drafting_engine(folder: Path, **engine_args: Any) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchgen.engine.speculation.MeasuredTimes", FreeDrafts)
        return LLM(str(folder), in_process=True, reproducible=True, speculative=NGRAM, **engine_args)


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[LLM]:
    with drafting_engine(folder) as llm:
        yield llm


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller sees of the samples, numbers to the last bit."""
    for output in outputs:
        assert output.error is None, output.error
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def generate(llm: LLM, **params: Any) -> list[Any]:
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": 30, **params}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return told(llm.generate(prompts, SamplingParams(**settings), use_tqdm=False))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"allowed_token_ids": FEW},
        {"allowed_token_ids": FEW, "n": 3, "top_k": 3, "top_p": 0.9, "min_p": 0.02},
        {
            "allowed_token_ids": FEW,
            "presence_penalty": 1.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.2,
        },
        {"allowed_token_ids": [*FEW, EOS], "min_tokens": 11, "logit_bias": {EOS: 8.0}},
        {"allowed_token_ids": FEW, "stop_token_ids": [FEW[2]], "min_tokens": 4},
        {"allowed_token_ids": FEW, "stop": ["AC", "DDB"]},
        {"allowed_token_ids": FEW, "bad_words": ["AB", "C"]},
        {"allowed_token_ids": FEW, "logprobs": 3, "prompt_logprobs": 1, "logprob_token_ids": [70]},
        {"allowed_token_ids": FEW, "repetition_detection": {"max_pattern_size": 3, "min_count": 3}},
        {"structured_outputs": {"regex": "[AB]{5,9}(CD){1,20}"}},
        {"structured_outputs": {"choice": ["ABABABABC", "ABABABD", "BBBBA"]}},
    ],
    ids=str,
)
def test_bytes_are_those_without_speculation(plain: LLM, drafting: LLM, params: dict[str, Any]) -> None:
    before = drafting.get_metrics()
    assert generate(drafting, **params) == generate(plain, **params)
    after = drafting.get_metrics()
    assert after.num_draft_tokens > before.num_draft_tokens
    if params.get("allowed_token_ids") == FEW:
        assert after.num_accepted_tokens > before.num_accepted_tokens


@pytest.mark.parametrize(
    "engine_args",
    [
        {"num_gpu_blocks_override": 14, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 14, "swap_space": 0.01, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_bytes_are_the_same_in_any_pool(plain: LLM, folder: Path, engine_args: dict[str, Any]) -> None:
    params = {"allowed_token_ids": FEW, "frequency_penalty": 0.3, "n": 2, "max_tokens": 60, "logprobs": 1}
    with drafting_engine(folder, **engine_args) as llm:
        assert generate(llm, **params) == generate(plain, **params)
        stats = llm.get_metrics()
    assert stats.num_accepted_tokens > 0
    if "num_gpu_blocks_override" in engine_args:
        assert stats.num_preemptions > 0


def test_first_tokens_have_the_models_distribution(model: Any, drafting: LLM) -> None:
    prompt, count = PROMPTS[1], 3000
    before = drafting.get_metrics().num_accepted_tokens
    params = SamplingParams(n=count, temperature=1.0, seed=11, max_tokens=6, allowed_token_ids=FEW)
    (output,) = drafting.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert drafting.get_metrics().num_accepted_tokens - before > count // 10
    seen = Counter(tuple(sample.token_ids[:3]) for sample in output.outputs)

    def chances(tokens: tuple[int, ...]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
        return dict(zip(FEW, logits[FEW].softmax(0).tolist(), strict=True))

    expected = {}
    for tokens in itertools.product(FEW, repeat=3):
        steps = [chances(tokens[:length])[token] for length, token in enumerate(tokens)]
        expected[tokens] = count * math.prod(steps)
    # Cells too rare to count are one cell.
    cells = [(seen[tokens], mean) for tokens, mean in expected.items() if mean >= 5]
    rest = (count - sum(cell[0] for cell in cells), count - sum(cell[1] for cell in cells))
    cells += [rest] if rest[1] >= 5 else []
    chi_square = sum((found - mean) ** 2 / mean for found, mean in cells)
    freedom = len(cells) - 1
    assert freedom > 10
    # Five standard deviations of a chi-square distribution.
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)
