from pathlib import Path

import pytest

from batchgen.errors import UnknownNameError
from batchgen.registry import Registry


@pytest.fixture
def colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[type]:
    """A registry over a package of two files, imported on the first lookup."""
    package = tmp_path / "colour_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from batchgen.registry import Registry\nR = Registry('colour', __name__)\n"
    )
    for name in ("red", "green"):
        code = f"from colour_package import R\n@R.register('{name}', 'dark {name}')\nclass C: pass\n"
        (package / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    from colour_package import R  # type: ignore[import-not-found]

    yield R
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "colour_package"]:
        del sys.modules[name]


def test_files_of_the_package_enter_themselves(colours: Registry[type]) -> None:
    assert colours.names() == ["dark green", "dark red", "green", "red"]
    assert "red" in colours
    assert colours.get("red") is colours.get("dark red")
    assert list(colours) == colours.names()


def test_unknown_name_tells_the_nearest(colours: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match=r"palette: unknown colour 'gren'; did you mean 'green'\?"):
        colours.get("gren", path="palette")
    with pytest.raises(UnknownNameError, match="known: dark green, dark red, green, red"):
        colours.get("octarine")


def test_the_same_name_twice_is_an_error(colours: Registry[type]) -> None:
    colours.get("red")
    with pytest.raises(ValueError, match="'red' is registered twice"):
        colours.register("red")(int)
