"""Sliding windows through the whole engine: transformers' tokens, in the memory that the windows need."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.engine.loading import load_core
from batchgen.engine.messages import EngineRequest, pack_ids, unpack_ids
from batchgen.sampling_params import SamplingParams
from batchgen.tiny_models import SPECIAL_TOKENS, random_ids, tiny_model, write_folder

VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
WINDOW = 40
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {"num_hidden_layers": 2}),
    "qwen2 hybrid": (
        "Qwen2ForCausalLM", {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2},
    ),
}  # fmt: skip
# Blocks that one group keeps behind a window of 40 while it decodes.
IN_WINDOW = 4


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    architecture, options = MODELS[request.param]
    original = tiny_model(
        architecture, vocab_size=VOCAB_SIZE, max_position_embeddings=1024, sliding_window=WINDOW, **options
    )
    return request.param, original, write_folder(original, tmp_path_factory.mktemp("windows"))


@pytest.fixture
def core(model: tuple[str, Any, Path]) -> Callable[..., EngineCore]:
    def make(**engine_args: Any) -> EngineCore:
        return load_core(EngineConfig.from_engine_args(model=str(model[2]), device="cpu", **engine_args))

    return make


def expected(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def run(
    core: EngineCore, prompts: list[list[int]], count: int, temperature: float = 0.0
) -> tuple[list[list[int]], int]:
    """Tokens of every prompt, and the most blocks that were in use."""
    params = SamplingParams(temperature=temperature, max_tokens=count, min_tokens=count)
    for number, prompt in enumerate(prompts):
        core.add(
            EngineRequest(
                request_id=str(number), prompt_token_ids=pack_ids(prompt), params=params, seed=len(prompt)
            )
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    most = 0
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            tokens[int(output.request_id)] += unpack_ids(output.token_ids)
        most = max(most, core.stats().num_used_blocks)
    return tokens, most


def test_a_long_sequence_takes_only_what_its_windows_need(
    model: tuple[str, Any, Path], core: Callable[..., EngineCore]
) -> None:
    name, original, _ = model
    prompt = random_ids(200, seed=1, vocab_size=VOCAB_SIZE)
    tokens, most = run(core(max_num_batched_tokens=32), [prompt], 120)
    assert tokens == [expected(original, prompt, 120)]
    whole = 320 // 16
    if name == "mistral":
        # 39 positions and a chunk of 32, which begins where a block does.
        assert most == 5
    else:
        # Both kinds of layer take blocks of half the bytes from one pool.
        assert whole + IN_WINDOW <= most <= whole + 6


def test_a_pool_smaller_than_the_text_is_enough(
    model: tuple[str, Any, Path], core: Callable[..., EngineCore]
) -> None:
    name, original, _ = model
    prompts = [random_ids(150, seed=seed, vocab_size=VOCAB_SIZE) for seed in (2, 3)]
    # 250 tokens are 16 blocks; a full group needs them, one with a window never more than 5.
    pool = 11 if name == "mistral" else 22
    engine = core(max_num_batched_tokens=32, num_gpu_blocks_override=pool)
    tokens, most = run(engine, prompts, 100)
    assert tokens == [expected(original, prompt, 100) for prompt in prompts]
    assert most <= pool
    if name == "mistral":
        assert engine.stats().num_preemptions == 0, "both run side by side in 11 blocks"


AXES: dict[str, dict[str, Any]] = {
    "in chunks": {"max_num_batched_tokens": 17},
    "one by one": {"max_num_seqs": 1},
    "without cache": {"enable_prefix_caching": False},
    "recomputed": {"num_gpu_blocks_override": 22, "preemption_mode": "recompute"},
    "swapped": {"num_gpu_blocks_override": 22, "preemption_mode": "swap", "swap_space": 0.01},
    "drafted": {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
}


BEGINNING = random_ids(64, seed=4, vocab_size=VOCAB_SIZE)
PROMPTS = [BEGINNING + random_ids(14 * number, seed=number, vocab_size=VOCAB_SIZE) for number in range(4)]


@pytest.fixture(scope="module")
def plain(model: tuple[str, Any, Path]) -> list[list[int]]:
    """All side by side, in whole prompts, with room for all, drawn at temperature 1."""
    config = EngineConfig.from_engine_args(model=str(model[2]), device="cpu", reproducible=True)
    return run(load_core(config), PROMPTS, 32, temperature=1.0)[0]


@pytest.mark.parametrize("axis", AXES)
def test_a_row_has_the_same_tokens_however_it_runs(
    axis: str, model: tuple[str, Any, Path], plain: list[list[int]], core: Callable[..., EngineCore]
) -> None:
    engine = core(reproducible=True, **AXES[axis])
    for _ in range(2):  # the second time with what the cache has kept
        assert run(engine, PROMPTS, 32, temperature=1.0)[0] == plain
    stats = engine.stats()
    if model[0] != "mistral" and axis in ("recomputed", "swapped"):
        assert stats.choices["preempt_swap" if axis == "swapped" else "preempt_recompute"] > 0
