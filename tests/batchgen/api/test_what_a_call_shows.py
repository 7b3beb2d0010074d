"""What a call shows while it runs and after: its bar on stderr, and a warning when prompts have failed."""

import logging
import time
from collections.abc import Iterator

import pytest

from batchgen import LLM, BeamSearchParams, SamplingParams
from batchgen.api import progress_bar as module
from batchgen.api.progress_bar import progress_bar
from batchgen.engine.messages import EngineStats

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("echo:", max_model_len=64) as made:
        yield made


def test_a_long_text_shows_its_tokens_before_it_is_finished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_INTERVAL_S", 0.0)
    with progress_bar(1, use_tqdm=True) as bar:
        bar.see(EngineStats(generation_tokens=500))  # of calls before
        time.sleep(0.02)
        assert "tokens/s" not in capsys.readouterr().err
        bar.see(EngineStats(generation_tokens=600))
    shown = capsys.readouterr().err
    assert "0/1" in shown
    rate = float(shown.rpartition(", ")[2].partition(" tokens/s")[0])
    assert 100 < rate < 100 / 0.02


def test_each_call_has_one_bar_and_none_for_nothing(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.score("ab", ["c", "d", "e"])
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "score" in shown
    assert "0/1" not in shown
    assert "tokens/s" not in shown
    llm.generate(["ab", "c"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    llm.generate([], GREEDY)
    llm.wait_for_completion()
    llm.generate("ab", GREEDY, use_tqdm=False)
    llm.beam_search("ab", BeamSearchParams(beam_width=2, max_tokens=2))
    assert capsys.readouterr().err == ""


def test_failed_prompts_are_said_once_for_a_call(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm.generate(["fine", [], "x" * 100], GREEDY, use_tqdm=False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "2 of 3 prompts failed (each output has its `error`); prompt 1: empty_prompt: "
        "the prompt has no tokens"
    )
    caplog.clear()
    llm.score("ab", ["x", "y" * 100], use_tqdm=False)
    llm.enqueue([[]], GREEDY)
    llm.wait_for_completion(use_tqdm=False)
    assert [record.getMessage()[:21] for record in caplog.records] == [
        "1 of 2 prompts failed", "1 of 1 prompt failed ",
    ]  # fmt: skip
    caplog.clear()
    llm.generate("fine", GREEDY, use_tqdm=False)
    assert caplog.records == []
