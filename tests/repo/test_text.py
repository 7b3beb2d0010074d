"""What no file of the repository may hold, and what the documents promise."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

# Folders of somebody's machine and hosts of package registries; in pieces, so that this file holds none.
MACHINE_FOLDERS = ("root", "work", "mnt", "home", "Users", "opt")
REGISTRY_WORDS = ("pypi", "artifactory", "nexus", "devpi", "mirror", "registry")
MACHINE_PATH = re.compile(rf"(?<![\w.~)}}*-])/(?:{'|'.join(MACHINE_FOLDERS)})/")
REGISTRY_HOST = re.compile(rf"https?://[\w.:-]*(?:{'|'.join(REGISTRY_WORDS)})")
DOTTED = re.compile(r"`(batchgen(?:\.[A-Za-z_]\w*)+)")
PATH = re.compile(r"`((?:batchgen|kernels|jobs|widgets|tests|examples|scripts|benchmarks|docs)/[\w./-]*)`")


def _documents(repository: Path) -> list[Path]:
    folders = (repository / "docs", repository / "benchmarks")
    return [*repository.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]


def test_no_path_of_a_machine_and_no_registry_host(text_files: list[Path], repository: Path) -> None:
    wrong = [
        f"{path.relative_to(repository)}:{number}: {line.strip()[:120]}"
        for path in text_files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def _resolve(dotted: str) -> object:
    """Import as much of a dotted name as is a module, and take the rest as attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            fields = getattr(thing, "__annotations__", {})
            thing = fields[name] if name in fields else getattr(thing, name)
        return thing
    raise ModuleNotFoundError(dotted)


def test_names_in_the_documents_exist(repository: Path) -> None:
    wrong = []
    for document in _documents(repository):
        for dotted in sorted(set(DOTTED.findall(document.read_text(encoding="utf-8")))):
            try:
                _resolve(dotted)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{document.name}: `{dotted}`: {error}")
    assert not wrong, "\n".join(wrong)


def test_signatures_on_the_way_of_a_row_are_the_real_ones(repository: Path) -> None:
    text = (repository / "docs" / "structure.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| `(batchgen[\w.]+)` \| `\(([\w, ]*)\) -> (.+?)` \|", text, re.MULTILINE)
    assert len(steps) > 10
    for dotted, parameters, returns in steps:
        signature = inspect.signature(_resolve(dotted))
        assert [name for name in signature.parameters if name != "self"] == re.findall(r"\w+", parameters), (
            dotted
        )
        annotation = signature.return_annotation
        given = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        # A document says `list[Item]` where Python says `list[batchgen.jobs.feeder.Item]`.
        assert re.sub(r"[\w.]+\.(\w+)", r"\1", given) == returns.replace("\\|", "|"), dotted


def _paths(text: str) -> list[str]:
    return sorted({*PATH.findall(text), *re.findall(r"PYTEST_ARGS=([\w./-]+)", text)})


def test_paths_in_the_documents_exist(repository: Path) -> None:
    wrong = [
        f"{document.name}: {path}"
        for document in _documents(repository)
        for path in _paths(document.read_text(encoding="utf-8"))
        if not (repository / path).exists() and not path.startswith("examples/summarize/")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", ["demo", "test", "test-slow", "test-long", "check", "install"])
def test_make_has_the_targets_that_the_documents_name(repository: Path, target: str) -> None:
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
