"""All that pages name is there: links, commands and their options, settings, Python, routes, metrics, files.

Nothing is run here; `scripts/check_readme.py` and the tests of single pages do that.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from jaxserve.cli import COMMANDS, load_command
from jaxserve.config import field_docs, load_config, section_docs
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "configs", "deploy", "docs", "jaxserve", "notebooks", "scripts", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
OF_OTHERS = {"--disable-usage-stats", "--build-arg"}  # options of ray and docker
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Page(NamedTuple):
    """A page as its reader sees it. `blocks`: language and text of each; `quoted`: what is in backticks in prose."""

    path: Path
    prose: str
    blocks: list[tuple[str, str]]
    quoted: list[str]


@functools.cache
def read_page(path: Path) -> Page:
    text = path.read_text()
    blocks = [(language, inspect.cleandoc(f"\n{body}")) for _, language, body in _FENCE.findall(text)]
    prose = _FENCE.sub("", text)
    indented = re.findall(r"(?:^(?: {4,}.*)?\n)+", prose, re.MULTILINE)
    blocks += [("", inspect.cleandoc(f"\n{body}")) for body in indented if body.strip()]
    quoted = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    return Page(path, prose, blocks, quoted)


def on_every_page(test: Callable[[Page], None]) -> Callable[[Path], None]:
    """A test of what a page has, run on each of them."""

    @pytest.mark.parametrize("path", PAGES, ids=IDS)
    def run(path: Path) -> None:
        test(read_page(path))

    run.__doc__ = test.__doc__
    return run


# Links


def anchors(path: Path) -> set[str]:
    """The headings of a page as GitHub names them in links."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = base = re.sub(r"[^\w -]", "", plain.lower()).replace(" ", "-")
        number = 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def dead_links(page: Page) -> list[str]:
    dead = []
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.prose):
        target = (page.path.parent / path).resolve() if path else page.path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}")
    return dead


@on_every_page
def test_links_lead_somewhere(page: Page) -> None:
    assert dead_links(page) == []


# Commands


def command_lines(page: Page) -> Iterator[list[str]]:
    """The words of every line of a shell that begins with one of our programs, without placeholders for more of it."""
    bodies = [re.sub(r"\\\n\s*", " ", body) for _, body in page.blocks]
    lines = [line for body in bodies for line in re.sub(r".*\nerror: ", "", body).splitlines()]  # not what is refused
    for line in (*lines, *page.quoted):
        found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ +)*((?:jaxserve|python|make) .*)", line.strip())
        if found:
            command = re.split(r" {3,}(?!-)", found[1])[0]  # what is said of it, in a column of its own
            try:
                words = shlex.split(command, comments=True)
            except ValueError:
                words = command.replace("'", "").split()  # the end of what another machine is told in quotes
            ends = (k for k, word in enumerate(words) if word in ("|", "&", "&&", ";", ">", "2>", "<", "||"))
            yield words[: next(ends, len(words))]


@functools.cache
def options_of(command: str) -> tuple[frozenset[str], frozenset[str]]:
    """The options of `jaxserve COMMAND [SUBCOMMAND]`, and those that take a value."""
    name, _, sub = command.partition(" ")
    found = load_command(name)
    if sub:
        found = found.commands[sub]
    options = [one for one in found.params if one.param_type_name == "option"]
    names = {name for one in options for name in (*one.opts, *one.secondary_opts)}
    valued = {name for one in options if not (one.is_flag or one.count) for name in one.opts}
    return frozenset(names | {"--help"}), frozenset(valued)


def wrong_in_command(words: list[str]) -> list[str]:
    """What is wrong with `jaxserve ...`: words that are no command, option or setting."""
    rest = words[1:]
    if not rest or not re.match(r"[a-z]", rest[0]):
        return []
    if rest[0] not in COMMANDS:
        return [f"jaxserve {rest[0]}"]
    command = rest.pop(0)
    if hasattr(load_command(command), "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in load_command(command).commands:
            return [f"jaxserve {command} {rest[0]}"]
        command = f"{command} {rest.pop(0)}"
    names, valued = options_of(command)
    wrong = []
    while rest:
        option, has_value, value = rest.pop(0).partition("=")
        option = option.strip("[]")
        if re.match(r"--?[a-zA-Z]", option):
            if option not in names:
                wrong.append(f"jaxserve {command} {option}")
            elif option in valued and not has_value:
                value = rest.pop(0) if rest else ""
            if option == "--set":
                wrong += wrong_in_setting(value)
    return wrong


@functools.cache
def all_options() -> frozenset[str]:
    """Of all commands of jaxserve and of the scripts."""
    groups = {name: getattr(load_command(name), "commands", None) for name in COMMANDS}
    commands = [name if sub is None else f"{name} {sub}" for name, subs in groups.items() for sub in (subs or [None])]
    texts = [path.read_text() for path in (*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").glob("suite/*.py"))]
    of_scripts = {option for text in texts for option in re.findall(r'"(--[a-z][\w-]*)"', text)}
    return frozenset(of_scripts.union(*(options_of(command)[0] for command in commands)))


@functools.cache
def settings() -> frozenset[str]:
    return frozenset(doc.name for doc in field_docs())


def wrong_in_setting(setting: str) -> list[str]:
    """What `--set` says of `a.b=c`. A value in capitals stands for one."""
    name, _, value = setting.partition("=")
    if name not in settings() or not value or re.fullmatch(r"[A-Z_.:/0-9]*[A-Z][A-Z_.:/0-9]*|\.\.\.", value):
        return [] if name in settings() else [f"--set {setting}"]
    try:
        load_config(None, [setting])
    except ConfigError as error:
        return [str(error)]
    return []


def wrong_in_script(words: list[str]) -> list[str]:
    """What is wrong with `python scripts/X.py ...` or `python -m X ...`."""
    if words[1:2] == ["-m"] and words[2:3] == ["jaxserve.run"]:
        return wrong_in_command(["jaxserve", "run", *words[3:]])
    if words[1:2] == ["-m"]:
        return [] if importlib.util.find_spec(words[2]) else [" ".join(words)]
    if len(words) < 2 or not words[1].startswith("scripts/"):
        return []
    path = ROOT / words[1]
    if not path.exists():
        return [words[1]]
    source = path.read_text()
    options = [word.partition("=")[0] for word in words[2:] if re.match(r"--[a-z]", word)]
    return [f"{words[1]} {option}" for option in options if f'"{option}"' not in source]


def wrong_in_make(words: list[str]) -> list[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return [f"make {word}" for word in words[1:] if re.fullmatch(r"[a-z-]+", word) and word not in targets]


WRONG_IN = {"jaxserve": wrong_in_command, "python": wrong_in_script, "make": wrong_in_make}


@on_every_page
def test_commands_have_the_options_and_settings_they_are_given(page: Page) -> None:
    assert [wrong for words in command_lines(page) for wrong in WRONG_IN[words[0]](words)] == []


# Configs and Python


def wrong_settings(page: Page) -> list[str]:
    """Of blocks of YAML that are configs, or parts of one."""
    trees = [yaml.safe_load(body) for language, body in page.blocks if language == "yaml"]
    configs = [tree for tree in trees if tree.keys() & Config.model_fields.keys()]
    return [name for tree in configs for name in leaves(tree) if name not in settings()]


@on_every_page
def test_configs_have_the_settings_they_give(page: Page) -> None:
    assert wrong_settings(page) == []


def leaves(tree: dict[str, Any], before: str = "") -> Iterator[str]:
    for key, value in tree.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and name not in settings():
            yield from leaves(value, f"{name}.")
        else:
            yield name


def is_setting(name: str) -> bool:
    """Whether it is one, a section of them, or a name in a setting that is a mapping."""
    return name in settings() or name in section_docs() or name.rpartition(".")[0] in settings()


class Known(ast.NodeVisitor):
    """Collects, over the blocks of a page: what names stand for, as far as imports and calls of classes say it."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}  # imported
        self.kinds: dict[str, type] = {}  # variables by the class that they were made by
        self.wrong: list[str] = []

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.startswith("jaxserve.models"):  # imports JAX, for seconds
            names = [f"{module.partition('.')[2]}.{alias.name}" for alias in node.names]
            self.wrong += [f"{name} is not there" for name in names if not is_python(name)]
        elif module.split(".")[0] == "jaxserve":
            for alias in node.names:
                try:
                    self.objects[alias.asname or alias.name] = getattr(importlib.import_module(module), alias.name)
                except (ImportError, AttributeError) as error:
                    self.wrong.append(str(error))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "jaxserve":
                importlib.import_module(alias.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_withitem(self, node: ast.withitem) -> None:
        self.generic_visit(node)
        self._bind(node.optional_vars, node.context_expr)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = self.kinds
        self.kinds = {name: kind for name, kind in outside.items() if name not in {one.arg for one in node.args.args}}
        self.generic_visit(node)
        self.kinds = outside

    visit_AsyncFunctionDef = visit_FunctionDef

    def _bind(self, target: ast.AST | None, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            made = self._look_up(value.func)
            kind = made if isinstance(made, type) else getattr(made, "__self__", None)  # a class method that makes one
            if isinstance(kind, type):
                self.kinds[target.id] = kind

    def _look_up(self, node: ast.expr) -> Any:
        """What an expression of dots stands for, or None where that is not known."""
        if isinstance(node, ast.Name):
            return self.objects.get(node.id, self.kinds.get(node.id))
        if isinstance(node, ast.Attribute) and (owner := self._look_up(node.value)) is not None:
            is_instance = isinstance(node.value, ast.Name) and node.value.id in self.kinds
            if not is_instance and hasattr(owner, node.attr):
                return getattr(owner, node.attr)
            if is_instance and has_member(owner, node.attr):
                return inspect.getattr_static(owner, node.attr, None)
            self.wrong.append(f"{ast.unparse(node)} is not there")
        return None

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self._look_up(node.func)
        names = arguments_of(called) if callable(called) else None
        if names is not None:
            unknown = [word.arg for word in node.keywords if word.arg and word.arg not in names]
            self.wrong += [f"{ast.unparse(node.func)} takes no {name}" for name in unknown]


def arguments_of(called: Callable[..., Any]) -> set[str] | None:
    """The names of its arguments; None where it takes any, or does not say."""
    if isinstance(called, type) and dataclasses.is_dataclass(called):
        return {field.name for field in dataclasses.fields(called) if field.init}
    try:
        takes = inspect.signature(called).parameters.values()
    except ValueError:  # written in C
        return None
    return None if any(one.kind is one.VAR_KEYWORD for one in takes) else {one.name for one in takes}


def has_member(kind: type, name: str) -> bool:
    fields = {field for base in kind.__mro__ for field in inspect.get_annotations(base)}
    sources = (inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("jaxserve"))
    return hasattr(kind, name) or name in fields or any(f"self.{name} = " in source for source in sources)


def wrong_in_python(blocks: list[str]) -> list[str]:
    known = Known()
    for block in blocks:
        tree = compile(block, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        known.visit(tree)
    return known.wrong


@on_every_page
def test_python_has_the_imports_and_arguments_it_uses(page: Page) -> None:
    imports = [line for language, body in page.blocks if not language for line in body.splitlines()]
    lines = [line for line in imports if re.match(r"from jaxserve[\w.]* import [\w, ]+$", line)]
    assert wrong_in_python([body for language, body in page.blocks if language == "python"] + lines) == []


# Names


@functools.cache
def public_classes() -> dict[str, Any]:
    modules = [importlib.import_module(f"jaxserve{name}") for name in ("", ".client", ".sched", ".testing", ".lab")]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


@functools.cache
def routes() -> frozenset[str]:
    """Paths of the HTTP doors, with ID for each parameter: as they are written there, and joined."""
    nodes = (node for path in (ROOT / "jaxserve/serve").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    paths = {re.sub(r"\{[^}]*\}", "ID", text) for text in texts if re.fullmatch(r"/[\w/{}.:]*", text)}
    return frozenset({"/openapi.json"} | paths | {f"{path.rstrip('/')}{end}" for path in paths for end in paths})


@functools.cache
def package_text() -> str:
    return "\n".join(path.read_text() for kind in ("py", "proto") for path in (ROOT / "jaxserve").rglob(f"*.{kind}"))


def is_python(name: str) -> bool:
    """Whether a dotted name is a module of ours, something in one, a group of entry points, or a service of gRPC."""
    package, _, last = name.rpartition(".")
    if f'"jaxserve.{name}"' in package_text() or (package.endswith("v1") and f"service {last} {{" in package_text()):
        return True
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath("jaxserve", *parts[:length])
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if file.exists():
            return all(re.search(rf"\b{part}\b", file.read_text()) for part in parts[length:])
    return False


_FILES = re.compile(r"\.(py|md|json|jsonl|yaml|yml|png|js|css|c|proto|txt|toml|gguf|html)$")


@functools.cache
def metrics() -> frozenset[str]:
    """Those of the table in docs/observability.md, which its own test holds equal to what is exported."""
    rows = re.findall(r"^\| (`jaxserve:.*?) \|", (ROOT / "docs/observability.md").read_text(), re.MULTILINE)
    return frozenset(name for row in rows for name in re.findall(r"`(jaxserve:\w+)`", row))


def wrong_names(code: str) -> Iterator[str]:
    """What a text in backticks names that is not there: settings, metrics, routes, files, names of Python."""
    if (named := re.match(r"(--[a-z][\w-]*)(?:[ =]|$)", code)) and named[1] not in all_options() | OF_OTHERS:
        yield code
    if named := re.match(r"([a-z_]+(?:\.\w+)+)(?:=|$)", code):
        name = named[1]
        is_of_config = name.split(".")[0] in section_docs() and not _FILES.search(name)
        if is_of_config and not is_setting(name) and not is_python(name) and f'"{name}"' not in package_text():
            yield code
    for metric in re.findall(r"\bjaxserve:[a-z]\w+", code):
        if not {metric, re.sub(r"_(total|bucket|count|sum)$", "", metric)} & metrics():
            yield metric
    if named := re.fullmatch(r"(?:GET|POST|PUT|DELETE|HEAD) (/\S*)|(/(?:v1|admin)\b[^ ]*)", code):
        path = re.sub(r"\{[^}]*\}|\b[A-Z_]+\b", "ID", (named[1] or named[2]).partition("?")[0])
        if not {path, f"{path}/"} & routes():
            yield code
    if (named := re.fullmatch(r"jaxserve\.([\w.]+)(?:\(.*\))?", code)) and not is_python(named[1]):
        yield code
    written = re.match(r"(jaxserve|python|make|PYTHONPATH=\.) ", code)  # a command may write a file
    for path in [] if written else re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*-]*", code):
        if not list(ROOT.glob(path.rstrip("/."))):
            yield path
    if named := re.match(r"([A-Z]\w+)\.(\w+)", code):
        kind = public_classes().get(named[1])
        if isinstance(kind, type) and not has_member(kind, named[2]):
            yield code


@on_every_page
def test_names_in_backticks_are_there(page: Page) -> None:
    assert [wrong for code in page.quoted for wrong in wrong_names(code)] == []


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """One mistake of each kind, among as many that are right."""
    page = tmp_path / "page.md"
    page.write_text(
        """# A page
[a](page.md#a-page) [b](page.md#b) [c](c.md), `--prompt`, `--promt X`,
`sched.policy`, `sched.polcy=fair`, `jaxserve:engine_alive`, `jaxserve:engin`,
`POST /v1/completions` and `/v1/completion`, `LLM.generate` and `LLM.generat`, `docs/http.md` and `docs/htp.md`,
`jaxserve.errors` and `jaxserve.error`, `jaxserve run --set sched.max_rows=4 --prompt x` and `jaxserve run --promt x`.

    jaxserve bench serve --rte 4 --url http://127.0.0.1:8000 | cat --nothing
    jaxserve sevre demo
    jaxserve run --set sched.max_rows=many --set \\
      sched.rows=4
    python scripts/attack.py --sconds 6
    make demo-all

```yaml
sched: {policy: fair, polcy: fair}
```

```python
from jaxserve import LLM, SamplingParam, SamplingParams

llm = LLM(model="demo", modle="demo")
llm.generate("x", SamplingParams(max_token=5, seed=1), prioritys=1)
llm.generat("x")
```
"""
    )
    found = read_page(page)
    names = [wrong for code in found.quoted for wrong in wrong_names(code)]
    wanted = [
        "--promt X",
        "sched.polcy=fair",
        "jaxserve:engin",
        "/v1/completion",
        "LLM.generat",
        "docs/htp.md",
        "jaxserve.error",
    ]
    assert names == wanted
    commands = [wrong for words in command_lines(found) for wrong in WRONG_IN[words[0]](words)]
    assert sorted(one[:32] for one in commands) == [
        "--set sched.rows=4",
        "--set: sched.max_rows is 'many',",
        "jaxserve bench serve --rte",
        "jaxserve run --promt",
        "jaxserve sevre",
        "make demo-all",
        "scripts/attack.py --sconds",
    ]
    assert wrong_settings(found) == ["sched.polcy"]
    assert sorted(wrong_in_python([body for language, body in found.blocks if language == "python"])) == [
        "LLM takes no modle",
        "SamplingParams takes no max_token",
        "llm.generat is not there",
        "llm.generate takes no prioritys",
        "module 'jaxserve' has no attribute 'SamplingParam'; it has "
        + ", ".join(importlib.import_module("jaxserve").__all__),
    ]
    assert dead_links(found) == ["page.md#b", "c.md#"]
