"""What a job says while its engine starts, and where a setting that it cannot have is written."""

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.messages import EngineInfo
from batchgen.errors import ConfigError, WeightsError
from batchgen.jobs import engine_start as module
from batchgen.jobs.spec import load_spec
from batchgen.jobs.testing import QuietReporter, echo_job, go, stopped_run

JOB = """\
model: "echo:"
input: {path: in.parquet}
prompt: {template: "{{ text }}"}
engine:
  block_size: 16
  kernel_backend: gpu
output: {path: out}
"""


def failing(error: Exception) -> Any:
    def start(*_: Any, **__: Any) -> Any:
        raise error

    return start


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (ConfigError("kernel_backend='gpu' cannot serve: no"), ":6: engine.kernel_backend='gpu' cannot"),
        (ConfigError("block_size: too small"), ":5: engine.block_size: too small"),
        (ConfigError("max_model_len=9 is too much"), ":4: engine.max_model_len=9 is"),
        (ConfigError("no kernel serves"), ":4: no kernel serves"),
        (WeightsError("a tensor is missing"), ":1: a tensor is missing"),
    ],
)
def test_an_error_of_the_start_has_its_line(
    source: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, place: str
) -> None:
    job = source.parent / "job.yaml"
    job.write_text(JOB)
    monkeypatch.setattr(module, "start_engine", failing(error))
    with pytest.raises(type(error)) as caught:
        go(load_spec(job))
    assert str(caught.value).startswith(f"{job}{place}")


def test_what_the_first_run_decided_is_said_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_run(echo_job(source, engine={"quantization": "auto", "dtype": "float32"}))
    start = module.start_engine

    def with_decisions(*arguments: Any, **options: Any) -> Any:
        engine = start(*arguments, **options)
        values = {name: getattr(engine.info, name) for name in EngineInfo.__dataclass_fields__}
        engine.info = EngineInfo(**values | {"decisions": ("quantization=int8 (as set)", "num_blocks=9 (x)")})
        return engine

    def pinned(_: Any) -> dict[str, Any]:
        return {"quantization": "int8", "dtype": "float32", "kv_cache_dtype": "int8"}

    monkeypatch.setattr(module, "start_engine", with_decisions)
    monkeypatch.setattr(module, "pinned_engine_args", pinned)
    reporter = QuietReporter()
    go(echo_job(source, engine={"quantization": "auto", "dtype": "float32"}), reporter=reporter)
    decisions = [line for line in reporter.lines if "=" in line and not line.startswith("sampling.")]
    assert decisions == [
        "quantization=int8 (as in the first run)",
        "num_blocks=9 (x)",
        "kv_cache_dtype=int8 (as in the first run)",
    ]
