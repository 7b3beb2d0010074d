"""Rows of many adapters and of the base model in one step: each gets what it gets alone, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.tiny_adapters import ALL_LINEAR, write_adapter
from batchgen.tiny_models import random_ids

PROMPTS = [random_ids(count, seed=count) for count in (19, 5, 33, 1, 8, 16, 27)]
KINDS: list[dict[str, Any]] = [
    {"rank": 3, "targets": (*ALL_LINEAR, "embed_tokens", "lm_head")},
    {"rank": 16, "use_rslora": True},
    {"targets": ("q_proj",), "modules_to_save": ["lm_head", "up_proj", "embed_tokens"]},
    {"rank": 40, "targets": ("v_proj", "down_proj"), "lora_bias": True},
]


@pytest.fixture(params=[None, "int8"])
def made(request: pytest.FixtureRequest, tiny: Any, tmp_path: Path, adapted: Any) -> tuple[Any, list[str]]:
    folder = tiny(attention_bias=True)
    model = adapted(folder, quantization=request.param)
    contents = [
        model.load(write_adapter(tmp_path / str(number), folder, seed=number, **kind), str(number))
        for number, kind in enumerate(KINDS)
    ]
    return model, contents


def test_a_mixed_step_gives_each_row_what_it_gets_alone(made: tuple[Any, list[str]]) -> None:
    model, contents = made
    wanted: list[str | None] = [contents[0], None, contents[1], contents[2], contents[3], contents[0], None]
    together = model.logits(PROMPTS, wanted)
    for prompt, adapter, mine in zip(PROMPTS, wanted, together, strict=True):
        (alone,) = model.logits([prompt], [adapter])
        assert torch.equal(mine, alone)
    backwards = model.logits(PROMPTS[::-1], wanted[::-1])[::-1]
    assert all(torch.equal(mine, other) for mine, other in zip(together, backwards, strict=True))
    # Every row is another one.
    base = model.logits(PROMPTS, [None] * len(PROMPTS))
    for adapter, mine, plain in zip(wanted, together, base, strict=True):
        assert torch.equal(mine, plain) == (adapter is None)


def test_base_rows_keep_the_bits_that_they_have_without_slots(
    made: tuple[Any, list[str]], decoded: Callable[..., list[torch.Tensor]]
) -> None:
    model, contents = made
    beside = model.logits(PROMPTS, [None, *([contents[0]] * 5), None])
    plain = decoded(model, PROMPTS)
    assert torch.equal(beside[0], plain[0]) and torch.equal(beside[-1], plain[-1])


@pytest.fixture
def decoded(adapted: Any, tiny: Any) -> Callable[..., list[torch.Tensor]]:
    """Logits of a step of the same model that no adapter was ever put into."""

    def logits(like: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
        quantization = "int8" if like.model.layers[0].qkv.input_bits else None
        fresh = adapted(tiny(attention_bias=True), quantization=quantization)
        found: list[torch.Tensor] = fresh.logits(prompts, [None] * len(prompts))
        return found

    return logits


def test_slots_change_between_steps_and_nobody_gets_the_old_one(
    tiny: Any, tmp_path: Path, adapted: Any
) -> None:
    folder = tiny()
    model = adapted(folder, num_slots=2)
    contents = [
        model.load(write_adapter(tmp_path / str(number), folder, seed=number), str(number))
        for number in range(5)
    ]
    alone = [model.logits([PROMPTS[0]], [content])[0] for content in contents]
    for first in range(5):
        for second in range(5):
            found = model.logits([PROMPTS[0], PROMPTS[0]], [contents[first], contents[second]])
            assert torch.equal(found[0], alone[first]) and torch.equal(found[1], alone[second])


def test_over_int8_the_logits_are_near_those_of_the_merged_floats(
    tiny: Any, tmp_path: Path, adapted: Any
) -> None:
    """The rounding of the base remains; what the adapter adds must not be lost in it."""
    folder = tiny()
    adapter = write_adapter(
        tmp_path / "a", folder, rank=8, targets=(*ALL_LINEAR, "embed_tokens", "lm_head"), strength=0.5
    )
    floats, rounded = adapted(folder), adapted(folder, quantization="int8")
    assert rounded.model.rotation is not None
    results = []
    for model in (floats, rounded):
        content = model.load(adapter)
        results.append([model.logits([PROMPTS[2]], [each])[0] for each in (None, content)])
    (base, with_adapter), (rounded_base, rounded_adapter) = results
    change = float((with_adapter - base).norm() / base.norm())
    error = float((rounded_adapter - with_adapter).norm() / with_adapter.norm())
    of_base = float((rounded_base - base).norm() / base.norm())
    assert change > 0.3
    assert error < 0.05 and error < 3 * of_base


@pytest.mark.parametrize(
    "kind",
    [
        {"modules_to_save": ["lm_head", "embed_tokens", "o_proj", "gate_proj"], "targets": ("q_proj",)},
        {"bias": "all", "lora_bias": True},
    ],
)
def test_whole_weights_and_biases_are_folded_too(
    kind: dict[str, Any], tiny: Any, tmp_path: Path, adapted: Any
) -> None:
    folder = tiny(attention_bias=True, mlp_bias=True)
    adapter = write_adapter(tmp_path / "a", folder, **kind)
    logits = []
    for quantization in (None, "int8"):
        model = adapted(folder, quantization=quantization)
        logits.append(model.logits([PROMPTS[2]], [model.load(adapter)])[0])
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < 0.05


def test_steps_without_adapters_run_the_program_of_a_model_without_slots(
    tiny: Any, tmp_path: Path, adapted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny()
    model = adapted(folder)
    content = model.load(write_adapter(tmp_path / "a", folder))
    calls = []
    original = type(model.model.kernels).lora_add

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        original(*arguments)

    monkeypatch.setattr(type(model.model.kernels), "lora_add", counted)
    model.logits(PROMPTS, [None] * len(PROMPTS))
    assert model.model.recorded.is_recorded and not calls
    model.logits(PROMPTS, [None] * 6 + [content])
    recorded = len(calls)
    assert recorded
    # Programs of both kinds are kept.
    with torch.inference_mode():
        model.model.recorded.run(model.model, *_step(model), None)
    assert len(calls) == recorded


def _step(model: Any) -> Any:
    from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
    from batchgen.worker.input_batch import BatchBuilder

    builder = BatchBuilder(block_size=16, num_groups=1, device=torch.device("cpu"))
    step = SchedulerOutput(0, (ScheduledSequence(0, [1, 2, 3], 0, ([0],)),))
    batch = builder.build(step, {})
    return batch.token_ids, batch.positions, batch.metas, batch.logit_rows


@pytest.mark.slow
def test_200_adapters_through_4_slots_with_random_rows(tiny: Any, tmp_path: Path, adapted: Any) -> None:
    folder = tiny(num_hidden_layers=1)
    model = adapted(folder, num_slots=4)
    generator = torch.Generator().manual_seed(0)
    contents: list[str | None] = []
    for number in range(200):
        rank = 1 + int(torch.randint(0, 24, (), generator=generator))
        adapter = write_adapter(
            tmp_path / str(number), folder, rank=rank, seed=number, targets=("q_proj", "o_proj", "up_proj")
        )
        contents.append(model.load(adapter, str(number)))
    alone = [model.logits([PROMPTS[4]], [content])[0] for content in [*contents, None]]
    assert len({tuple(logits[-1].tolist()) for logits in alone}) == 201
    for _ in range(150):
        chosen = torch.randint(0, 201, (4,), generator=generator).tolist()
        rows = [chosen[each] for each in torch.randint(0, 4, (7,), generator=generator).tolist()]
        found = model.logits([PROMPTS[4]] * 7, [[*contents, None][row] for row in rows])
        assert all(torch.equal(mine, alone[row]) for mine, row in zip(found, rows, strict=True))
