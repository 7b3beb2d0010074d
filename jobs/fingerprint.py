"""The fingerprint of a job: every setting that can change a row, and what differs from the first run's."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.errors import ResumeError
from batchgen.jobs.manifest import Manifest, json_form
from batchgen.jobs.output_state import display_path
from batchgen.jobs.spec import JobSpec

# Keys that cannot change a row. Everything else counts: a setting added later is safe when forgotten here.
_FREE = frozenset(
    {
        # Where things lie; content is compared instead.
        "model.path",
        "model.tokenizer",
        "lora.adapters",
        "output.path",
        # The source's identity is compared instead, file by file.
        "input",
        # Sizes and rhythm.
        "engine.block_size",
        "engine.num_gpu_blocks_override",
        "engine.kv_cache_memory_bytes",
        "engine.gpu_memory_utilization",
        "engine.enable_prefix_caching",
        "engine.speculative",
        "engine.delay_factor",
        "engine.max_logprobs",
        "engine.disable_log_stats",
        "engine.swap_space",
        "engine.max_num_seqs",
        "engine.max_num_batched_tokens",
        "engine.scheduling_policy",
        "engine.enable_chunked_prefill",
        "engine.long_prefill_token_threshold",
        "engine.preemption_mode",
        "engine.num_threads",
        "engine.device",
        "engine.kernel_backend",
        "engine.tensor_parallel_size",
        "engine.pipeline_parallel_size",
        "engine.data_parallel_size",
        "engine.enable_expert_parallel",
        # Of jobs that ran before there were adapters.
        "engine.enable_lora",
        "lora.max_loras",
        "lora.max_lora_rank",
        "lora.max_cpu_loras",
        "output.shard_rows",
        "output.commit_interval_s",
        "output.drain_timeout_s",
        # How much of the input.
        "limit",
        "base_dir",
        "notes",
    }
)
# Between what files belong to and a file's name, in the keys of content hashes.
_FILE = " files: "
# Before an adapter's name, in the keys of their content hashes.
_ADAPTER = "adapter "
# Engine settings whose "auto" the first run decided for all later ones.
PINNED = ("dtype", "quantization", "kv_cache_dtype", "max_model_len", "reproducible")
# Of these, those that null does not leave open.
_NULL_SAYS_NONE = frozenset({"quantization"})


def fingerprint(
    spec: JobSpec,
    *,
    model: Mapping[str, str],
    tokenizer: Mapping[str, str],
    sampling: Mapping[str, Any],
    adapters: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Dotted key -> value of everything beside the source that can change a row.

    Args:
        spec: the job.
        model: content hashes of the model's files.
        tokenizer: content hashes of the tokenizer's files and of the chat template.
        sampling: effective sampling parameters, defaults resolved.
        adapters: name -> content hash of each adapter that rows may ask for.
    """
    flat = _flatten(spec.model_dump(mode="json", exclude={"sampling": True}))
    fields = {key: value for key, value in flat.items() if _counts(key)}
    fields["model.chat_template"] = spec.chat_template_text()
    # The template's content is compared, the file's name is not; effective parameters stand for those given.
    fields |= {f"sampling.{name}": value for name, value in sampling.items()}
    fields["sampling.structured_outputs"] = _in_order(sampling.get("structured_outputs"))
    fields["sampling.seed"] = spec.sampling.job_seed
    fields["sampling.seed_column"] = spec.sampling.seed_column
    fields |= {f"model{_FILE}{name}": value for name, value in model.items()}
    fields |= {f"tokenizer{_FILE}{name}": value for name, value in tokenizer.items()}
    fields |= {f"{_ADAPTER}{name}": value for name, value in (adapters or {}).items()}
    result: dict[str, Any] = json_form(fields)
    return result


def pinned_engine_args(manifest: Manifest) -> dict[str, Any]:
    """The values that the first run decided and every later run uses, by engine argument."""
    return {name: manifest.engine[name] for name in PINNED if name in manifest.engine}


def check_same_job(manifest: Manifest, current: Mapping[str, Any], output: object, model: str = "") -> None:
    """Refuse a job that would give other rows than those already written.

    Args:
        manifest: of the first run.
        current: this run's `fingerprint`.
        output: the output folder, for the message.
        model: this run's, as the engine takes it.

    Raises:
        ResumeError: lists each key that differs with its value then and now.
    """
    differences = []
    changed: dict[str, list[str]] = {}
    for key in sorted(manifest.fingerprint.keys() | current.keys()):
        if not _counts(key):
            continue  # stored by a version that took it into account
        now = current.get(key)
        then = _decided(key, manifest.fingerprint.get(key), manifest)
        if then == _decided(key, now, manifest):
            continue
        kind, is_file, name = key.partition(_FILE)
        if key.startswith(_ADAPTER):
            differences.append(f"  {_adapter_difference(key, then, now)}")
        elif is_file:
            changed.setdefault(kind, []).append(name)
        else:
            differences.append(f"  {key}: {_shown(then, now)} in the first run, {_shown(now, then)} now")
    first_model = str(manifest.engine.get("model", model))
    if changed and first_model != model:
        differences.append(f"  model: {_named(first_model)} → {_named(model)}")
    else:
        differences += [f"  {kind} files changed: {', '.join(names)}" for kind, names in changed.items()]
    if differences:
        raise ResumeError(
            f"{output} holds rows of another job:\n" + "\n".join(differences) + "\n"
            "choose another output, or start over with --restart (removes these rows)"
        )


def digest(fields: Mapping[str, Any]) -> str:
    """A short name for a fingerprint."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _in_order(grammar: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A schema as text: the order of its properties is that of the texts, and JSON objects have none."""
    if grammar is None or grammar.get("json") is None:
        return grammar
    schema = grammar["json"]
    return {**grammar, "json": json.dumps(json.loads(schema) if isinstance(schema, str) else schema)}


def _counts(key: str) -> bool:
    return not any(key == free or key.startswith(f"{free}.") for free in _FREE)


def _adapter_difference(key: str, then: str | None, now: str | None) -> str:
    place = f"lora.adapters.{key.removeprefix(_ADAPTER)}"
    if then is None:
        return f"{place}: not used in the first run, used now"
    if now is None:
        return f"{place}: used in the first run, not now"
    return f"{place}: another adapter than in the first run (its files hold other numbers or settings)"


def _named(model: str) -> str:
    """A model as a user would write it: local paths are stored as absolute ones."""
    return str(display_path(Path(model))) if Path(model).is_absolute() else model


def _decided(key: str, value: Any, manifest: Manifest) -> Any:
    """The value that holds: of an engine setting that is left open, what the first run decided."""
    section, _, name = key.partition(".")
    is_open = value == "auto" or (value is None and name not in _NULL_SAYS_NONE)
    is_open = is_open and section == "engine" and name in PINNED
    return manifest.engine.get(name, value) if is_open else value


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for name, inner in value.items():
            flat |= _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
        return flat
    return {prefix: value}


def _shown(value: Any, other: Any, width: int = 60) -> str:
    """A value as a message shows it; of long ones the part around the first difference from the other."""
    text, compared = (json.dumps(side, ensure_ascii=False) for side in (value, other))
    if len(text) <= width:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, compared, strict=False)) if a != b), 0)
    start = max(0, min(same - width // 3, len(text) - width))
    return ("…" if start else "") + text[start : start + width] + ("…" if start + width < len(text) else "")
