"""Hides from a process every package that an installation with one extra alone would not have.

    python -P only_extra.py      (as sitecustomize.py, with ONLY_EXTRA=notebook)

The allowed packages are the closure of requirements over the installed ones; importing any other fails. It is hidden
from `import` and from `importlib.metadata`, so that plugins are not found either.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

PACKAGE = "jaxserve"
# Jupyter runs the kernel itself in the place of what executes it here; pip and its kin are in every environment.
ALWAYS = ("ipykernel", "pip", "setuptools")


def normal(name: str) -> str:
    """As PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that these need, with their extras and markers, and what those need."""
    from packaging.requirements import Requirement

    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, _ = waiting.pop()
        name = normal(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                more = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            for text in more:
                wanted = Requirement(text)
                if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                    waiting.append((wanted, extra))
    return {name for name, _ in found}


def requirements_of(pyproject: str, extra: str) -> list[str]:
    """Those of the package and of one extra, as this checkout says, whatever was said when it was installed."""
    import tomllib

    with open(pyproject, "rb") as file:
        project = tomllib.load(file)["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    texts, waiting = list(project["dependencies"]), [extra]
    while waiting:
        for text in extras[waiting.pop()]:
            own = re.match(rf"{PACKAGE}\[([\w,-]+)\]", text)
            if own:
                waiting += own[1].split(",")
            else:
                texts.append(text)
    return texts


class _Filter:
    """In the place of a finder of `sys.meta_path`, which finds nothing of what is hidden."""

    def __init__(self, finder: Any, modules: set[str]) -> None:
        self._finder = finder
        self._modules = modules
        self.find_distributions = getattr(finder, "find_distributions", None)  # importlib.metadata looks here

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        return None if name.split(".")[0] in self._modules else self._finder.find_spec(name, path, target)


def hide_all_but(pyproject: str, extra: str) -> None:
    """From now on, in this process."""
    allowed = closure([*requirements_of(pyproject, extra), *ALWAYS]) | {PACKAGE}
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not allowed & {normal(owner) for owner in owners}
    } - {"jax_plugins"}
    plugins = {"jax_plugins"} if not allowed & {"jax-cuda13-plugin", "jax-cuda12-plugin"} else set()
    distributions, distribution = importlib.metadata.distributions, importlib.metadata.distribution

    def visible(**options: Any) -> Iterator[importlib.metadata.Distribution]:
        return (found for found in distributions(**options) if normal(found.metadata["Name"]) in allowed)

    def find(name: str) -> importlib.metadata.Distribution:
        if normal(name) not in allowed:
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    importlib.metadata.distributions, importlib.metadata.distribution = visible, find  # pyright: ignore
    sys.meta_path[:] = [_Filter(finder, hidden | plugins) for finder in sys.meta_path]  # pyright: ignore
