"""What the checks of the repository itself share."""

import subprocess
from pathlib import Path

import pytest

SOURCE_FOLDERS = ("batchgen", "kernels", "jobs", "widgets")
TEXT_SUFFIXES = set(".py .md .toml .yaml .yml .sh .c .h .in .cfg .txt .json .jsonl .ipynb".split()) | {""}


@pytest.fixture(scope="session")
def sources(repository: Path) -> dict[str, Path]:
    """Path relative to the root -> file, for every Python file of the four source folders."""
    return {
        path.relative_to(repository).as_posix(): path
        for folder in SOURCE_FOLDERS
        for path in sorted((repository / folder).rglob("*.py"))
    }


@pytest.fixture(scope="session")
def text_files(repository: Path) -> list[Path]:
    """Every text file that belongs to the project: git's list, or without git the known folders."""
    listed = subprocess.run(
        ["git", "-C", str(repository), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [repository / line for line in listed.stdout.splitlines()]
    else:
        folders = (*SOURCE_FOLDERS, "tests", "docs", "examples", "scripts", "benchmarks")
        paths = [path for folder in folders for path in (repository / folder).rglob("*")]
        paths += [path for path in repository.iterdir() if path.is_file()]
    return [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]
