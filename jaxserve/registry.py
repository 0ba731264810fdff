"""`Registry`: the one way to find an extension, by built-in name, entry point, dotted path, or the object itself.

Registries are the only module-level state of the package, and they are filled at import by literal tables, so that a
name always means the same thing.
"""

import difflib
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Generic, TypeVar

from jaxserve.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named extensions of one kind.

    `builtins` maps a name to `"package.module:attribute"`; nothing is imported before it is asked for, so a
    registry of models costs a scheduler user nothing.
    """

    def __init__(self, kind: str, entry_point_group: str, builtins: Mapping[str, str]) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._builtins = dict(builtins)

    def names(self) -> list[str]:
        """All names that `get` takes, built-in first, then those of installed packages."""
        return [*self._builtins, *(n for n in self._entry_points() if n not in self._builtins)]

    def get(self, name: str | T) -> T:
        """Resolves `name`. An object that is not a string is returned as it is (a notebook passes its own class).

        Raises ConfigError when nothing has this name (the message lists what exists), or when it cannot be loaded.
        """
        if not isinstance(name, str):
            return name
        if name in self._builtins:
            return _load(self._builtins[name], self.kind)
        entry_points = self._entry_points()
        if name in entry_points:
            return _load_entry_point(entry_points[name], self.kind)
        if ":" in name:
            return _load(name, self.kind)
        known = self.names()
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"no {self.kind} is called {name!r}; known: {', '.join(known)}; or give 'package.module:Name'.{hint}"
        )

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {e.name: e for e in importlib.metadata.entry_points(group=self.entry_point_group)}


def _load(path: str, kind: str):
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: nothing before the colon
        raise ConfigError(f"cannot load the {kind} {path!r}: {error}") from error


def _load_entry_point(entry_point: importlib.metadata.EntryPoint, kind: str):
    try:
        return entry_point.load()
    except Exception as error:  # code of another package, which may fail in any way
        raise ConfigError(
            f"cannot load the {kind} {entry_point.name!r}, which an installed package gives as {entry_point.value!r}: "
            f"{error!r}; repair that package or name another {kind}"
        ) from error
