"""docs/python-api.md is true: its blocks run in order against a real model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def page(repository: Path) -> dict[str, Any]:
    """What the page's blocks leave behind when they have run."""
    text = (repository / "docs" / "python-api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 8
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "python-api.md", "exec"), names)
    return names


def test_the_model_says_what_the_page_is_about(page: dict[str, Any]) -> None:
    assert "Paris" in page["outputs"][0].outputs[0].text
    assert [sequence.num_prompt_tokens for sequence in page["found"].sequences] == [5] * 3
    assert "Paris" in page["found"].sequences[0].text
    assert page["drawn"].outputs[0].cumulative_logprob >= page["drawn"].outputs[1].cumulative_logprob
    assert page["sample"].valid is True
    assert isinstance(json.loads(page["sample"].text)["city"], str)
    assert page["score"].num_cached_tokens == 16
    assert page["stats"].num_pinned_blocks > 0
    assert page["output"].prompt_logprobs[0] is None
