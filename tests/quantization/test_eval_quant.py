"""`eval_quant`: the numbers against transformers' own, the picture, the processes and what they refuse."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from batchgen.api import eval_quant as module
from batchgen.api.eval_picture import draw
from batchgen.api.eval_quant import QuantReport, eval_quant
from batchgen.api.quantize import quantize
from batchgen.errors import BatchgenError, ConfigError, EngineError, InputError, ModelError
from batchgen.tiny_models import tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]  # a process for each scheme

LENGTH, TOKENS = 64, 512


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(
        str(folder), tmp_path_factory.mktemp("made") / "int4", scheme="int4", use_tqdm=False
    ).folder


@pytest.fixture(scope="module")
def report(folder: Path, other: Path, texts: Path) -> QuantReport:
    return eval_quant(
        str(folder), ["fp8", str(other)], f"{texts}:text", tokens=TOKENS, length=LENGTH, num_threads=2
    )


@torch.no_grad()
def distributions(model: Any, pieces: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([piece])).logits[0, :-1].log_softmax(dim=-1) for piece in pieces])


def test_numbers_are_those_of_transformers(
    report: QuantReport, other: Path, texts: Path, sizes: Any, as_floats: Any
) -> None:
    text = "".join(json.loads(line)["text"] + "\n\n" for line in texts.read_text().splitlines())
    ids = list(text.encode())[:TOKENS]
    pieces = [ids[at : at + LENGTH] for at in range(0, TOKENS, LENGTH)]
    truth, found = (
        distributions(model, pieces).double() for model in (tiny_model(**sizes), as_floats(other)[0])
    )
    following = torch.tensor([token for piece in pieces for token in piece[1:]])
    floats, fp8, int4 = report.schemes
    assert (floats.scheme, fp8.scheme, int4.scheme) == ("none", "fp8", str(other))
    assert (floats.kl, floats.same_top, floats.change) == (0.0, 1.0, 0.0)
    for scores, each in ((truth, floats), (found, int4)):
        loss = -float(scores.gather(1, following[:, None]).mean())
        assert each.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert int4.change == pytest.approx(int4.perplexity / floats.perplexity - 1, abs=1e-9)
    # Most of 300 tokens are counted each by itself.
    assert int4.kl == pytest.approx(float((truth.exp() * (truth - found)).sum(dim=1).mean()), rel=0.02)
    same = float((truth.argmax(dim=1) == found.argmax(dim=1)).double().mean())
    assert int4.same_top == pytest.approx(same, abs=0.003)
    assert 0 < fp8.kl < int4.kl
    assert int4.weights_mib < floats.weights_mib
    assert all(each.tokens_per_s > 0 and each.load_s > 0 for each in report.schemes)
    assert report.num_tokens == TOKENS


def test_the_report_as_a_table_as_json_and_as_a_picture(report: QuantReport, other: Path) -> None:
    table = str(report).splitlines()
    assert len(table) == 6 and table[3].startswith("none") and "float32" in table[3]
    assert json.loads(json.dumps(report.to_mapping()))["schemes"][2]["scheme"] == str(other)
    picture = ElementTree.fromstring(draw(report))
    texts = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert sum("fp8, KV float32" in text for text in texts) == 6
    bars = list(picture.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(bars) == 1 + 6 * 3


def test_each_cache_is_a_case_of_its_own(folder: Path, texts: Path) -> None:
    found = eval_quant(
        str(folder), ["none"], str(texts), kv_cache_dtypes=["float32", "int8"], tokens=128, length=64
    ).schemes
    assert [each.kv_cache_dtype for each in found] == ["float32", "float32", "int8"]
    assert found[1].kl < 1e-9 < found[2].kl


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"schemes": ["int5"]},
            ConfigError,
            "scheme 'int5' is neither one of none, int8, fp8",
        ),
        ({"data": "TEXTS:nothing"}, InputError, "there is no column 'nothing'; there are text, n"),
        ({"length": 4096, "tokens": 4096}, InputError, "less than one piece of 4096"),
        ({"length": 1}, ConfigError, "length must be 2 or more"),
        ({"kv_cache_dtypes": ["int3"]}, ConfigError, "kv_cache_dtype"),
        (
            {"schemes": ["gguf"]},
            ConfigError,
            "scheme gguf: .*gguf keeps the weights of a GGUF file",
        ),
    ],
)
def test_wrong_wishes_are_refused(
    options: dict[str, Any], error: type[BatchgenError], message: str, folder: Path, texts: Path
) -> None:
    options = {"schemes": ["int4"], "data": "TEXTS", "length": 64, "tokens": 64, **options}
    data = options.pop("data").replace("TEXTS", str(texts))
    with pytest.raises(error, match=message):
        eval_quant(str(folder), options.pop("schemes"), data, **options)


def test_a_process_that_dies_or_cannot_load_says_why(
    folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=f"scheme {broken}: .*damaged"):
        eval_quant(str(folder), [str(broken)], str(texts), tokens=64, length=64)
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="the process that measured none died:\nexit code 1"):
        eval_quant(str(folder), ["int4"], str(texts), tokens=64, length=64)
