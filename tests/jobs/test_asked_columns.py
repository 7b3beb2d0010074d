"""Columns that sampling parameters ask for, and what is refused before a model loads."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import ConfigError
from batchgen.jobs.logprob_arrays import POSITIONS, flat, logprob_array, nested_logprob_array
from batchgen.jobs.prepare import prepare
from batchgen.jobs.spec import JobSpec, load_spec
from batchgen.jobs.testing import go, read_shards
from batchgen.logprobs import FlatLogprobs, Logprob

SCHEMA = {
    "type": "object",
    "properties": {"b": {"enum": [1, 22]}, "a": {"type": "string", "maxLength": 3}},
    "required": ["b", "a"],
    "additionalProperties": False,
}


def job(folder: Path, model: str = "echo:", **sampling: Any) -> JobSpec:
    pq.write_table(pa.table({"text": ["one", "two", None]}), folder / "in.parquet")
    data = {
        "model": model,
        "input": {"path": "in.parquet"},
        "prompt": {"column": "text"},
        "sampling": {"max_tokens": 12} | sampling,
        "output": {"path": "out"},
    }
    return JobSpec.from_mapping(data, folder)


def test_log_probabilities_are_lists_of_positions_and_failed_rows_have_none(tmp_path: Path) -> None:
    go(job(tmp_path, logprobs=2, prompt_logprobs=1))
    table = read_shards(tmp_path / "out")
    assert table.schema.field("logprobs").type == POSITIONS
    assert table.schema.field("prompt_logprobs").type == POSITIONS
    for text, row in zip(("one", "two"), table.to_pylist(), strict=False):
        drawn = [position[0]["token_id"] for position in row["logprobs"]]
        assert bytes(drawn).decode() == row["generated_text"]
        assert row["logprobs"][0][0] == {"token_id": ord(text[0]), "logprob": 0.0, "rank": 1}
        # The first token of a prompt has none.
        assert [entry and entry[0]["token_id"] for entry in row["prompt_logprobs"]] == [None, *text.encode()]
    assert table["logprobs"].to_pylist()[2] is None
    assert table["prompt_logprobs"].to_pylist()[2] is None


def test_of_several_samples_each_has_its_own(tmp_path: Path) -> None:
    go(job(tmp_path, n=2, logprob_token_ids=[7], structured_outputs={"json_object": True}))
    table = read_shards(tmp_path / "out")
    assert table.schema.field("logprobs").type == pa.list_(POSITIONS)
    assert table.schema.field("valid").type == pa.list_(pa.bool_())
    assert [valid and len(valid) for valid in table["valid"].to_pylist()] == [2, 2, None]
    assert [each and len(each) for each in table["logprobs"].to_pylist()] == [2, 2, None]


def test_without_being_asked_for_they_are_not_there(tmp_path: Path) -> None:
    go(job(tmp_path))
    assert not {"valid", "logprobs", "prompt_logprobs"} & set(read_shards(tmp_path / "out").schema.names)


def test_minus_infinity_and_missing_ranks_survive() -> None:
    text = flat([{5: Logprob(-0.5, 1), 6: Logprob(float("-inf"))}])
    array = nested_logprob_array([[text, None], None, [FlatLogprobs()]])
    array.validate(full=True)
    assert array.type == pa.list_(POSITIONS)
    entries = [
        {"token_id": 5, "logprob": -0.5, "rank": 1},
        {"token_id": 6, "logprob": float("-inf"), "rank": None},
    ]
    assert array.to_pylist() == [[[entries], None], None, [[]]]
    assert logprob_array([]).type == POSITIONS


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"json": {"items": {"uniqueItems": True}}}, r"json: cannot be enforced: .*uniqueItems.*at items"),
        ({"regex": "(?=a)b"}, r"regex: .*look-around"),
        ({"grammar": "start: nothing"}, r"grammar: .*unknown name"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_enforced_is_refused_before_the_model_loads(
    tmp_path: Path, grammar: dict[str, Any], message: str
) -> None:
    ((key, value),) = grammar.items()
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "in.parquet")
    (tmp_path / "job.yaml").write_text(
        'model: "echo:"\ninput: {path: in.parquet}\nprompt: {column: text}\noutput: {path: out}\n'
        f"sampling:\n  max_tokens: 3\n  structured_outputs:\n    {key}: {json.dumps(value)}\n",
        encoding="utf-8",
    )
    spec = load_spec(tmp_path / "job.yaml")
    with pytest.raises(ConfigError) as refused:
        prepare(spec)
    assert re.search(f"job.yaml:8: sampling.structured_outputs.{message}", str(refused.value)), refused.value
    assert not (tmp_path / "out").exists()


def test_what_only_the_engine_knows_is_refused_before_the_first_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'logprobs' is 21, but the engine gives at most 20"):
        go(job(tmp_path, logprobs=21))
    assert list((tmp_path / "out").glob("data-*")) == []
    summary = go(job(tmp_path, logprobs=21).with_overrides(["engine.max_logprobs=21"]))
    assert summary.rows_done == 3


def test_a_grammar_in_yaml_and_as_text_is_the_same_job(tmp_path: Path) -> None:
    written = [
        job(tmp_path, structured_outputs={"json": schema})
        for schema in (SCHEMA, json.dumps(SCHEMA, indent=2))
    ]
    first, second = (prepare(spec).fingerprint for spec in written)
    assert first == second


@pytest.mark.slow
def test_rows_of_a_model_conform_and_beams_and_the_best_of_many_are_kept(tmp_path: Path) -> None:
    from batchgen.tiny_models import tiny_model, write_folder

    model = str(write_folder(tiny_model(), tmp_path / "tiny"))
    likely = dict.fromkeys([*b'"}', 257], 5.0)
    common = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60, "logit_bias": likely}
    for number, sampling in enumerate(
        (
            {"seed": 3, "logprobs": 1},
            {"n": 2, "best_of": 4},
            {"n": 3, "temperature": 0, "use_beam_search": True},
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        summary = go(job(folder, model, **common, **sampling))
        assert summary.rows_failed == 1
        for row in read_shards(folder / "out").to_pylist()[:2]:
            texts, valid = row["generated_text"], row["valid"]
            if "n" not in sampling:
                texts, valid = [texts], [valid]
                assert len(row["logprobs"]) == row["num_generated_tokens"]
            assert len(texts) == sampling.get("n", 1)
            assert all(valid)
            for text in texts:
                assert list(json.loads(text)) == ["b", "a"]
