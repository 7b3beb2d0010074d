"""What setuptools, Hugging Face's `kernels` and pytest need of the layout."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import batchgen

FOLDERS = {"batchgen": "batchgen"} | {name: f"batchgen.{name}" for name in ("kernels", "jobs", "widgets")}


def _pyproject(repository: Path) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_folder_with_code_is_a_listed_package(repository: Path) -> None:
    # setuptools leaves an unlisted folder out of the wheel without a word; an editable install finds it.
    on_disk = {
        ".".join([package, *path.parent.relative_to(repository / folder).parts])
        for folder, package in FOLDERS.items()
        for path in (repository / folder).rglob("*")
        if path.suffix in (".py", ".c") and "__pycache__" not in path.parts
    }
    assert sorted(_pyproject(repository)["tool"]["setuptools"]["packages"]) == sorted(on_disk)


def test_every_file_that_is_no_python_is_package_data(repository: Path) -> None:
    data = _pyproject(repository)["tool"]["setuptools"]["package-data"]
    missing = []
    for folder, package in FOLDERS.items():
        for path in (repository / folder).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts or path.suffix in (".py", ".md"):
                continue
            owner = ".".join([package, *path.parent.relative_to(repository / folder).parts])
            listed = any(
                owner == name and path.match(pattern)
                for name, patterns in data.items()
                for pattern in patterns
            )
            if not listed:
                missing.append(str(path.relative_to(repository)))
    assert not missing


def test_folders_that_would_hide_other_packages_do_not_exist(repository: Path) -> None:
    # With kernels/__init__.py, transformers would take our kernels/ for Hugging Face's package of that name.
    assert not (repository / "kernels" / "__init__.py").exists()
    # kernels/triton/ would hide triton from a script that runs inside kernels/.
    assert not (repository / "kernels" / "triton").exists()
    # tests/kernels/__init__.py would make `kernels` mean the tests.
    assert not list((repository / "tests").rglob("__init__.py"))
    # importlib.resources needs one here.
    assert (repository / "widgets" / "__init__.py").is_file()


def test_an_installed_kernels_package_wins_over_our_folder(repository: Path, tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("def get_kernel(name): return name\n", encoding="utf-8")
    script = (
        f"import sys; sys.path[:0] = [{str(repository)!r}, {str(tmp_path)!r}]\n"
        "import batchgen, batchgen.kernels.kv\n"
        "from kernels import get_kernel\n"
        "print(get_kernel('theirs'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "theirs"


def test_test_files_have_unique_names(repository: Path) -> None:
    names = Counter(path.name for path in (repository / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_public_names_are_sorted_and_resolve(repository: Path) -> None:
    tree = ast.parse((repository / "batchgen" / "__init__.py").read_text(encoding="utf-8"))
    homes = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES"
    )
    assert set(batchgen.__all__) == set(homes)
    assert list(homes) == sorted(homes)
    for name in batchgen.__all__:
        assert getattr(batchgen, name) is not None


def test_version_is_the_same_in_pyproject_and_changelog(repository: Path) -> None:
    version = _pyproject(repository)["project"]["version"]
    changelog = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert version in headings or len(headings) == 1
