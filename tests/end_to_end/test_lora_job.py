"""Jobs with adapters on a real engine: rows of several mixed, resumed, and one that does not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from batchgen.errors import BatchgenError, ModelError
from batchgen.jobs.spec import JobSpec
from batchgen.jobs.stopping import StopFlag
from batchgen.jobs.testing import QuietReporter, StoppingDisk, go, read_shards, visible
from batchgen.tiny_adapters import ALL_LINEAR, write_adapter
from batchgen.tiny_models import tiny_model, write_folder

pytestmark = pytest.mark.slow

NUM_ROWS = 40
# What an adapter may be: large and small, of few modules and of all.
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"rank": 24, "alpha": 24, "use_rslora": True},
    "odd": {"rank": 3, "targets": ("q_proj", "v_proj")},
    "ends": {"rank": 4, "targets": (*ALL_LINEAR, "embed_tokens", "lm_head")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters for it, and rows that name them."""
    folder = tmp_path_factory.mktemp("lora")
    model = write_folder(tiny_model(), folder / "model")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        write_adapter(folder / "adapters" / name, model, seed=seed, **settings)
    names = [None, *ADAPTERS]
    rows = {
        "text": [f"Row {number} is about {'abc' * (number % 7)}" for number in range(NUM_ROWS)],
        "which": [names[number * 7 % 4] for number in range(NUM_ROWS)],
    }
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    return folder


def job(folder: Path, place: Path, *, adapter: str | None = "column", **changes: Any) -> JobSpec:
    prompt: dict[str, Any] = {"template": "{{ text }}"}
    if adapter == "column":
        prompt["adapter_column"] = "which"
    elif adapter is not None:
        prompt["adapter"] = adapter
    data = {
        "model": {"path": "model"},
        "engine": {"reproducible": True, "max_num_seqs": 8, "num_threads": 2},
        "lora": {"adapters": {name: f"adapters/{name}" for name in ADAPTERS}, "max_loras": 2},
        "input": {"path": "rows.parquet"},
        "prompt": prompt,
        "sampling": {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True},
        "output": {"path": str(place), "shard_rows": 10, "commit_interval_s": 0.01},
    }
    for section, values in changes.items():
        data[section] = data[section] | values
    return JobSpec.from_mapping(data, folder)


def texts(output: Path) -> list[str]:
    found: list[str] = read_shards(output).column("generated_text").to_pylist()
    return found


@pytest.fixture(scope="module")
def mixed(folder: Path) -> Path:
    """The output of a job whose rows name all of them."""
    summary = go(job(folder, folder / "mixed"))
    assert summary.exit_code == 0 and summary.rows_done == NUM_ROWS
    assert summary.adapters == dict.fromkeys(ADAPTERS, NUM_ROWS // 4)
    return folder / "mixed"


def test_each_rows_text_is_that_of_a_run_of_its_adapter_alone(
    folder: Path, mixed: Path, tmp_path: Path
) -> None:
    which = pq.read_table(folder / "rows.parquet").column("which").to_pylist()
    alone = {}
    for name in (None, *ADAPTERS):
        assert go(job(folder, tmp_path / f"{name}", adapter=name)).exit_code == 0
        alone[name] = texts(tmp_path / f"{name}")
    assert texts(mixed) == [alone[name][number] for number, name in enumerate(which)]
    for one in alone:
        for other in alone:
            same = sum(a == b for a, b in zip(alone[one], alone[other], strict=True))
            assert same == NUM_ROWS if one == other else same < NUM_ROWS // 4


def test_stopped_and_resumed_gives_the_same_bytes(folder: Path, mixed: Path, tmp_path: Path) -> None:
    stop = StopFlag()
    # One row after the other: on a slow disk all would be done before the first are committed.
    slowly = job(folder, tmp_path / "out", output={"drain_timeout_s": 0}, engine={"max_num_seqs": 1})
    first = go(slowly, stop=stop, disk=StoppingDisk(stop))
    assert first.exit_code == 130 and 0 < first.rows_done < NUM_ROWS
    # From another folder, which holds the same.
    shutil.copytree(folder / "adapters", tmp_path / "copied")
    again = go(
        job(
            folder,
            tmp_path / "out",
            lora={"adapters": {name: str(tmp_path / "copied" / name) for name in ADAPTERS}},
        )
    )
    assert again.exit_code == 0 and again.rows_now == NUM_ROWS - first.rows_done
    assert visible(tmp_path / "out") == visible(mixed)


def test_fewer_slots_than_adapters_change_no_byte(folder: Path, mixed: Path, tmp_path: Path) -> None:
    # One at a time in host memory, too: each turn reads its adapter again.
    summary = go(job(folder, tmp_path / "out", lora={"max_loras": 1, "max_cpu_loras": 1}))
    assert summary.exit_code == 0 and visible(tmp_path / "out") == visible(mixed)


def merged(folder: Path, name: str, to: Path) -> Path:
    """The model with an adapter of linear layers added to its weights."""
    shutil.copytree(folder / "model", to)
    weights = load_file(to / "model.safetensors")
    adapter = load_file(folder / "adapters" / name / "adapter_model.safetensors")
    config = json.loads((folder / "adapters" / name / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    for key in adapter:
        if key.endswith(".lora_A.weight"):
            module = key.removesuffix(".lora_A.weight")
            b = adapter[f"{module}.lora_B.weight"].astype(np.float64)
            weight = module.removeprefix("base_model.model.") + ".weight"
            weights[weight] = (weights[weight] + scale * b @ adapter[key]).astype(np.float32)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.long
@pytest.mark.parametrize("name", ["wide", "odd"])
def test_the_texts_are_those_of_the_merged_model(folder: Path, tmp_path: Path, name: str) -> None:
    # BS-17: with the scale wrong, hardly a text would stay.
    greedy = {"sampling": {"temperature": 0}}
    go(job(folder, tmp_path / "ours", adapter=name, **greedy))
    model = merged(folder, name, tmp_path / "model")
    go(job(folder, tmp_path / "merged", adapter=None, model={"path": str(model)}, **greedy))
    pairs = zip(texts(tmp_path / "ours"), texts(tmp_path / "merged"), strict=True)
    # Two logits may be so near each other that another order of summation exchanges them.
    assert sum(one == other for one, other in pairs) >= NUM_ROWS - 2


def test_an_adapter_that_does_not_fit_is_found_before_row_1(folder: Path, tmp_path: Path) -> None:
    # Nothing but row 500 asks for it.
    other = write_folder(tiny_model(hidden_size=96), tmp_path / "other")
    write_adapter(tmp_path / "bad", other)
    rows = {"text": ["a"] * 600, "which": [None] * 499 + ["bad"] + ["odd"] * 100}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    reporter = QuietReporter()
    adapters = {"odd": "adapters/odd", "bad": str(tmp_path / "bad")}
    spec = job(
        folder, tmp_path / "out", lora={"adapters": adapters}, input={"path": str(tmp_path / "rows.parquet")}
    )
    with pytest.raises(BatchgenError, match=r"lora\.adapters\.bad: .*(72|96)") as refused:
        go(spec, reporter=reporter)
    assert isinstance(refused.value, ModelError)
    assert not any(state.rows_done for state in reporter.states)
    assert not (tmp_path / "out" / ".batchgen" / "manifest.json").exists()
    # Without it the job runs, and the row that names it says so.
    again = go(spec.with_overrides(["lora.adapters={odd: adapters/odd}"]))
    assert again.failures == {"unknown_adapter": 1} and again.adapters == {"odd": 100}
