"""Names of extensions: what cannot be loaded is a typed error, whoever wrote it."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.values.registry import Registry


def test_a_broken_entry_point_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "broken_extension.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = {"gone": "no_such_module_here:X", "empty": "json:no_such_name", "broken": "broken_extension:X"}
    points = [importlib.metadata.EntryPoint(name, value, "jaxserve.tests") for name, value in values.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    registry: Registry[object] = Registry("thing", "jaxserve.tests", {})
    assert registry.names() == list(values)
    assert all(name in registry for name in values) and "other" not in registry and None not in registry
    for name, value in values.items():
        with pytest.raises(ConfigError, match=f"cannot load the thing '{name}'.*'{value}'"):
            registry.get(name)


@pytest.mark.parametrize("path", ["no_such_module_here:X", "json:no_such_name", ":X"])
def test_a_wrong_path_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot load the thing"):
        Registry[object]("thing", "jaxserve.tests", {}).get(path)


def test_a_built_in_name_is_found_without_reading_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(group: str) -> None:
        raise AssertionError("hundreds of packages would be read")

    monkeypatch.setattr(importlib.metadata, "entry_points", read)
    assert "own" in Registry[object]("thing", "jaxserve.tests", {"own": "json:loads"})


def test_a_module_is_found_in_the_current_folder_and_a_file_by_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry: Registry[object] = Registry("thing", "jaxserve.tests", {})
    (tmp_path / "things_of_mine.py").write_text("from helper_of_mine import VALUE\n")
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 7\n")
    with pytest.raises(ConfigError, match=r"No module named 'things_of_mine'; it is looked for.*'\./file.py:VALUE'"):
        registry.get("things_of_mine:VALUE")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        assert registry.get("things_of_mine:VALUE") == 7
        assert registry.get("./things_of_mine.py:VALUE") == registry.get(f"{tmp_path}/things_of_mine.py:VALUE") == 7
    finally:
        for name in ("things_of_mine", "helper_of_mine"):
            sys.modules.pop(name, None)
    assert sys.path == before


def test_a_file_is_loaded_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    registry: Registry[object] = Registry("thing", "jaxserve.tests", {})
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    size = 1\n")
    first = registry.get(f"{file}:Mine")
    assert registry.get(f"{file}:Mine") is first
    file.write_text("class Mine:\n    size = 2\n")
    assert [getattr(one, "size", None) for one in (first, registry.get(f"{file}:Mine"))] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("1 / 0", "ZeroDivisionError"), ("class:", "SyntaxError"), ("", "no attribute 'Mine'")],
)
def test_a_file_that_cannot_be_loaded_is_a_config_error(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"cannot load the thing '{file}:Mine': .*{message}"):
        Registry[object]("thing", "jaxserve.tests", {}).get(f"{file}:Mine")
