"""A checkpoint of few bits through the worker: what is decided and said, the same tokens in any batch."""

from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ConfigError, UnsupportedModelError
from batchgen.tiny_checkpoints import gptq, plain_integers, write_pair
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf

PROMPTS = [random_ids(count, seed=count, vocab_size=256) for count in (5, 17, 40)]


def test_what_the_checkpoint_says_is_told(tmp_path: Path, load: Any) -> None:
    stored, _ = write_pair(tmp_path, *gptq(4, 32))
    info = load(stored).info
    assert "quantization=gptq (as the checkpoint is stored)" in info.decisions
    assert info.environment["quantization"] == "gptq"
    assert info.resolved["quantization"] is None
    assert info.reproducible


@pytest.mark.parametrize("form", [gptq(4, 32, act_order=True), plain_integers(rounds_inputs=True)])
def test_tokens_are_those_of_a_row_alone_before_and_after_sleep(
    form: Any, tmp_path: Path, load: Any, generates_the_same: Any
) -> None:
    runner = load(write_pair(tmp_path, *form)[0])
    generates_the_same(runner, PROMPTS, 10)


def test_tokens_are_those_of_the_float_model(tmp_path: Path, load: Any, generate: Any) -> None:
    runners = [load(folder) for folder in write_pair(tmp_path, *gptq(3, 32))]
    assert generate(runners[0], PROMPTS, 12) == generate(runners[1], PROMPTS, 12)


def test_rounding_what_is_rounded_already_is_refused(tmp_path: Path, load: Any) -> None:
    stored, _ = write_pair(tmp_path, *gptq(4, 32))
    with pytest.raises(UnsupportedModelError, match=r"int8 rounds float weights.*'gptq'"):
        load(stored, quantization="int8")
    assert "quantized already" in next(
        text for text in load(stored, quantization="auto").info.decisions if text.startswith("quantization=")
    )


def test_blocks_of_a_gguf_file_stay_what_they_are_if_that_is_asked_for(
    tmp_path: Path, load: Any, generate: Any
) -> None:
    model = tiny_model(hidden_size=96, intermediate_size=160)
    path = write_gguf(model, tmp_path / "tiny.gguf", "Q5_1")
    kept, floats = load(path, quantization="gguf"), load(path)
    assert generate(kept, PROMPTS, 12) == generate(floats, PROMPTS, 12)
    assert "quantization=gguf (as set)" in kept.info.decisions
    assert kept.info.environment["quantization"] == "gguf"
    with pytest.raises(ConfigError, match="is none; leave quantization out"):
        load(write_folder(model, tmp_path / "folder"), quantization="gguf")
