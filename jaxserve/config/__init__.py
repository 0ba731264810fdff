"""Loading the configuration: the file, the overrides, and every environment variable of the package.

The result is a `Config`, whose fields are declared in `config.schema`, with a list of where each value came from.
Values that follow from a config and a checkpoint (pages that fit, buckets) are computed by `runtime` and never written
back.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic
import yaml

from jaxserve.config.addresses import LISTENABLE, listening_host
from jaxserve.config.environment import ENVIRONMENT, claimed_variables, hint_of, variable_of
from jaxserve.config.model_path import PACKAGED
from jaxserve.config.schema import Config, Section
from jaxserve.config.yaml_lines import parse_yaml, read_yaml
from jaxserve.errors import ConfigError, SeveralMistakes
from jaxserve.values.other_names import Place, answer

_PATHS = (
    "model.path",
    "cache.scales",
    "adapters.directory",
    "model.tokenizer",
    "hosts.secret_file",
    "hosts.tls_cert",
    "hosts.tls_key",
    "hosts.tls_ca",
    "runtime.compile_cache",
    "runtime.step_log",
    "serve.admin_tokens_file",
    "serve.http.api_keys_file",
    "serve.http.tls_cert",
    "serve.http.tls_key",
    "serve.http.tls_client_ca",
    "serve.http.profile_dir",
    "serve.http.weights_dir",
    "serve.grpc.tls_cert",
    "serve.grpc.tls_key",
    "serve.grpc.tls_client_ca",
    "serve.grpc.tokens_file",
    "route.tokenizer",
    "route.tls_ca",
    "route.tls_cert",
    "route.tls_key",
    "route.token_file",
    "store.secret_file",
    "store.tls_ca",
    "store.tls_cert",
    "store.tls_key",
    "handoff.secret_file",
    "handoff.tls_cert",
    "handoff.tls_key",
    "handoff.tls_ca",
    "kv_server.directory",
    "kv_server.tls_cert",
    "kv_server.tls_key",
    "kv_server.tls_client_ca",
)
_CODE = ("sched.policy", "sched.lengths", "cache.host_policy", "route.policy")  # may be FILE.py:NAME
_PATH_TABLES = ("adapters.load",)  # of names, each with a path
_PATHS_IF = {"store.location": ("store.kind", "file")}  # paths where another setting has this value
_ACCELERATOR_FILES = (  # NVIDIA (as JAX looks, and its driver's folder), WSL, AMD, TPUs
    *("dev/nvidia[0-9]*", "dev/nvidiactl", "proc/driver/nvidia/gpus/*"),
    *("dev/dxg", "dev/kfd"),
    *("dev/accel[0-9]*", "dev/vfio/[0-9]*"),
)
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # read by XLA and libtpu; here only to tell programs apart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A config and where each of its values came from.

    Attributes:
      sources: dotted name of each field -> "default", "FILE:LINE", "environment NAME", "--set" or another
        flag, or "override".
    """

    config: Config
    sources: Mapping[str, str]


def policy_of(config: Config) -> str:
    """The scheduler that `sched.policy` names, or that follows from the keys of the server where it names none."""
    if config.sched.policy is not None:
        return config.sched.policy
    keys = (config.serve.http.api_keys_file, config.serve.grpc.tokens_file)
    return "fcfs" if keys == (None, None) else "fair"


def for_one_user(resolved: ResolvedConfig) -> ResolvedConfig:
    """The same for a door without keys: all requests are those of the process that has it."""
    return _with_sched(resolved, policy="fcfs")


def for_batches(resolved: ResolvedConfig) -> ResolvedConfig:
    """`for_one_user`, and this user waits for the whole batch: gaps between tokens do not matter."""
    return _with_sched(for_one_user(resolved), max_mixed_tokens=0)


def _with_sched(resolved: ResolvedConfig, **defaults: object) -> ResolvedConfig:
    """With these settings of `sched` where they are null."""
    config = resolved.config
    update = {name: value for name, value in defaults.items() if getattr(config.sched, name) is None}
    sched = config.sched.model_copy(update=update)
    return dataclasses.replace(resolved, config=config.model_copy(update={"sched": sched}))


class FlagSetting(NamedTuple):
    """A setting that a flag of a command gives. `flag`: as it was typed, such as `--port`, for errors and sources."""

    name: str
    value: object
    flag: str


class FieldDoc(NamedTuple):
    """The description of one field. `wanted`: the values it takes, in words."""

    name: str
    wanted: str
    default: object
    description: str


class _Place(NamedTuple):
    """Where a value was written. Places in their order are the sources in their order, and lines from the top."""

    rank: int
    line: int
    text: str  # for messages


class _Setting(NamedTuple):
    value: object
    place: _Place
    folder: Path | None = None  # the base of relative paths; None: the working directory


class _Mistakes:
    """All that is wrong in the sources of one config, to be told at once."""

    def __init__(self) -> None:
        self._found: list[tuple[_Place, str]] = []

    def note(self, place: _Place, text: str) -> None:
        self._found.append((place, f"{place.text}: {text}"))

    @contextlib.contextmanager
    def noted(self, place: _Place) -> Iterator[None]:
        """An error of the block has the place in its message already."""
        try:
            yield
        except ConfigError as error:
            self._found.append((place, str(error)))

    def raise_if_any(self) -> None:
        texts = [text for _, text in sorted(self._found)]
        if len(texts) > 1:
            raise SeveralMistakes("\n".join(" ".join(text.split()) for text in texts))
        if texts:
            raise ConfigError(texts[0])


_SECRETS = re.compile(r"(secret|tokens?|keys)_file$|tls_key$")  # somebody may give the secret in the file's place
_DEFAULT = _Place(0, 0, "default")
_FILE, _ENVIRONMENT, _OVERRIDE = 1, 2, 3
_FROM_ENVIRONMENT = "environment "


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | Sequence[str | FlagSetting] = (),
    *,
    environ: Mapping[str, str] | None = None,
    every_variable: bool = True,
) -> ResolvedConfig:
    """Defaults, then the file, then the environment, then `overrides`; the later wins.

    `every_variable`: each setting has a variable, and one that names none is a mistake; otherwise those of
    `ENVIRONMENT` count alone, for programs whose settings are the arguments of calls.

    `overrides` is a mapping from dotted names (or nested sections) to values, or a list of "a.b=c" whose values are
    YAML, and of flags. Relative paths in a file are relative to the file's directory, elsewhere to the working
    directory; "~" is the home directory; the model paths "demo" and "demo-vision" name models inside the package and
    are never files.

    Raises ConfigError in one line: where, which key, what was given, what is wanted; SeveralMistakes with a line for
    each mistake.
    """
    mistakes = _Mistakes()
    settings = {doc.name: _Setting(doc.default, _DEFAULT) for doc in field_docs()}
    if path is not None:
        settings.update(_read_file(Path(path), mistakes))
    variables = os.environ if environ is None else environ
    settings.update(_read_environment(variables, mistakes, every_variable=every_variable))
    settings.update(_read_overrides(overrides, mistakes))
    paths = {*_PATHS, *(path for path, (name, value) in _PATHS_IF.items() if settings[name].value == value)}
    settings |= {name: _resolve_path(settings[name]) for name in paths}
    settings |= {name: _resolve_table(settings[name]) for name in _PATH_TABLES}
    settings |= {name: _resolve_code(settings[name]) for name in _CODE}
    config = _validate(settings, mistakes)
    mistakes.raise_if_any()
    assert config is not None, "a config is missing only where a mistake was noted"
    return ResolvedConfig(config=config, sources={name: one.place.text for name, one in settings.items()})


def refuse_settings_of_others(
    resolved: ResolvedConfig, command: str, read: Sequence[str], but_not: Sequence[str] = ()
) -> None:
    """Raises ConfigError when a file or a flag sets what this command would ignore: limits of tenants, say, which a
    router does not keep. The environment may hold settings for other commands.

    `read`: dotted names of the fields and sections that the command reads; `but_not`: exceptions among them.
    """
    assert all(name in _FIELDS or name in _SECTIONS for name in (*read, *but_not)), "a name that is none"
    ignored = [
        f"{doc.name} ({source})"
        for doc in field_docs()
        if (source := resolved.sources[doc.name]) != "default" and not source.startswith(_FROM_ENVIRONMENT)
        if _is_within(doc.name, but_not) or not _is_within(doc.name, read)
        if get_value(resolved.config, doc.name) != doc.default
    ]
    if ignored:
        raise ConfigError(f"{command} does not use {', '.join(ignored)}; set this for the servers, or leave it out")


def settings_from_environment(resolved: ResolvedConfig) -> dict[str, str]:
    """Dotted name of each setting that the environment has set -> the variable."""
    return {
        name: source.removeprefix(_FROM_ENVIRONMENT)
        for name, source in resolved.sources.items()
        if source.startswith(_FROM_ENVIRONMENT)
    }


def _is_within(name: str, sections: Sequence[str]) -> bool:
    return any(name == section or name.startswith(f"{section}.") for section in sections)


def field_docs() -> list[FieldDoc]:
    """Every field of the tree, in the order of the schema."""
    return [
        FieldDoc(name, _describe_type(info.annotation, info.metadata), info.default, info.description or "")
        for name, info in _FIELDS.items()
    ]


def section_docs() -> Mapping[str, str]:
    """Dotted name of each section -> its sentence. The root is left out."""
    return {name: inspect.getdoc(section) or "" for name, section in _SECTIONS.items() if name}


def format_config(resolved: ResolvedConfig) -> str:
    """The whole config as YAML that loads again, each value with its source as a comment."""
    lines: list[tuple[str, str]] = []
    opened: tuple[str, ...] = ()
    for name, source in resolved.sources.items():
        *sections, key = name.split(".")
        for depth, section in enumerate(sections):
            if opened[: depth + 1] != tuple(sections[: depth + 1]):
                lines.append(("  " * depth + f"{section}:", ""))
        opened = tuple(sections)
        # A scalar is dumped as a document of its own, with an end mark.
        value = yaml.safe_dump(_plain(get_value(resolved.config, name)), default_flow_style=True, width=10**9)
        value = value.removesuffix("\n").removesuffix("\n...")
        lines.append((f"{'  ' * len(sections)}{key}: {value}", f"# {source}"))
    width = max(len(text) for text, source in lines if source)
    return "\n".join(f"{text:{width}}  {source}".rstrip() for text, source in lines) + "\n"


def _plain(value: object) -> object:
    """The value as YAML has it: a table of sections as a table of mappings."""
    if isinstance(value, dict):
        return {key: one.model_dump() if isinstance(one, Section) else one for key, one in value.items()}
    return value


def get_value(config: Config, name: str) -> object:
    """The value of the field with this dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def _collect(section: type[pydantic.BaseModel], prefix: str = "") -> None:
    _SECTIONS[prefix.rstrip(".")] = section
    for key, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            _collect(info.annotation, f"{prefix}{key}.")
        else:
            _FIELDS[prefix + key] = info


_FIELDS: dict[str, pydantic.fields.FieldInfo] = {}  # both derived from the schema, never changed after import
_SECTIONS: dict[str, type[pydantic.BaseModel]] = {}
_collect(Config)


def _read_file(path: Path, mistakes: _Mistakes) -> dict[str, _Setting]:
    tree: object = None
    lines: dict[str, int] = {}
    with mistakes.noted(whole := _Place(_FILE, 0, str(path))):
        tree, lines = read_yaml(path)
    if not isinstance(tree, dict | None):
        mistakes.note(whole, f"a config file holds sections ({', '.join(Config.model_fields)}), got {tree!r:.80}")
        return {}

    def place(name: str) -> _Place:
        return _Place(_FILE, lines[name], f"{path}:{lines[name]}")

    return _leaves(tree or {}, "", place, path.absolute().parent, mistakes)


def _read_environment(environ: Mapping[str, str], mistakes: _Mistakes, *, every_variable: bool) -> dict[str, _Setting]:
    known = dict(ENVIRONMENT)
    if every_variable:
        known |= {variable_of(name): name for name in _FIELDS}
        for variable in claimed_variables(environ):
            if variable not in known:
                mistakes.note(_environment_place(variable), f"there is no such setting; {hint_of(variable, _FIELDS)}")
    settings: dict[str, _Setting] = {}
    for variable, name in known.items():
        if not environ.get(variable):
            continue
        place = _environment_place(variable)
        if name in settings:
            mistakes.note(place, f"{name} is set by {settings[name].place.text}, too; leave one of the two out")
        with mistakes.noted(place):
            settings[name] = _Setting(parse_yaml(environ[variable], place.text), place)
    return settings


def _environment_place(variable: str) -> _Place:
    return _Place(_ENVIRONMENT, 0, f"{_FROM_ENVIRONMENT}{variable}")


def _read_overrides(
    overrides: Mapping[str, object] | Sequence[str | FlagSetting], mistakes: _Mistakes
) -> dict[str, _Setting]:
    settings: dict[str, _Setting] = {}
    if isinstance(overrides, Mapping):
        for number, (key, value) in enumerate(overrides.items()):
            settings |= _override(key, value, _Place(_OVERRIDE, number, "override"), mistakes)
        return settings
    for number, item in enumerate(overrides):
        if isinstance(item, FlagSetting):
            settings |= _override(item.name, item.value, _Place(_OVERRIDE, number, item.flag), mistakes)
            continue
        place = _Place(_OVERRIDE, number, "--set")
        key, equals, text = item.partition("=")
        with mistakes.noted(place):
            if not equals or not key:
                raise ConfigError(f"--set wants KEY=VALUE, such as cache.num_pages=24; got {item!r}")
            settings |= _override(key.strip(), parse_yaml(text, f"--set {key}"), place, mistakes)
    return settings


def _override(key: str, value: object, place: _Place, mistakes: _Mistakes) -> dict[str, _Setting]:
    section, _, last = key.rpartition(".")
    if section not in _SECTIONS:
        mistakes.note(place, _unknown_key(key))
        return {}
    return _leaves({last: value}, f"{section}." if section else "", lambda _: place, None, mistakes)


def _leaves(
    tree: Mapping[str, object],
    prefix: str,
    place: Callable[[str], _Place],
    folder: Path | None,
    mistakes: _Mistakes,
) -> dict[str, _Setting]:
    """The settings below a section. `place`: of a dotted name."""
    settings: dict[str, _Setting] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if "." in key:  # two spellings of one setting in one place would hide a double
            mistakes.note(place(name), f"unknown key {name!r}; in a mapping, sections are nested")
        elif name in _FIELDS:
            settings[name] = _Setting(value, place(name), folder)
        elif name not in _SECTIONS:
            mistakes.note(place(name), _unknown_key(name))
        elif isinstance(value, Mapping):
            settings |= _leaves(value, f"{name}.", place, folder, mistakes)
        elif value is not None:  # a section whose lines are all commented out is empty
            mistakes.note(place(name), f"{name} is {value!r:.80}, but must be a section of settings")
    return settings


def _unknown_key(name: str) -> str:
    section, _, last = name.rpartition(".")
    if (here := answer(last, Place.SETTING)) is not None:
        return f"unknown key {name!r}; {here}"
    prefix = f"{section}." if section in _SECTIONS and section else ""
    known = list(_SECTIONS[prefix.rstrip(".")].model_fields)
    close = [prefix + k for k in difflib.get_close_matches(last, known, n=1)]
    close += [n for n in _FIELDS if n.rpartition(".")[2] == last]
    close += difflib.get_close_matches(name, _FIELDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(prefix + k for k in known)}"
    return f"unknown key {name!r}; {hint}"


def _resolve_path(setting: _Setting) -> _Setting:
    value = setting.value
    if not isinstance(value, str) or value in ("", *PACKAGED):
        return setting
    # Always absolute: "./demo" must not turn into the name "demo".
    return setting._replace(value=os.path.abspath(os.path.join(setting.folder or "", os.path.expanduser(value))))


def _resolve_table(setting: _Setting) -> _Setting:
    if not isinstance(setting.value, Mapping):
        return setting
    return setting._replace(
        value={name: _resolve_path(setting._replace(value=path)).value for name, path in setting.value.items()}
    )


def _resolve_code(setting: _Setting) -> _Setting:
    """The file of FILE.py:NAME is relative to the config in which it stands."""
    if setting.folder is None or not isinstance(setting.value, str):
        return setting
    file, middle, name = setting.value.partition(".py:")
    return setting if not middle else setting._replace(value=f"{setting.folder / file}{middle}{name}")


def _validate(settings: Mapping[str, _Setting], mistakes: _Mistakes) -> Config | None:
    tree: dict[str, Any] = {}
    for name, setting in settings.items():
        *sections, key = name.split(".")
        functools.reduce(lambda branch, section: branch.setdefault(section, {}), sections, tree)[key] = setting.value
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        # One value may be wrong in several ways, an item of a list or a member of a union each; it is told once.
        for name in dict.fromkeys(_field_of(problem["loc"]) for problem in error.errors(include_url=False)):
            info, setting = _FIELDS[name], settings[name]
            hint = " (quote it to make it text)" if _is_text(info) and isinstance(setting.value, int | float) else ""
            wanted = _describe_type(info.annotation, info.metadata)
            given = "a value that is not shown" if _SECRETS.search(name) else f"{setting.value!r:.80}"
            mistakes.note(setting.place, f"{name} is {given}, but must be {wanted}{hint}")
        return None


def _field_of(location: Sequence[int | str]) -> str:
    """The field in which pydantic found a mistake: the location goes on into list items and members of a union."""
    parts = [str(part) for part in location]
    return next(name for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in _FIELDS)


def _is_text(info: pydantic.fields.FieldInfo) -> bool:
    return info.annotation is str or str in typing.get_args(info.annotation)


_TYPE_TEXTS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_BOUND_TEXTS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _describe_type(annotation: Any, metadata: Sequence[Any]) -> str:
    """Words for the values that a field takes, for messages and the documentation."""
    arguments = typing.get_args(annotation)
    if type(None) in arguments:
        (other,) = (a for a in arguments if a is not type(None))
        return f"{_describe_type(other, metadata)}, or null"
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _describe_type(arguments[0], arguments[1:])
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is dict and isinstance(arguments[1], type) and issubclass(arguments[1], Section):
        return f"a mapping of names to mappings of {', '.join(arguments[1].model_fields)}"
    if origin is dict:
        return "a mapping of names to JSON values"
    if origin is list:
        return f"a list, each item {_describe_type(arguments[0], ())}"
    if any(getattr(m, "func", None) is listening_host for m in metadata):
        return LISTENABLE
    bounds = [f"{text} {getattr(m, b):g}" for m in metadata for b, text in _BOUND_TEXTS.items() if b in _slots(m)]
    text = _TYPE_TEXTS[annotation]
    return " and ".join([f"{text} of {bounds[0]}", *bounds[1:]]) if bounds else text


def _slots(constraint: object) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(constraint)) if dataclasses.is_dataclass(constraint) else ()


def find_accelerators(root: Path = Path("/")) -> list[Path]:
    """Files that drivers of GPUs and TPUs create; [] where only a CPU can run a model.

    On systems whose driver files are not known, `root` itself: then JAX has to look.
    """
    if sys.platform != "linux":
        return [root]
    return [path for pattern in _ACCELERATOR_FILES for path in sorted(root.glob(pattern))]


@contextlib.contextmanager
def gpu_memory_reserved(share: float) -> Iterator[None]:
    """JAX reserves this share of a GPU if it starts within the block. A setting of the user stays.

    Not for longer: other processes that this one starts have settings of their own.
    """
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    if name in os.environ:
        yield
        return
    os.environ[name] = f"{share:.4f}"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def describe_absent_tpu(arguments: str = "") -> None:
    """Tells libtpu, before it is loaded, to compile only and not to look for chips. Variables that are set stay.

    `arguments` are added to those that libtpu reads once, when it is loaded.
    """
    if arguments:
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {arguments}".strip()
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu's lock is for processes that use chips
    }.items():
        os.environ.setdefault(name, value)


def read_compiler_variables() -> dict[str, str]:
    """The environment variables that XLA and libtpu read."""
    return {name: os.environ.get(name, "") for name in COMPILER_VARIABLES}
