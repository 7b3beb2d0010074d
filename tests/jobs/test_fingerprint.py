"""What counts as another job, and how the difference reads."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen.errors import ResumeError
from batchgen.jobs.atomic import Disk
from batchgen.jobs.fingerprint import check_same_job, fingerprint, pinned_engine_args
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.manifest import Manifest, pack_schema
from batchgen.jobs.sections import InputSpec, ModelSpec, OutputSpec, PromptSpec
from batchgen.jobs.settings_sections import EngineSpec, LoraSpec
from batchgen.jobs.spec import JobSpec

DATA: dict[str, Any] = {
    "model": {"path": "echo:"},
    "input": {"path": "in.parquet"},
    "prompt": {"template": "{{ text }}"},
    "output": {"path": "out"},
}


def fields(*overrides: str, sampling: dict[str, Any] | None = None) -> dict[str, Any]:
    spec = JobSpec.from_mapping(DATA, overrides=overrides)
    return fingerprint(spec, model={"m": "1"}, tokenizer={"t": "2"}, sampling=sampling or {"n": 1})


def manifest(**values: Any) -> Manifest:
    given = {"source": {}, "num_rows": 3, "schema": "", "schema_text": "", "shard_rows": 10}
    return Manifest(**(given | {"fingerprint": fields()} | values))


def test_every_setting_counts_unless_it_is_known_to_be_free() -> None:
    # A setting added later must either show in the fingerprint or be listed as free on purpose.
    free = {
        *(f"input.{name}" for name in InputSpec.model_fields),
        *("model.path model.tokenizer output.path output.shard_rows output.commit_interval_s".split()),
        "output.drain_timeout_s",
        *("lora.adapters lora.max_loras lora.max_lora_rank lora.max_cpu_loras".split()),
        *(
            f"engine.{name}"
            for name in (
                "block_size num_gpu_blocks_override kv_cache_memory_bytes gpu_memory_utilization "
                "enable_prefix_caching swap_space max_num_seqs max_num_batched_tokens scheduling_policy "
                "enable_chunked_prefill long_prefill_token_threshold preemption_mode num_threads device "
                "kernel_backend tensor_parallel_size pipeline_parallel_size data_parallel_size "
                "enable_expert_parallel speculative delay_factor max_logprobs disable_log_stats"
            ).split()
        ),
    }
    sections = {"model": ModelSpec, "engine": EngineSpec, "prompt": PromptSpec, "output": OutputSpec}
    sections |= {"lora": LoraSpec}
    keys = {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    keys |= {f"input.{name}" for name in InputSpec.model_fields}
    counted = {key.rpartition(".{}")[0] or key for key in fields()}
    assert {key for key in keys if not any(c == key or c.startswith(key + ".") for c in counted)} == free


def test_the_same_job_passes_and_a_changed_one_reads_well() -> None:
    check_same_job(manifest(), fields(), "out")
    long = "prompt.template='" + "so " * 60 + "{{ text }}'"
    with pytest.raises(ResumeError) as refused:
        check_same_job(manifest(fingerprint=fields(long)), fields(long.replace("so {{", "no {{")), "out")
    (line,) = [line for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert line.startswith("  prompt.template: ") and len(line) < 200
    assert "so {{ text }}" in line.partition(" in the first run, ")[0]
    assert "no {{ text }}" in line.partition(" in the first run, ")[2]


def test_a_job_from_before_there_were_adapters_goes_on() -> None:
    then = {name: value for name, value in fields().items() if not name.startswith("prompt.adapter")}
    check_same_job(manifest(fingerprint=then | {"engine.enable_lora": False}), fields(), "out")


def test_the_order_of_a_schemas_properties_counts() -> None:
    # Texts have their properties in the order of the schema.
    def of(*names: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {name: {} for name in names}}
        return fields(sampling={"n": 1, "structured_outputs": {"json": schema}})

    check_same_job(manifest(fingerprint=of("a", "b")), of("a", "b"), "out")
    with pytest.raises(ResumeError, match=r"sampling\.structured_outputs"):
        check_same_job(manifest(fingerprint=of("a", "b")), of("b", "a"), "out")


def test_a_setting_that_the_first_run_decided_may_be_left_open_or_spelled_out() -> None:
    stored = manifest(engine={"dtype": "float32", "max_model_len": 2048, "reproducible": True, "seed": 0})
    for overrides in (
        [],
        ["engine.dtype=float32"],
        ["engine.max_model_len=2048", "engine.reproducible=true"],
    ):
        check_same_job(stored, fields(*overrides), "out")
    with pytest.raises(ResumeError, match=r'engine\.dtype: "float32" in the first run, "bfloat16" now'):
        check_same_job(stored, fields("engine.dtype=bfloat16"), "out")
    # Spelled out in the first run, left open now: the first run's value holds.
    spelled = manifest(engine={"dtype": "bfloat16"}, fingerprint=fields("engine.dtype=bfloat16"))
    check_same_job(spelled, fields(), "out")
    assert pinned_engine_args(stored) == {"dtype": "float32", "max_model_len": 2048, "reproducible": True}


@pytest.mark.parametrize("first", ["int8", "auto"])
def test_no_quantization_is_a_choice_of_its_own(first: str) -> None:
    rounded = manifest(engine={"quantization": "int8"}, fingerprint=fields(f"engine.quantization={first}"))
    for same in ("int8", "auto"):
        check_same_job(rounded, fields(f"engine.quantization={same}"), "out")
    with pytest.raises(ResumeError, match=r'engine\.quantization: "int8" in the first run, null now'):
        check_same_job(rounded, fields(), "out")
    whole = manifest(engine={"quantization": None})
    for same in ([], ["engine.quantization=auto"]):
        check_same_job(whole, fields(*same), "out")


def test_a_chat_template_counts_by_its_text(tmp_path: Path) -> None:
    for name in ("a.jinja", "b.jinja"):
        (tmp_path / name).write_text("{{ messages }}")
    one, other = (
        fingerprint(
            JobSpec.from_mapping(DATA | {"model": {"path": "echo:", "chat_template": name}}, tmp_path),
            model={},
            tokenizer={},
            sampling={},
        )
        for name in ("a.jinja", "b.jinja")
    )
    assert one == other and one["model.chat_template"] == "{{ messages }}"


def test_manifest_comes_back_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    for path in folder.folders:
        path.mkdir(parents=True, exist_ok=True)
    assert Manifest.read(folder) is None
    schema = pa.schema([("a", pa.decimal128(5, 2))], metadata={"k": "v"})
    stored = manifest(schema=pack_schema(schema))
    stored.write(folder, Disk())
    read = Manifest.read(folder)
    assert read == stored and read.read_schema().equals(schema, check_metadata=True)
    folder.manifest.write_text(folder.manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ResumeError, match="has format 2"):
        Manifest.read(folder)
    folder.manifest.write_text("{")
    with pytest.raises(ResumeError, match="cannot be read"):
        Manifest.read(folder)


def test_changed_model_files_are_named_without_their_hashes() -> None:
    then = fields() | {"model files: a": "0" * 64, "model files: b": "1" * 64, "tokenizer files: c": "2"}
    now = then | {"model files: a": "3" * 64, "model files: b": "4" * 64}
    stored = manifest(fingerprint=then, engine={"model": str(Path.cwd() / "models/a")})
    with pytest.raises(ResumeError, match="  model files changed: a, b\n"):
        check_same_job(stored, now, "out", str(Path.cwd() / "models/a"))
    with pytest.raises(ResumeError, match="  model: models/a → org/b\n") as refused:
        check_same_job(stored, now, "out", "org/b")
    assert "0000" not in str(refused.value)
