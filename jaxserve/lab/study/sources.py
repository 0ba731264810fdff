"""What a run depends on beside the words of its study: code of the user's, files, and this package itself.

Without them, a study that is called again after a change of a policy or of a trace would hand out figures of before.
"""

import hashlib
import site
import sys
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.config import load_config, policy_of
from jaxserve.config.model_path import resolve_model_path
from jaxserve.errors import ConfigError
from jaxserve.lab.study.spec import Point
from jaxserve.routing import ROUTERS
from jaxserve.sched import SCHEDULERS, find_scheduler
from jaxserve.sched.create import split_parameters
from jaxserve.sched.lengths import LENGTHS
from jaxserve.sched.tier_policy import TIER_POLICIES
from jaxserve.values.registry import Registry

PACKAGE = Path(jaxserve.__file__).parent
# Nothing of these is imported by a run: doors, commands, and what reads the results of runs.
UNREAD = (
    *("cli", "client", "fleet", "quantise", "serve", "testing"),
    *("lab/bench", "lab/replay", "lab/training"),
    *(f"lab/study/{name}.py" for name in ("cli", "pictures", "report", "run", "sources", "summary")),
)
_MODEL_FILES = (  # that say what a model is; weights and tokenizers change no simulated time
    *("config.json", "preprocessor_config.json", "processor_config.json"),
    *("quantize_config.json", "quant_config.json", "jaxserve_orbax.json"),
)
_HEADER_BYTES = 16 * 2**20  # of a model in one file, whose header comes first


class Sources:
    """Digests of the sources and files of points. Each is read once, when a point that has it is asked for first."""

    def __init__(self) -> None:
        self._package = _digest_of_package()
        self._classes: dict[tuple[str, str], dict[str, str]] = {}
        self._files: dict[Path, str | None] = {}

    def of(self, point: Point) -> dict[str, str]:
        """Digests by name: of the package, of modules, of files.

        Raises ConfigError for settings that are none, and for a class that cannot be loaded.
        """
        config = load_config(None, point.settings).config
        found = {"jaxserve": self._package}
        policy = point.values["policy"] or policy_of(config)
        find_scheduler(policy)  # parameters, too, are found to be wrong before the first run
        choices: tuple[tuple[Registry[Any], str], ...] = (
            (SCHEDULERS, split_parameters(policy)[0]),
            (ROUTERS, point.values["router"] or config.route.policy),
            (LENGTHS, config.sched.lengths),
            (TIER_POLICIES, config.cache.host_policy),
        )
        for registry, name in choices:
            if not registry.is_own(name):
                if (registry.kind, name) not in self._classes:
                    self._classes[registry.kind, name] = digests_of_code(registry.get(name))
                found |= self._classes[registry.kind, name]
        for name, path in _files_of(point, config.model.path):
            if path not in self._files:
                self._files[path] = _digest_of_file(path)
            if (digest := self._files[path]) is not None:
                found[name] = digest
        return found


def digests_of_code(found: object) -> dict[str, str]:
    """The digest of each module that a class, function or object is made of, by the module's name.

    They are its own, those of its bases, and those that they use, as far as these are not parts of Python, of jaxserve
    or of an installed package; of an installed one, the module of the object itself and of its bases is among them.
    """
    kind = found if isinstance(found, type) else type(found)
    named = [getattr(found, "__module__", None), *(base.__module__ for base in kind.__mro__)]
    waiting = [name for name in dict.fromkeys(named) if isinstance(name, str) and not _is_python_or_ours(name)]
    digests: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in digests or module is None or file is None:
            continue
        digest = _digest_of_file(Path(file))
        if digest is not None:
            digests[name] = digest
        if not _is_installed(Path(file)):
            waiting += [used for used in _used_modules(module) if not _is_elsewhere(used)]
    return digests


def _used_modules(module: types.ModuleType) -> Iterable[str]:
    """The modules that the names of `module` come from."""
    for value in vars(module).values():
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name


def _is_python_or_ours(name: str) -> bool:
    root = name.partition(".")[0]
    return root == jaxserve.__name__ or root in sys.stdlib_module_names


def _is_elsewhere(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return _is_python_or_ours(name) or file is None or _is_installed(Path(file))


def _is_installed(file: Path) -> bool:
    folders = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")]
    return any(file.is_relative_to(folder) for folder in folders)


def _files_of(point: Point, model: str) -> list[tuple[str, Path]]:
    """Each with a name that does not change with the place of a model that is moved."""
    trace = point.values.get("load.path")
    given = [] if trace is None else [trace]
    for device in point.values["device"].split(","):
        file = device.strip().partition("*")[0].rpartition(":")[0]
        given += [file] if file.endswith((".yaml", ".yml")) else []
    path = resolve_model_path(model)
    of_model = [(f"model/{name}", path / name) for name in _MODEL_FILES] if path.is_dir() else [("model", path)]
    return [(name, Path(name)) for name in given] + of_model


def _digest_of_file(path: Path) -> str | None:
    """None without such a file: what needs it says so. Of a model in one file, of its header and size."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            if path.suffix == ".gguf":
                digest.update(f"{path.stat().st_size}\0".encode())
                digest.update(file.read(_HEADER_BYTES))
            else:
                while part := file.read(2**20):
                    digest.update(part)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _digest_of_package() -> str:
    unread = tuple(PACKAGE / part for part in UNREAD)
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(path.is_relative_to(part) for part in unread):
            digest.update(f"{path.relative_to(PACKAGE)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
