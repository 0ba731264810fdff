"""Writes the reference of the Python interface as HTML, from docstrings: python scripts/make_reference.py [FOLDER]

`pdoc` renders it; the folder is `build/reference` unless given. Exit code 1, with a line for each, when a public class,
function, method or property has no docstring, when a docstring names a module, a class or a page that is not there,
when a link in the HTML leads nowhere, or when `pdoc` warns.
"""

import ast
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pdoc.doc
import pdoc.doc_ast
import pdoc.docstrings
import pdoc.render

from jaxserve.values.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "jaxserve",
    "jaxserve.client",
    "jaxserve.config",
    "jaxserve.errors",
    "jaxserve.sched",
    "jaxserve.sched.lengths",
    "jaxserve.testing",
    "jaxserve.lab",
    "jaxserve.kv",
    "jaxserve.kv.store",
    "jaxserve.kv.names",
    "jaxserve.kv.page_format",
    "jaxserve.kv.conformance",
    "jaxserve.kv.connector",
    "jaxserve.offline.front_door",  # the methods that LLM and AsyncLLM share
)
_QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
_SECTION = re.compile(r"^(?:Args|Attributes|Raises):\n(?:[ \t]+.+(?:\n|$)|\n(?=[ \t]))+", re.MULTILINE)
_PAGE = re.compile(r"\b(?:docs|benchmarks|deploy)/[\w./-]*\w\.md\b")


def load_module(name: str) -> ModuleType:
    """The module, with all names of its `__all__`: some packages import them when they are first used."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        vars(module).setdefault(public, getattr(module, public))
    if hasattr(module, "__path__") and not hasattr(module, "__all__"):
        vars(module)["__all__"] = [key for key, value in vars(module).items() if _is_public(value, key, name)]
    return module


def add_docstrings(module: pdoc.doc.Module) -> None:
    """What `pdoc` does not see: docstrings of imported variables, comments behind fields, lists of arguments."""
    imports = [node for node in ast.parse(module.source).body if isinstance(node, ast.ImportFrom) and node.module]
    for name, home in ((alias.name, node.module or "") for node in imports for alias in node.names):
        member = module.members.get(name)
        if isinstance(member, pdoc.doc.Variable):
            member.docstring = pdoc.doc_ast.walk_tree(sys.modules[home]).var_docstrings.get(name, "")
    for owner in module.classes:
        for field in owner.own_members:
            if field.docstring.startswith("Alias for field number"):
                field.docstring = ""  # what NamedTuple writes
            line = re.search(rf"^    {field.name}\b.*?  # (.+)$", owner.source, re.MULTILINE)
            if isinstance(field, pdoc.doc.Variable) and line and not field.docstring:
                field.docstring = line[1]
    inner = [one for owner in module.classes for one in owner.members.values()]
    for one in (module, *module.members.values(), *inner):
        one.docstring = _SECTION.sub(lambda found: pdoc.docstrings.google(found[0]), one.docstring)


def _is_public(value: object, key: str, module: str) -> bool:
    return not key.startswith("_") and getattr(value, "__module__", None) == module


def all_objects(modules: Sequence[pdoc.doc.Module]) -> Iterator[pdoc.doc.Doc]:
    """Every public module, class, function, method and variable of the reference that comes from jaxserve."""
    for module in modules:
        yield module
        for member in module.members.values():
            if not member.name.startswith("_"):
                yield member
                if isinstance(member, pdoc.doc.Class):
                    yield from (one for one in member.members.values() if _is_own(one))


def _is_own(member: pdoc.doc.Doc) -> bool:
    return member.taken_from[0].startswith("jaxserve") and not member.name.startswith("_")


def without_docstring(modules: Sequence[pdoc.doc.Module]) -> list[str]:
    """Public names that say nothing of themselves. Fields are left to the docstring of their class."""
    missing = []
    for one in all_objects(modules):
        docstring = one.docstring.strip()
        if isinstance(one, pdoc.doc.Class) and docstring.startswith(f"{one.name}("):
            docstring = ""  # what `dataclass` writes
        if isinstance(one, pdoc.doc.Variable) and "." in one.qualname:
            owner = _get_owner(one)
            is_field = not isinstance(
                inspect.getattr_static(owner, one.name, None), property | functools.cached_property
            )
            if is_field or re.search(rf"^ *{one.name}: ", inspect.getdoc(owner) or "", re.MULTILINE):
                continue
        if not docstring:
            missing.append(f"{one.fullname} has no docstring")
    return missing


def _get_owner(member: pdoc.doc.Doc) -> object:
    return getattr(sys.modules[member.modulename], member.qualname.split(".")[0])


def dead_names(modules: Sequence[pdoc.doc.Module]) -> list[str]:
    """What docstrings name in backticks, or as the path of a page, and what is not there."""
    dead = []
    for one in all_objects(modules):
        names = [name for name in _QUOTED.findall(one.docstring) if not _exists(name, one)]
        pages = [page for page in _PAGE.findall(one.docstring) if not (ROOT / page).exists()]
        dead += [f"{one.fullname} names {name}, which is not there" for name in (*names, *pages)]
    return dead


def _exists(name: str, named_by: pdoc.doc.Doc) -> bool:
    """Whether a dotted name of jaxserve, or one that begins as a class does, can be found from where it is named."""
    first, _, rest = name.partition(".")
    if first == "jaxserve":
        return _resolves(name) or name in entry_point_groups()
    if not re.match(r"[A-Z]+[a-z]", first):
        return True
    places = [sys.modules.get(name) for name in (named_by.taken_from[0], named_by.modulename, "builtins", *MODULES)]
    found = next((vars(place)[first] for place in places if place and first in vars(place)), None)
    if found is not None:
        return _has(found, rest)
    source = class_sources().get(first, "")  # of a class that is not public
    return bool(source) and (not rest or bool(re.search(rf"\b{re.escape(rest)}\b", source)))


@functools.cache
def class_sources() -> dict[str, str]:
    """The text of the file of each class of the package."""
    texts = [path.read_text() for path in (ROOT / "jaxserve").rglob("*.py")]
    return {name: text for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}


@functools.cache
def entry_point_groups() -> frozenset[str]:
    registries = [value for name in list(sys.modules) if name.startswith("jaxserve") for value in _registries(name)]
    return frozenset(registry.entry_point_group for registry in registries)


def _registries(module: str) -> list[Registry[object]]:
    return [value for value in vars(sys.modules[module]).values() if isinstance(value, Registry)]


def _has(owner: object, dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    if not first:
        return True
    if hasattr(owner, first):
        return _has(getattr(owner, first), rest)
    kinds = [kind for kind in getattr(owner, "__mro__", ()) if kind.__module__.startswith("jaxserve")]
    fields = {field for kind in kinds for field in inspect.get_annotations(kind)}
    return first in fields or any(f"self.{first} = " in inspect.getsource(kind) for kind in kinds)


def _resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return _has(found, ".".join(parts[length:]))
    return False


class _Links(HTMLParser):
    """The links of a page, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and (link := values.get("href")):
            self.links.append(link)
        if anchor := values.get("id"):
            self.anchors.add(anchor)


def dead_links(folder: Path) -> list[str]:
    """Links between the pages of the reference to a file or an anchor that is not there."""
    pages = {path.resolve(): _Links(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if ":" in target:
                continue
            found = pages.get((path.parent / target).resolve()) if target else page
            if found is None or (anchor and anchor not in found.anchors):
                dead.append(f"{path.relative_to(folder.resolve())} links to {link}, which is not there")
    return dead


def parent_of(module: str) -> str:
    """The nearest module of the reference that holds this one; "" for the first."""
    holders = [other for other in MODULES if module.startswith(f"{other}.")]
    return max(holders, key=len, default="")


def write_reference(folder: Path) -> list[str]:
    """Writes all pages to `folder`; what is wrong with them, a line for each."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        modules = {name: pdoc.doc.Module(load_module(name)) for name in MODULES}
        for name, module in modules.items():
            add_docstrings(module)
            module.submodules = [modules[child] for child in MODULES if parent_of(child) == name]
        pdoc.render.configure(docformat="markdown", footer_text="jaxserve")
        for name, module in modules.items():
            path = folder / f"{name.replace('.', '/')}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pdoc.render.html_module(module, modules))
        (folder / "index.html").write_text(pdoc.render.html_index(modules))
        (folder / "search.js").write_text(pdoc.render.search_index(modules))
    found = [f"pdoc warns: {one.message}" for one in warned]
    listed = list(modules.values())
    return list(dict.fromkeys([*found, *without_docstring(listed), *dead_names(listed), *dead_links(folder)]))


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "build/reference"
    wrong = write_reference(folder)
    print("\n".join([*wrong, f"{folder}/index.html: {len(MODULES)} modules, {len(wrong)} things wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
