"""Imports point one way, torch stays out of jobs and widgets, and hardware is asked for in few places."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

BASE = (
    "errors",
    "registry",
    "version",
    "config",
    "sampling_params",
    "sampling_parts",
    "sampling_checks",
    "field_rules",
    "foreign_names",
    "ngram_settings",
    "logprobs",
    "outputs",
    "seeds",
    "trigonometry",
    "content_hash",
    "token_search",
    "windows",
    "quantities",
    "counting",
    "lora_request",
)
MODEL_PARTS = ("kernels", "layers", "quantization", "models")

# Part of batchgen -> the other parts it may import (and itself). The longest matching name counts.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "version": (),
    "seeds": (),
    "trigonometry": (),
    "content_hash": (),
    "token_search": (),
    "windows": (),
    "quantities": (),
    "registry": ("errors",),
    "field_rules": ("errors",),
    "foreign_names": ("errors",),
    "ngram_settings": ("errors", "field_rules", "foreign_names"),
    "config": ("errors", "field_rules", "foreign_names", "ngram_settings"),
    "sampling_params": ("errors", "field_rules", "foreign_names", "sampling_checks", "sampling_parts"),
    "sampling_parts": ("errors", "field_rules", "foreign_names"),
    # For types only: what the engine and the parameters are.
    "sampling_checks": ("errors", "field_rules", "sampling_parts", "sampling_params", "engine.messages"),
    "lora_request": ("errors", "field_rules", "foreign_names"),
    "logprobs": ("errors",),
    "outputs": ("errors", "logprobs"),
    "kernels": BASE,
    "layers": (*BASE, *MODEL_PARTS),
    "quantization": (*BASE, *MODEL_PARTS),
    "models": (*BASE, *MODEL_PARTS),
    "lora": (*BASE, *MODEL_PARTS),
    # Looked at before a model loads, by who has no torch.
    "lora.peft_config": BASE,
    "lora.adapter_facts": (*BASE, "lora.peft_config"),
    "tokenizer": (*BASE, "models"),
    # Checks of grammars need neither torch nor the engine; masks read its records.
    "structured": (*BASE, "engine.scheduler_output"),
    "sampling_defaults": (*BASE, "models"),
    "worker": (
        *BASE,
        *MODEL_PARTS,
        "lora",
        "tokenizer",
        "structured",
        "engine.scheduler_output",
        "engine.messages",
    ),
    "engine": (*BASE, "kernels.kv", "worker", "tokenizer", "echo"),
    "byte_tokenizer": (*BASE, "tokenizer"),
    "echo": (*BASE, "engine", "tokenizer", "byte_tokenizer", "echo_text"),
    "echo_text": (*BASE, "engine", "byte_tokenizer"),
    # LLM and AsyncLLM: an engine's client, and what turns a caller's words into requests.
    "api": (*BASE, "engine", "models.location", "tokenizer", "byte_tokenizer", "sampling_defaults"),
    "api.jobs": (*BASE, "jobs"),
    "api.workload": (*BASE, "jobs"),
    "api.text_pieces": (*BASE, "jobs"),
    # What runs a model outside of the engine.
    "api.quantize": (*BASE, "api", "tokenizer", "quantization", "worker"),
    "api.eval_child": (*BASE, "api", "engine", "kernels", "models", "worker"),
    "counting": (*BASE, "engine.scheduler_output", "worker.executor", "whole_steps"),
    "whole_steps": (*BASE, "engine.scheduler_output"),
    "tiny_adapters": (),
    "tiny_checkpoints": ("tiny_models",),
    "tiny_tool_checkpoints": ("tiny_checkpoints",),
    "tiny_models": (*BASE, *MODEL_PARTS, "tokenizer"),
    "testing": (
        *BASE,
        *MODEL_PARTS,
        "tokenizer",
        "worker",
        "engine",
        "byte_tokenizer",
        "echo",
        "counting",
        "tiny_models",
    ),
    "jobs": (
        *BASE,
        "engine",
        "tokenizer",
        "structured.grammars",
        "structured.vocabulary",
        "models.location",
        "lora.adapter_facts",
        "sampling_defaults",
        "echo",
        "byte_tokenizer",
    ),
    "widgets": (*BASE, "jobs"),
}
TOP = ("cli",)  # may import anything; nothing imports it

# No torch: these must run, and be tested by the thousand, without a model.
NO_TORCH = re.compile(
    r"jobs/.*|widgets/.*|batchgen/cli/.*|batchgen/(errors|registry|config|sampling_params|outputs|seeds|version)\.py"
    r"|batchgen/engine/.*|batchgen/lora/(__init__|adapter_facts|peft_config|adapter_plan|base_modules)\.py"
)
HARDWARE = {
    # what nobody else may touch -> where it may be
    r"^\s*(import triton|from triton)": r"kernels/gpu/.*",
    r"torch\.cuda\.|\.is_cuda\b|device\.type\b": (
        r"kernels/(gpu/.*|backend\.py|ops\.py|checks\.py)|batchgen/worker/(device|decisions|load|graph_runner)\.py"
    ),
    r"torch\.compile\(": r"batchgen/worker/model_runner\.py",
}


def module_name(path: str) -> str:
    """Dotted name under which a file is imported, without the leading "batchgen."."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] == "batchgen":
        parts = parts[1:]
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import statement, wherever it stands; `from a import b` gives a.b."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def _rule(module: str) -> tuple[str, tuple[str, ...]] | None:
    parts = [part for part in MAY_IMPORT if _within(module, part)]
    return (best, MAY_IMPORT[best]) if parts and (best := max(parts, key=len)) else None


def test_imports_point_one_way(sources: dict[str, Path]) -> None:
    wrong = []
    for relative, path in sources.items():
        module = module_name(relative)
        if not module or any(_within(module, top) for top in TOP):
            continue
        rule = _rule(module)
        assert rule, f"{relative}: tests/repo/test_imports.py has no rule for this part; add one"
        own, allowed = rule
        for line, name in imported_modules(path):
            if not name.startswith("batchgen."):
                continue
            target = name.removeprefix("batchgen.")
            if not any(_within(target, part) for part in (own, *allowed)):
                wrong.append(f"{relative}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_parts_of_the_package_are_imported_by_their_package_names(
    sources: dict[str, Path], repository: Path
) -> None:
    # `import jobs` would be a second module beside `batchgen.jobs`, with registries of its own.
    files = {**sources, **{str(p.relative_to(repository)): p for p in (repository / "tests").rglob("*.py")}}
    wrong = [
        f"{relative}:{line} imports {name}"
        for relative, path in files.items()
        for line, name in imported_modules(path)
        if name.split(".")[0] in ("kernels", "jobs", "widgets")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_torch_where_none_is_needed(sources: dict[str, Path]) -> None:
    wrong = [
        f"{relative}:{line} imports {name}"
        for relative, path in sources.items()
        if NO_TORCH.fullmatch(relative)
        for line, name in imported_modules(path)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pattern", HARDWARE)
def test_hardware_is_asked_for_in_few_places(sources: dict[str, Path], pattern: str) -> None:
    wrong = [
        f"{relative}:{number}: {line.strip()}"
        for relative, path in sources.items()
        if not re.fullmatch(HARDWARE[pattern], relative)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not wrong, "\n".join(wrong)


HEAVY = {"torch", "transformers", "triton", "datasets", "ipywidgets", "tqdm"}


@pytest.mark.parametrize("part", ["", "jobs", "widgets", "cli.main", "config", "outputs", "sampling_params"])
def test_importing_a_light_part_loads_nothing_heavy(part: str, sources: dict[str, Path]) -> None:
    modules = ["batchgen" + (f".{part}" if part else "")]
    if part in ("jobs", "widgets"):
        names = [module_name(relative) for relative in sources]
        modules += [f"batchgen.{name}" for name in names if _within(name, part)]
    script = (
        f"import sys, importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
