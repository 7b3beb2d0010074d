"""bench: a workload on a tiny model: what is counted, what is bound by what, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen import BenchReport, MadeUp, bench
from batchgen.api.workload import from_file
from batchgen.engine.in_process import InProcessClient
from batchgen.engine.messages import EngineProfile, EngineRequest
from batchgen.errors import ConfigError, InputError
from batchgen.kernels.ceilings import Ceilings
from batchgen.kernels.cpu.library import Library, load
from batchgen.tiny_adapters import write_adapter
from batchgen.tiny_models import tiny_model, write_folder
from batchgen.worker.model_work import ModelWork, StepWork


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tiny_model(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[..., BenchReport]:
    def run(**values: Any) -> BenchReport:
        return bench(str(folder), in_process=True, use_tqdm=False, max_model_len=128, **values)

    return run


def check(report: BenchReport) -> None:
    """What holds of every report."""
    profile = report.profile
    assert all(seconds >= 0 for seconds in profile.seconds.values())
    assert sum(profile.seconds.values()) == pytest.approx(profile.wall_s)
    assert profile.wall_s <= report.seconds + 1.0
    json.dumps(report.to_mapping())
    if isinstance(load(), Library):
        assert min(profile.ceilings.values()) > 0
        assert set(profile.bound_s) == {"matrix_products", "attention"}
        assert report.bound_share is not None and report.bound_share > 0
        assert "in all" in str(report) and "GFLOP/s" in str(report)
    table = str(report).partition("part  ")[2].partition("in all")[0].splitlines()[1:]
    assert {line.split()[0] for line in table} == set(report.to_mapping()["parts_s"])


def test_a_made_up_workload_is_counted_to_the_token(run: Callable[..., BenchReport]) -> None:
    report = run(made_up=MadeUp(num_prompts=9, prompt_tokens=40, new_tokens=6, shared_tokens=32), limit=5)
    check(report)
    assert (report.num_requests, report.num_failed) == (5, 0)
    assert (report.input_tokens, report.output_tokens) == (200, 30)
    assert report.cached_tokens == 0 or report.cached_tokens % 32 == 0
    assert report.profile.num_rows == 30
    assert report.profile.num_tokens == 200 - report.cached_tokens + 5 * 5
    assert report.output_tokens_per_s == pytest.approx(30 / report.seconds)


def test_phases_are_told_in_order(run: Callable[..., BenchReport], folder: Path) -> None:
    told: list[str] = []
    run(made_up=MadeUp(num_prompts=1, prompt_tokens=1, new_tokens=1), on_phase=told.append)
    assert told == [
        f"loading {folder}",
        "warming up",
        "measuring what the machine does at most",
        "running 1 made-up prompt of 1 token, 1 token each",
        "measuring the machine again",
    ]


def test_requests_of_a_file(run: Callable[..., BenchReport], tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    rows = [{"id": n, "prompt_token_ids": [5 + n] * 9, "max_tokens": 2 + n} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    report = run(requests=file, limit=3)
    check(report)
    assert (report.input_tokens, report.output_tokens) == (27, 9)
    assert report.workload == "3 requests of some.jsonl"
    assert report.precision == "weights float32, KV cache float32"
    file.write_text(
        '{"prompt_token_ids": [999999], "max_tokens": 2}\n' + json.dumps(rows[0]), encoding="utf-8"
    )
    report = run(requests=file)
    assert (report.num_failed, report.output_tokens) == (1, 2)
    assert "request 1: " in str(report.first_failure) and "vocabulary" in str(report.first_failure)
    with pytest.raises(InputError, match=r"none could be run; request 1: .*vocabulary"):
        run(requests=file, limit=1)


def test_the_first_rows_of_a_job(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(9)), encoding="utf-8"
    )
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {json.dumps(str(folder))}\ninput: {{path: rows.jsonl}}\n"
        "prompt: {template: '{{ text }}'}\n"
        "sampling: {max_tokens: 3, ignore_eos: true}\nengine: {max_model_len: 64}\noutput: {path: out}\n",
        encoding="utf-8",
    )
    report = bench(job=job, limit=4, overrides=["sampling.max_tokens=2"], in_process=True, use_tqdm=False)
    check(report)
    assert (report.num_requests, report.output_tokens) == (4, 8)
    assert report.workload == "the first 4 rows of job.yaml"
    with pytest.raises(ConfigError, match=r"job.yaml:5: engine\.max_model_len=1000 is more than"):
        bench(job=job, max_model_len=1000, in_process=True, use_tqdm=False)
    assert not (tmp_path / "out").exists()


def test_the_rows_of_a_job_are_measured_with_their_adapters(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "mine", folder)
    rows = [{"text": "a", "which": which} for which in ("mine", None, "mine")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {json.dumps(str(folder))}\ninput: {{path: rows.jsonl}}\nlora: {{adapters: {{mine: mine}}}}\n"
        "prompt: {template: '{{ text }}', adapter_column: which}\n"
        "sampling: {max_tokens: 3, ignore_eos: true}\nengine: {max_model_len: 64}\noutput: {path: out}\n",
        encoding="utf-8",
    )
    asked: list[str | None] = []
    add = InProcessClient.add

    def note(engine: InProcessClient, request: EngineRequest) -> None:
        asked.append(request.adapter)
        add(engine, request)

    monkeypatch.setattr(InProcessClient, "add", note)
    report = bench(job=job, in_process=True, use_tqdm=False)
    check(report)
    assert asked[-3:] == ["mine", None, "mine"] and report.num_failed == 0


def test_what_cannot_be_measured_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one"):
        bench(str(folder), requests="a", made_up=MadeUp())
    with pytest.raises(ConfigError, match="name a model"):
        bench()
    with pytest.raises(ConfigError, match="limit must be 1 or more"):
        bench(str(folder), limit=0)
    with pytest.raises(ConfigError, match="overrides are those of a job"):
        bench(str(folder), overrides=["sampling.n=2"])
    with pytest.raises(ConfigError, match="shared_tokens"):
        MadeUp(prompt_tokens=8, shared_tokens=8)
    with pytest.raises(ConfigError, match="new_tokens must be a whole number, 1 or more"):
        MadeUp(new_tokens=0)
    with pytest.raises(ConfigError, match="echo engine computes nothing"):
        bench("echo:", use_tqdm=False)
    with pytest.raises(InputError, match="cannot be read"):
        from_file(tmp_path / "none.jsonl", None)
    file = tmp_path / "bad.jsonl"
    for line, why in (("{", "not JSON"), ("[]", "write"), ('{"prompt_token_ids": [1]}', "write")):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(InputError, match=f"line 1: {why}"):
            from_file(file, None)
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(InputError, match="no requests"):
        from_file(file, None)


def test_the_bound_by_hand() -> None:
    work = ModelWork(windows=(None,), block_bytes=[1000], key_ops=[10])
    work.layers.float_ops, work.layers.int8_ops, work.layers.num_bytes = 100, 0, 4000
    work.head.int8_ops, work.head.num_bytes = 50, 1000
    ceilings = Ceilings(float_ops=100.0, int8_ops=50.0, read_bytes=1000.0)
    # One token: 1 s of layers and 1 s of head are less than 5 s for reading both; keys take 2 s, blocks 3 s.
    few = StepWork(num_tokens=1, num_rows=1, num_keys=[20], num_blocks=[3])
    assert work.bound_s([few], ceilings) == {"matrix_products": 5.0, "attention": 3.0}
    # Many tokens of which none wants logits: 8 s of products are more than 4 s of reading.
    many = StepWork(num_tokens=8, num_rows=0, num_keys=[80], num_blocks=[1])
    assert work.bound_s([many], ceilings) == {"matrix_products": 8.0, "attention": 8.0}
    assert work.bound_s([few, many], ceilings) == {"matrix_products": 13.0, "attention": 11.0}


def report_of(profile: EngineProfile, **values: Any) -> BenchReport:
    given = {"model": "m", "workload": "w", "precision": "p", "num_requests": 3, "num_failed": 0}
    given |= {"input_tokens": 8, "cached_tokens": 2, "output_tokens": 4, "seconds": 2.0, "profile": profile}
    return BenchReport(**given | values)


@pytest.mark.parametrize(("bound_s", "is_said"), [(1.004, False), (1.03, True)])
def test_more_than_the_ceiling_is_explained(bound_s: float, is_said: bool) -> None:
    profile = EngineProfile(
        seconds={"matrix_products": 1.0, "attention": 0.5, "idle": 0.5}, wall_s=2.0, num_steps=1,
        num_tokens=10, num_rows=2, ceilings={"float_ops": 1e9, "int8_ops": 1e9, "read_bytes": 1e9},
        bound_s={"matrix_products": bound_s, "attention": 0.2},
    )  # fmt: skip
    text = str(report_of(profile))
    assert ("103%" in text) is is_said
    assert ("Above 100 %: the machine was faster than when it was measured" in text) is is_said
    assert "1 step)" in text


def test_a_report_without_ceilings_says_so() -> None:
    profile = EngineProfile(
        seconds={"forward_pass": 1.5, "scheduling": 0.25, "idle": 0.25}, wall_s=2.0, num_steps=3,
        num_tokens=10, num_rows=2, ceilings={}, bound_s={},
    )  # fmt: skip
    report = report_of(profile, num_failed=1, first_failure="request 2: too long")
    assert report.bound_s is None and report.bound_share is None
    assert str(report).splitlines() == [
        "m: w",
        "p",
        "2.0 output tokens/s, 4.0 input tokens/s (4 and 8 in 2.00 s, 3 steps)",
        "2 of the input tokens came from the prefix cache",
        "1 of 3 requests failed, not counted here; the first: request 2: too long",
        "",
        "part                  seconds  share  at least  reached",
        "forward_pass             1.50  75.0%                    ██████████████████",
        "scheduling               0.25  12.5%                    ███",
        "idle                     0.25  12.5%                    ███",
        "in all                   2.00",
        "",
        "This machine's ceilings are not measured here: the C kernels do not run.",
    ]
