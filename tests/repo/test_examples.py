"""The example job is sound, its data is what the README says, and the job in the README is the example's."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from batchgen.jobs.spec import load_spec


@pytest.fixture(scope="module")
def data(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Rows of a fresh texts.parquet, made by a copy of the example's script."""
    folder = tmp_path_factory.mktemp("summarize")
    for name in ("make_data.py", "texts.jsonl"):
        (folder / name).write_bytes((repository / "examples" / "summarize" / name).read_bytes())
    made = [subprocess.run([sys.executable, folder / "make_data.py"], check=True, capture_output=True)]
    first = (folder / "texts.parquet").read_bytes()
    made.append(subprocess.run([sys.executable, folder / "make_data.py"], check=True, capture_output=True))
    assert (folder / "texts.parquet").read_bytes() == first, "the same Python must give the same bytes"
    return pq.read_table(folder / "texts.parquet").to_pylist()


def test_data_is_plenty_and_of_many_scripts(data: list[dict[str, str]]) -> None:
    assert len(data) >= 200
    assert len({row["language"] for row in data}) >= 20
    lengths = [len(row["text"]) for row in data]
    assert min(lengths) < 80
    assert max(lengths) > 4000
    assert sum(not row["text"].isascii() for row in data) > 40


def test_every_row_names_its_source_and_licence(data: list[dict[str, str]]) -> None:
    assert len({row["id"] for row in data}) == len(data)
    for row in data:
        assert all(row.values()), row["id"]


def test_committed_texts_are_one_object_a_line(repository: Path) -> None:
    lines = (repository / "examples" / "summarize" / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(
        set(json.loads(line)) == {"id", "title", "language", "text", "source", "license"} for line in lines
    )


def test_the_job_in_the_readme_is_the_examples(repository: Path) -> None:
    job = repository / "examples" / "summarize" / "job.yaml"
    readme = re.search(
        r"```yaml\n(.*?)```", (repository / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    yaml = YAML(typ="safe", pure=True)
    assert readme
    assert yaml.load(readme.group(1)) == yaml.load(job.read_text(encoding="utf-8"))
    assert load_spec(job).output_dir == repository / "examples" / "summarize" / "out"


def test_exit_codes_in_the_readme_are_the_real_ones(repository: Path) -> None:
    from batchgen.cli import exit_codes

    text = (repository / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| exit code |") :].partition("\n\n")[0]
    named = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {
        int(code)
        for code in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
        for code in code.split(", ")
    } == named
