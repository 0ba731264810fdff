"""`Registry`: the one way to find an extension, by built-in name, entry point, dotted path, or the object itself.

Registries are the only module-level state of the package, and they are filled at import by literal tables, so that a
name always means the same thing.
"""

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from jaxserve.errors import ConfigError

_SUFFIX = ".py"  # of a module that is named by its file

T = TypeVar("T")
B = TypeVar("B")


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

    def __contains__(self, name: object) -> bool:
        """Whether it is one of `names`. Installed packages, of which there may be hundreds to read, are asked last."""
        return name in self._builtins or name in self._entry_points()

    def is_own(self, name: str) -> bool:
        """Whether `get` finds it in the source of this package, and so whatever follows from it in that alone."""
        return name in self._builtins or name.startswith(f"{__package__}.")

    def get(self, name: str | T) -> T:
        """Resolves `name`. An object that is not a string is returned as it is (a notebook passes its own class).

        A module that is not on Python's path is looked for in the current folder; one that ends in .py is a file.

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
            f"no {self.kind} is called {name!r}; known: {', '.join(known)}; or give 'package.module:Name' or "
            f"'./file.py:Name'.{hint}"
        )

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {e.name: e for e in importlib.metadata.entry_points(group=self.entry_point_group)}


def check_complete(kind: str, found: type) -> None:
    """Raises ConfigError if a class lacks methods that its base leaves open."""
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"the {kind} {found.__name__} lacks the method {lacking}; add it to the class")


def check_takes(kind: str, found: Callable[..., object], *arguments: object) -> None:
    """Raises ConfigError if a class or function has other parameters than those that it would be called with."""
    try:
        signature = inspect.signature(found)
    except ValueError:  # code of another language may not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(found, "__name__", repr(found))
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise ConfigError(f"the {kind} {name:.120} takes {signature}, but is called with ({given}): {error}") from error


def make_derived(registry: Registry[type[B] | B], given: str | type[B] | B, base: type[B], options: object) -> B:
    """What a config or a notebook asks for, of a kind whose members derive from `base`.

    `given` is a name (see `Registry.names`), `package.module:Class`, a class, which is called with `options`, or a
    finished object, which is returned as it is. Raises ConfigError when nothing has this name, when what was found does
    not derive from `base`, or when a class cannot be called so.
    """
    found = registry.get(given)
    if isinstance(found, base):
        return found
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"the {registry.kind} {given!r:.120} is a {found!r:.80}; it must derive from {base.__name__} in "
            f"{base.__module__}"
        )
    check_complete(registry.kind, found)
    check_takes(registry.kind, found, options)
    return cast(Callable[[object], B], found)(options)


def _load(path: str, kind: str):
    module_name, _, attribute = path.rpartition(":")
    try:
        if module_name.endswith(_SUFFIX):
            return getattr(_module_of_file(Path(module_name)), attribute)
        return getattr(_import(module_name), attribute)
    except (ImportError, AttributeError, ValueError, OSError) as error:  # ValueError: nothing before the colon
        hint = ""
        if isinstance(error, ModuleNotFoundError) and not module_name.endswith(_SUFFIX):
            hint = f"; it is looked for on Python's path and in {Path.cwd()}; './file.py:{attribute}' names a file"
        raise ConfigError(f"cannot load the {kind} {path!r}: {error}{hint}") from error
    except Exception as error:  # code of the user's, which may fail in any way
        raise ConfigError(f"cannot load the {kind} {path!r}: {error!r}") from error


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        root = name.partition(".")[0]
        if error.name != root or not any((Path.cwd() / one).exists() for one in (root, root + _SUFFIX)):
            raise
        with _searched(Path.cwd()):
            return importlib.import_module(name)


def _module_of_file(path: Path) -> ModuleType:
    """The module of a file. One that has changed since is another module, so that no old class stays in use."""
    path = path.expanduser().resolve()
    content = path.read_bytes()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode() + content).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "its name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and others look their module up while it runs
    try:
        with _searched(path.parent):
            exec(compile(content, path, "exec"), module.__dict__)  # not by its loader, which may find older bytecode
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _searched(folder: Path) -> Iterator[None]:
    """Modules are looked for in `folder`, too, behind all other places."""
    importlib.invalidate_caches()
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _load_entry_point(entry_point: importlib.metadata.EntryPoint, kind: str):
    try:
        return entry_point.load()
    except Exception as error:  # code of another package, which may fail in any way
        raise ConfigError(
            f"cannot load the {kind} {entry_point.name!r}, which an installed package gives as {entry_point.value!r}: "
            f"{error!r}; repair that package or name another {kind}"
        ) from error
