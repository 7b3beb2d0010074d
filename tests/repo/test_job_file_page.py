"""docs/job-file.md names every key of the job file, with its default, and no other."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from batchgen.jobs.sections import MessageSpec, TruncateSpec
from batchgen.jobs.settings_sections import PARTS
from batchgen.jobs.spec import JobSpec
from batchgen.ngram_settings import NgramSettings

ROW = re.compile(r"^\| `(\w+)` \| (–|`[^`]*`) \|", re.MULTILINE)
SECTIONS: dict[str, type[BaseModel]] = {
    name: info.annotation
    for name, info in JobSpec.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
} | {
    "prompt.truncate": TruncateSpec,
    "prompt.messages": MessageSpec,
    **{f"sampling.{name}": section for name, section in PARTS.items()},
}


def _page_sections(repository: Path) -> dict[str, str]:
    text = (repository / "docs" / "job-file.md").read_text(encoding="utf-8")
    parts = re.split(r"^###? (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _default(info: object) -> object:
    if info.is_required():
        return "–"
    value = info.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_with_its_default(repository: Path, section: str) -> None:
    text = _page_sections(repository)[section]
    keys = {info.alias or name: info for name, info in SECTIONS[section].model_fields.items()}
    tabled = {
        key: "–" if default == "–" else YAML(typ="safe", pure=True).load(default.strip("`"))
        for key, default in ROW.findall(text)
    }
    listed = text.partition("Known, but")[2]
    assert set(tabled) | (set(re.findall(r"`([a-z_]+)`", listed)) & set(keys)) == set(keys)
    assert not set(tabled) & set(re.findall(r"`([a-z_]+)`", listed))
    assert {key: _default(keys[key]) for key in tabled} == tabled


def test_the_keys_of_speculation_are_on_the_page(repository: Path) -> None:
    tabled = dict(ROW.findall(_page_sections(repository)["engine.speculative"]))
    defaults = {spec.name: f"`{spec.default}`" for spec in fields(NgramSettings)}
    assert tabled == {"method": "`ngram`", **defaults}


def test_the_page_has_every_section(repository: Path) -> None:
    top = set(JobSpec.model_fields) - {"base_dir", "notes"}
    assert top <= set(_page_sections(repository))


def test_the_example_on_the_page_is_a_job(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "job-file.md").read_text(encoding="utf-8")
    example = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert example
    data = YAML(typ="safe", pure=True).load(example.group(1))
    spec = JobSpec.from_mapping(data, tmp_path)
    assert spec.model.path.startswith("package:")
