"""Names of extensions: what cannot be loaded is a typed error, whoever wrote it."""

import importlib.metadata

import pytest

from jaxserve.errors import ConfigError
from jaxserve.registry import Registry


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
