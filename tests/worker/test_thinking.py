"""The thinking budget: where a section stands is read from the history alone."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.engine.scheduler_output import DrawRules, SamplingRow
from batchgen.errors import ConfigError
from batchgen.kernels.ops import choose
from batchgen.sampling_params import SamplingParams
from batchgen.worker.sampler import Sampler
from batchgen.worker.thinking import ThinkingMarks, find_marks

ONE = ThinkingMarks(array("i", [90]), array("i", [91]))
MANY = ThinkingMarks(array("i", [90, 1]), array("i", [91, 91, 92]))


@pytest.mark.parametrize(
    ("history", "budget", "forced"),
    [
        ([], 0, None),
        ([1, 2, 3], 0, None),
        ([90], 0, 91),
        ([90], 1, None),
        ([1, 90, 5, 6], 3, None),
        ([1, 90, 5, 6], 2, 91),
        ([1, 90, 5, 6, 7, 8], 2, 91),
        ([1, 90, 5, 6, 91], 2, None),
        ([1, 90, 5, 6, 91, 7, 7, 7], 2, None),
        ([1, 90, 5, 91, 90, 5, 6], 2, 91),
        ([91, 90, 5], 1, 91),
        # Ids whose bytes hold a mark's bytes across two of them.
        ([90 << 8, 0, 0], 0, None),
    ],
)
def test_marks_of_one_token(history: list[int], budget: int, forced: int | None) -> None:
    assert ONE.forced_token(array("i", history), budget) == forced


@pytest.mark.parametrize(
    ("history", "forced"),
    [
        ([90, 1, 5], None),
        ([90, 1, 5, 6], 91),
        ([90, 1, 5, 6, 91], 91),
        ([90, 1, 5, 6, 91, 91], 92),
        ([90, 1, 5, 6, 91, 91, 92], None),
        ([90, 1, 5, 91, 7], 91),
        ([90, 5, 6, 7], None),
        ([90, 1, 91, 91], 92),
    ],
)
def test_marks_of_several_tokens(history: list[int], forced: int | None) -> None:
    assert MANY.forced_token(array("i", history), 2) == forced


def test_a_section_is_ended_whatever_else_is_said() -> None:
    kernels = choose("cpu", "float32", head_dim=64)
    sampler = Sampler(kernels, 100, marks=ThinkingMarks(array("i", [90]), array("i", [91, 92])))
    params = SamplingParams(
        thinking_token_budget=3, logit_bias={91: -100.0}, min_tokens=50, allowed_token_ids=[1, 2, 3]
    )
    rules = DrawRules(params, frozenset([92]), ((91,),), 1, True)
    history = array("i", [90])
    for number in range(8):
        draw = SamplingRow(0, rules, (4, 0, len(history)), number, history=history)
        values = torch.randn(1, 100, generator=torch.Generator().manual_seed(number))
        token = sampler.draw(values, [draw], {}).token_ids[0]
        assert token is not None
        history.append(token)
    assert history[4:6].tolist() == [91, 92]
    assert set(history[1:4]) | set(history[6:]) <= {1, 2, 3}


class TestMarks:
    """Which tokens begin and end the thinking of a model."""

    def test_a_model_without_such_tokens_is_refused_by_name(self) -> None:
        found = find_marks(ByteTokenizer(), 256, None)
        assert isinstance(found, str)
        assert "'<think>'" in found
        assert "reasoning_config" in found

    def test_marks_that_the_user_gives_may_be_several_tokens(self) -> None:
        config = {"reasoning_start_str": "<a>", "reasoning_end_str": "b"}
        found = find_marks(ByteTokenizer(), 256, config)
        assert isinstance(found, ThinkingMarks)
        assert found.start.tobytes()[::4] == b"<a>"
        assert found.end.tobytes()[::4] == b"b"

    def test_marks_that_cannot_be_drawn_are_refused(self) -> None:
        config = {"reasoning_start_str": "z", "reasoning_end_str": "b"}
        assert isinstance(find_marks(ByteTokenizer(), 100, config), str)

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"reasoning_begin_str": "a"}, "unknown setting 'reasoning_begin_str'"),
            ({"reasoning_end_str": ""}, "must be a text"),
        ],
    )
    def test_another_form_of_config_is_an_error(self, config: dict[str, str], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            find_marks(ByteTokenizer(), 256, config)


def test_a_loaded_model_ends_its_thinking(folder: Path, load: Any) -> None:
    config = {"reasoning_start_str": "<|user|>", "reasoning_end_str": "<|assistant|>"}
    runner = load(folder, reasoning_config=config)
    params = SamplingParams(temperature=0, thinking_token_budget=2)
    assert runner.refusal(params) is None
    assert "thinking_token_budget" in load(folder).refusal(params)
