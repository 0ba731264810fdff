"""YAML text to plain values, with the line of each key, for messages that point at a place.

PyYAML keeps the last of two equal keys in silence; here the second is an error, since one of the two was meant and it
is not known which.
"""

import re
from pathlib import Path

import yaml

from jaxserve.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML as SafeLoader reads it, but `1e-3` is a number, as in YAML 1.2 and JSON."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> tuple[object, dict[str, int]]:
    """The value of a file, and the line (from 1) of each dotted key. Raises ConfigError naming file and line."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not valid UTF-8") from error
    lines: dict[str, int] = {}
    return _parse(text, str(path), lines, show_lines=True), lines


def parse_yaml(text: str, where: str) -> object:
    """The value of a short text; `where`: its origin, for messages. Raises ConfigError."""
    return _parse(text, where, {}, show_lines=False)


def _parse(text: str, where: str, lines: dict[str, int], *, show_lines: bool) -> object:
    def at(line: int) -> str:
        return f"{where}:{line + 1}" if show_lines else where

    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _plain(loader, node, "", lines)
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{at(text[: error.position].count(chr(10)))}: not valid YAML: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context
        raise ConfigError(f"{at(mark.line if mark else 0)}: not valid YAML: {problem}") from error
    except (ValueError, RecursionError) as error:  # `2020-99-99` looks like a date; brackets nested without end
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _plain(loader: _Loader, node: yaml.Node, prefix: str, lines: dict[str, int]) -> object:
    if not isinstance(node, yaml.ScalarNode) and node.tag not in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
        raise yaml.MarkedYAMLError(problem=f"the tag {node.tag} is not supported", problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, prefix, {}) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    tree: dict[str, object] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
            raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key_node.start_mark)
        key = str(key_node.value)
        if key in tree:
            raise yaml.MarkedYAMLError(problem=f"{prefix}{key} is given twice", problem_mark=key_node.start_mark)
        lines[prefix + key] = key_node.start_mark.line + 1
        tree[key] = _plain(loader, value_node, f"{prefix}{key}.", lines)
    return tree
