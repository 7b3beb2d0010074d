"""Adapters in jobs: which a row gets, what is refused and when, what counts for a resume, what is told."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen.jobs.engine_start as engine_start_module
from batchgen.config import EngineConfig
from batchgen.echo import EchoEngine
from batchgen.engine.messages import AdapterInfo, EngineRequest
from batchgen.errors import BatchgenError, ConfigError, ModelError, ResumeError, SourceError
from batchgen.jobs.events import read_events
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.spec import JobSpec, load_spec
from batchgen.jobs.status import status
from batchgen.jobs.testing import QuietReporter, echo_job, go, read_shards, stopped_run, visible
from batchgen.tiny_adapters import ALL_LINEAR, write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.mlp.down_proj": (8, 12)}
NAMES = ("sql", "chat", "code")


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    for seed, name in enumerate(NAMES):
        write_adapter(tmp_path / "adapters" / name, SHAPES, rank=4, seed=seed)
    return {name: f"adapters/{name}" for name in NAMES}


def write_rows(folder: Path, cells: list[Any], name: str = "rows.parquet") -> Path:
    rows = {"text": [f"row {number}" for number in range(len(cells))], "which": cells}
    pq.write_table(pa.table(rows), folder / name)
    return folder / name


def mixed(count: int) -> list[str | None]:
    """Names by turns, with nulls and empty texts in between."""
    return [("sql", None, "chat", "", "code", "sql")[number % 6] for number in range(count)]


def adapter_job(rows: Path, adapters: dict[str, str], output: str = "out", **changes: Any) -> JobSpec:
    lora = {"adapters": adapters} | changes.pop("lora", {})
    prompt = {"template": "Say {{ text }}", "adapter_column": "which"}
    return echo_job(rows, output, **({"lora": lora, "prompt": prompt} | changes))


def for_all(rows: Path, adapters: dict[str, str], name: str | None, output: str) -> JobSpec:
    prompt = {"template": "Say {{ text }}"} | ({} if name is None else {"adapter": name})
    return adapter_job(rows, adapters, output, prompt=prompt)


class WatchedEcho(EchoEngine):
    """An echo engine that notes which adapters are in flight."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.adapter_of: dict[str, str | None] = {}
        self.order: list[str | None] = []
        self.most_adapters = 0
        self.is_shut = False

    def add(self, request: EngineRequest) -> None:
        self.adapter_of[request.request_id] = request.adapter
        self.order.append(request.adapter)
        in_flight = {self.adapter_of[each] for each in self.in_flight()} | {request.adapter}
        self.most_adapters = max(self.most_adapters, len(in_flight - {None}))
        super().add(request)

    def shutdown(self) -> None:
        self.is_shut = True
        super().shutdown()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[WatchedEcho]:
    """The engines that jobs start from now on."""
    engines: list[WatchedEcho] = []

    def start(config: EngineConfig, *_: Any, **__: Any) -> EchoEngine:
        engine = WatchedEcho.from_config(config)
        assert isinstance(engine, WatchedEcho)
        engines.append(engine)
        return engine

    monkeypatch.setattr(engine_start_module, "start_engine", start)
    return engines


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(*_: Any, **__: Any) -> Any:
        raise AssertionError("the engine was started")

    with monkeypatch.context() as patched:
        patched.setattr(engine_start_module, "start_engine", start)
        yield


def texts(folder: Path) -> list[str]:
    found: list[str] = read_shards(folder).column("generated_text").to_pylist()
    return found


@pytest.mark.parametrize("max_loras", [1, 2, 8])
def test_each_row_gets_the_adapter_that_it_names(
    tmp_path: Path, adapters: dict[str, str], watched: list[WatchedEcho], max_loras: int
) -> None:
    cells = mixed(150)
    rows = write_rows(tmp_path, cells)
    alone = {}
    for name in (None, *NAMES):
        go(for_all(rows, adapters, name, f"only-{name}"))
        alone[name] = texts(tmp_path / f"only-{name}")
    assert len({tuple(found) for found in alone.values()}) == 4
    summary = go(adapter_job(rows, adapters, lora={"max_loras": max_loras}))
    assert summary.exit_code == 0 and summary.rows_done == 150
    written = read_shards(tmp_path / "out")
    assert written.column("row_index").to_pylist() == list(range(150))
    expected = [alone[cell or None][number] for number, cell in enumerate(cells)]
    assert written.column("generated_text").to_pylist() == expected
    engine = watched[-1]
    assert engine.most_adapters == min(max_loras, 3)
    assert Counter(engine.order) == Counter(cell or None for cell in cells)
    used = [adapter for adapter in engine.order if adapter is not None]
    changes = sum(one != other for one, other in pairwise(used))
    # In the order of the rows three of four follow another one's.
    assert max_loras > 1 or changes < 30


def test_what_is_told_of_adapters(tmp_path: Path, adapters: dict[str, str]) -> None:
    reporter = QuietReporter()
    summary = go(adapter_job(write_rows(tmp_path, mixed(60)), adapters), reporter=reporter)
    assert f"adapter sql: rank 4, 2 modules ({tmp_path / 'adapters' / 'sql'})" in reporter.lines
    assert summary.adapters == {"sql": 20, "chat": 10, "code": 10}
    assert "adapters: sql 20 rows, chat 10 rows, code 10 rows" in summary.lines()
    events = list(read_events(OutputFolder(tmp_path / "out").events))
    assert {event["name"] for event in events if event["kind"] == "adapter"} == set(NAMES)
    for kind in ("interval", "end"):
        assert [event for event in events if event["kind"] == kind][-1]["adapters"] == summary.adapters
    assert summary.to_mapping()["adapters"] == summary.adapters


def test_of_many_adapters_some_are_named(tmp_path: Path, adapters: dict[str, str]) -> None:
    many = {f"a{number}": adapters["sql"] for number in range(13)}
    cells = [f"a{max(0, number - 5)}" for number in range(18)]
    reporter = QuietReporter()
    summary = go(adapter_job(write_rows(tmp_path, cells), many), reporter=reporter)
    told = [line for line in reporter.lines if "adapter" in line.partition(":")[0]]
    assert len(told) == 11 and told[9].startswith("adapter a9: ") and told[10] == "and 3 more adapters"
    (line,) = [line for line in summary.lines() if line.startswith("adapters: ")]
    assert line.startswith("adapters: a0 6 rows, a1 1 row, ") and line.endswith(" and 3 more adapters")
    assert summary.adapters["a12"] == 1


def test_no_adapter_means_nothing_new(tmp_path: Path, source: Path, watched: list[WatchedEcho]) -> None:
    summary = go(echo_job(source))
    assert summary.adapters == {} and not any(line.startswith("adapter") for line in summary.lines())
    assert watched[0].info.resolved["enable_lora"] is False
    assert set(watched[0].order) == {None}


def test_an_adapter_that_no_row_uses_is_not_loaded(
    tmp_path: Path, adapters: dict[str, str], watched: list[WatchedEcho]
) -> None:
    rows = write_rows(tmp_path, ["sql"] * 3)
    assert go(for_all(rows, adapters, "chat", "one")).exit_code == 0
    assert [each.name for each in watched[-1].adapters()] == ["chat"]
    assert go(for_all(rows, adapters, None, "none")).exit_code == 0
    assert watched[-1].adapters() == []
    # Of a column nobody knows before it is read.
    assert go(adapter_job(rows, adapters)).adapters == {"sql": 3}


def test_a_cell_that_names_no_adapter_fails_its_row_alone(tmp_path: Path, adapters: dict[str, str]) -> None:
    summary = go(adapter_job(write_rows(tmp_path, ["sql", "sqll", "chat", "zz"]), adapters))
    assert summary.exit_code == 3 and summary.failures == {"unknown_adapter": 2}
    found = read_shards(tmp_path / "out").column("error").to_pylist()
    assert found[0] is None and found[2] is None
    assert found[1]["message"] == (
        "column 'which' holds 'sqll', which is not in lora.adapters; did you mean 'sql'?"
    )
    assert found[3]["message"].endswith("which is not in lora.adapters")


def test_a_cell_that_is_no_text(tmp_path: Path, adapters: dict[str, str], no_engine: None) -> None:
    with pytest.raises(
        SourceError, match=r"prompt\.adapter_column: column 'which' is int64, not names of adapters"
    ):
        go(adapter_job(write_rows(tmp_path, [1, 2]), adapters))


def test_a_cell_of_json_that_is_no_text(tmp_path: Path, adapters: dict[str, str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "which": cell}) + "\n" for cell in ("sql", 7, None)))
    summary = go(adapter_job(path, adapters))
    assert summary.failures == {"unknown_adapter": 1} and summary.adapters == {"sql": 1}


def job_file(folder: Path, more: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        "model: 'echo:'\n"
        "input: {path: rows.parquet}\n"
        "output: {path: out}\n"
        "lora:\n"
        "  adapters:\n"
        "    sql: adapters/sql\n"
        "    my-chat.v2: adapters/chat\n" + more
    )
    return path


WRONG_KEYS = {
    "  max_loras: 0\nprompt: {template: a}\n": r":8: lora\.max_loras: must be 1 or more; got 0",
    "  max_lora_rank: 0\nprompt: {template: a}\n": (
        r":8: lora\.max_lora_rank: must be from 1 to 512, or null; got 0"
    ),
    "  max_lora: 2\nprompt: {template: a}\n": r":8: lora\.max_lora: unknown key; did you mean 'max_loras'\?",
    "prompt:\n  template: a\n  adapter: sq\n": (
        r":10: prompt\.adapter: no adapter 'sq' in lora\.adapters; did you mean 'sql'\?"
    ),
    "prompt:\n  template: a\n  adapter: zzz\n": (
        r":10: prompt\.adapter: no adapter 'zzz' in lora\.adapters; there are: my-chat\.v2, sql"
    ),
    "prompt:\n  template: a\n  adapter: sql\n  adapter_column: which\n": (
        r":11: prompt\.adapter_column: adapter names one for all rows; leave one of the two out"
    ),
    "prompt: {template: a}\nengine:\n  enable_lora: true\n": (
        r":10: engine\.enable_lora: belongs elsewhere: write lora\.adapters"
    ),
    "prompt: {template: a}\nengine:\n  max_loras: 3\n": (
        r":10: engine\.max_loras: belongs elsewhere: write lora\.max_loras"
    ),
}


@pytest.mark.parametrize("more", WRONG_KEYS)
def test_wrong_keys_are_named_with_their_lines(tmp_path: Path, more: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.yaml" + WRONG_KEYS[more]):
        load_spec(job_file(tmp_path, more))


def test_an_adapter_needs_a_list_of_adapters(tmp_path: Path, source: Path) -> None:
    for key in ("adapter", "adapter_column"):
        with pytest.raises(ConfigError, match=rf"prompt\.{key}: .*lora\.adapters"):
            echo_job(source, prompt={"template": "a", key: "text"})


def test_slots_that_host_memory_does_not_hold(tmp_path: Path, adapters: dict[str, str]) -> None:
    rows = write_rows(tmp_path, ["sql"])
    with pytest.raises(ConfigError, match=r"lora\.max_cpu_loras: .*max_loras"):
        adapter_job(rows, adapters, lora={"max_loras": 4, "max_cpu_loras": 2})
    assert adapter_job(rows, adapters, lora={"max_loras": 2, "max_cpu_loras": 2}).lora.given()


def test_a_column_that_is_not_there(tmp_path: Path, adapters: dict[str, str], no_engine: None) -> None:
    write_rows(tmp_path, ["sql"])
    more = "prompt:\n  template: a\n  adapter_column: whic\n"
    with pytest.raises(
        SourceError, match=r"job\.yaml:10: prompt\.adapter_column: no column 'whic'; did you mean 'which'"
    ):
        go(load_spec(job_file(tmp_path, more)))


def set_key(folder: Path, key: str, value: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))


def broken(folder: Path) -> dict[str, tuple[Callable[[Path], object], str]]:
    """What is done to the folder of an adapter, and what is said of it."""
    return {
        "gone": (shutil.rmtree, r"no such folder 'adapters/sql'.*the hub cannot be reached"),
        "moved": (
            lambda path: path.rename(path.with_name("sql2")),
            r"no such folder 'adapters/sql' \(did you mean 'adapters/sql2'\?\)",
        ),
        "bare": (lambda path: (path / "adapter_config.json").unlink(), r"holds no adapter"),
        "model": (
            lambda path: (path / "adapter_config.json").rename(path / "config.json"),
            r"holds a model: .* adapter_config\.json",
        ),
        "pickled": (
            lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"),
            r"adapter_model\.bin.*safe_serialization=True",
        ),
        "half": (
            lambda path: (path / "adapter_model.safetensors").write_bytes(
                (path / "adapter_model.safetensors").read_bytes()[:-100]
            ),
            r"not a whole safetensors file",
        ),
        "dora": (lambda path: set_key(path, "use_dora", True), r"use_dora: DoRA is not built; merge"),
        "no rank": (lambda path: set_key(path, "r", 0), r"r must be a rank"),
        "news": (lambda path: set_key(path, "use_tomorrow", 3), r"use_tomorrow=3 is not known here"),
        "no json": (lambda path: (path / "adapter_config.json").write_text("{"), r"cannot be read as JSON"),
    }


@pytest.mark.parametrize("what", broken(Path()))
def test_files_that_are_no_adapter_are_found_before_the_engine_starts(
    tmp_path: Path, adapters: dict[str, str], no_engine: None, what: str
) -> None:
    write_rows(tmp_path, ["my-chat.v2"])
    harm, said = broken(tmp_path)[what]
    harm(tmp_path / "adapters" / "sql")
    more = "prompt:\n  template: a\n  adapter_column: which\n"
    with pytest.raises(ConfigError, match=r"job\.yaml:6: lora\.adapters\.sql: .*" + said):
        go(load_spec(job_file(tmp_path, more)))


def test_all_wrong_adapters_are_told_at_once(
    tmp_path: Path, adapters: dict[str, str], no_engine: None
) -> None:
    write_rows(tmp_path, ["sql"])
    shutil.rmtree(tmp_path / "adapters")
    with pytest.raises(ConfigError) as refused:
        go(load_spec(job_file(tmp_path, "prompt: {template: a, adapter: sql}\n")))
    lines = str(refused.value).splitlines()
    assert lines[0] == "2 adapters cannot be used"
    assert "job.yaml:6: lora.adapters.sql: " in lines[1]
    assert "job.yaml:7: lora.adapters.my-chat.v2: " in lines[2]


@pytest.mark.parametrize(
    ("rank", "pattern", "refused"),
    [(32, {}, 32), (12, {}, None), (16, {}, None), (8, {"q_proj": 64}, 64), (64, {".*": 8}, None)],
)
def test_ranks_are_held_to_the_limit_before_row_1(
    tmp_path: Path,
    adapters: dict[str, str],
    watched: list[WatchedEcho],
    rank: int,
    pattern: Any,
    refused: Any,
) -> None:
    # BG-27: the first row that uses it is row 500.
    write_adapter(tmp_path / "adapters" / "code", SHAPES, rank=rank, rank_pattern=pattern)
    rows = write_rows(tmp_path, ["sql"] * 500 + ["code"] * 10)
    spec = adapter_job(rows, adapters, lora={"max_lora_rank": 16})
    if refused is None:
        assert go(spec).adapters == {"sql": 500, "code": 10}
        return
    with pytest.raises(ConfigError) as found:
        go(spec)
    said = str(found.value)
    assert said.startswith(f"lora.adapters.code: has rank {refused} ")
    assert "lora.max_lora_rank 16" in said and f"set lora.max_lora_rank: {refused}" in said
    assert not watched and not (tmp_path / "out" / ".batchgen" / "manifest.json").exists()
    assert go(adapter_job(rows, adapters)).adapters == {"sql": 500, "code": 10}


@pytest.mark.parametrize("kind", [ModelError, ConfigError])
def test_what_the_engine_refuses_is_told_with_its_place(
    tmp_path: Path,
    adapters: dict[str, str],
    watched: list[WatchedEcho],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BatchgenError],
) -> None:
    def refuse(engine: EchoEngine, name: str, path: str) -> AdapterInfo:
        # As the engine begins its own.
        raise kind(f"adapter {name!r}: layer 3 has no module 'w_pack'")

    monkeypatch.setattr(WatchedEcho, "load_adapter", refuse)
    write_rows(tmp_path, ["sql"])
    more = "prompt: {template: a, adapter: my-chat.v2}\n"
    with pytest.raises(
        kind, match=r"job\.yaml:7: lora\.adapters\.my-chat\.v2: layer 3 has no module 'w_pack'"
    ):
        go(load_spec(job_file(tmp_path, more)))
    assert watched[0].is_shut and watched[0].order == []
    assert not (tmp_path / "out" / ".batchgen" / "manifest.json").exists()


def test_a_resume_goes_on_with_equal_adapters_from_elsewhere(
    tmp_path: Path, adapters: dict[str, str]
) -> None:
    rows = write_rows(tmp_path, mixed(57))
    first = stopped_run(adapter_job(rows, adapters))
    assert 0 < first.rows_done < 57
    shutil.move(tmp_path / "adapters", tmp_path / "moved")
    # Where the base model lay in training, and in which order modules were named, changes nothing.
    set_key(tmp_path / "moved" / "sql", "base_model_name_or_path", "elsewhere/other")
    set_key(tmp_path / "moved" / "sql", "target_modules", list(reversed(ALL_LINEAR)))
    moved = {name: f"moved/{name}" for name in NAMES}
    again = go(adapter_job(rows, moved, lora={"max_loras": 1, "max_lora_rank": 8, "max_cpu_loras": 1}))
    assert again.exit_code == 0 and again.rows_now == 57 - first.rows_done
    assert status(tmp_path / "out").rows_done == 57


def test_stopped_and_resumed_gives_the_same_bytes(tmp_path: Path, adapters: dict[str, str]) -> None:
    rows = write_rows(tmp_path, mixed(57))
    lora = {"max_loras": 1}
    go(adapter_job(rows, adapters, "whole", lora=lora))
    assert stopped_run(adapter_job(rows, adapters, "broken", lora=lora)).rows_done < 57
    go(adapter_job(rows, adapters, "broken", lora=lora))
    assert visible(tmp_path / "broken") == visible(tmp_path / "whole")


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, str], str]] = {
    "weights": (
        lambda folder: write_adapter(folder / "sql", SHAPES, rank=4, seed=9),
        {},
        r"lora\.adapters\.sql: another adapter than in the first run",
    ),
    "alpha": (
        lambda folder: write_adapter(folder / "sql", SHAPES, rank=4, alpha=9),
        {},
        r"lora\.adapters\.sql: another adapter than in the first run",
    ),
    "one more": (
        lambda folder: write_adapter(folder / "new", SHAPES),
        {"new": "adapters/new"},
        r"lora\.adapters\.new: not used in the first run, used now",
    ),
    "exchanged": (
        lambda folder: None,
        {"sql": "adapters/chat", "chat": "adapters/sql"},
        r"lora\.adapters\.chat: another .*\n.*lora\.adapters\.sql: another",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_resume_with_another_adapter_is_refused_by_its_name(
    tmp_path: Path, adapters: dict[str, str], no_engine: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    # BG-33
    rows = write_rows(tmp_path, mixed(57))
    with monkeypatch.context() as patched:
        patched.setattr(
            engine_start_module, "start_engine", lambda config, *_, **__: EchoEngine.from_config(config)
        )
        stopped_run(adapter_job(rows, adapters))
    before = visible(tmp_path / "out")
    change, other, said = CHANGES[what]
    change(tmp_path / "adapters")
    with pytest.raises(ResumeError, match=said) as refused:
        go(adapter_job(rows, adapters | other))
    assert "--restart" in str(refused.value) and "sha256" not in str(refused.value)
    assert visible(tmp_path / "out") == before


def test_another_adapter_or_column_is_another_job(tmp_path: Path, adapters: dict[str, str]) -> None:
    rows = write_rows(tmp_path, mixed(57))
    go(for_all(rows, adapters, "sql", "out"))
    with pytest.raises(ResumeError, match=r'prompt\.adapter: "sql" in the first run, "chat" now'):
        go(for_all(rows, adapters, "chat", "out"))
    with pytest.raises(ResumeError, match=r'prompt\.adapter_column: null in the first run, "which" now'):
        go(adapter_job(rows, adapters))
    # Of the adapters that no row could use none counts.
    write_adapter(tmp_path / "adapters" / "chat", SHAPES, seed=9)
    assert go(for_all(rows, adapters, "sql", "out")).was_finished


def test_rows_that_wait_when_the_source_breaks_off_are_done_too(
    tmp_path: Path, adapters: dict[str, str]
) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path, mixed(30), f"{name}.parquet")

    class Breaking(QuietReporter):
        def say(self, line: str) -> None:
            # Said when the engine is up, before the second file is opened.
            (tmp_path / "b.parquet").unlink(missing_ok=True)

    with pytest.raises(BatchgenError, match=r"b\.parquet"):
        go(adapter_job(tmp_path / "*.parquet", adapters, lora={"max_loras": 1}), reporter=Breaking())
    assert status(tmp_path / "out").rows_done == 30
