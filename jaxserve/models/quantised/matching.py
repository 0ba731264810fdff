"""Names in a config that mean modules: lists of what is not quantised, and targets of a scheme.

Lists are read by whole components: `layers.1` is not a part of `layers.10`, and `gate` none of `gate_proj`. Other
readers search for the text anywhere, which the tools that write these lists do not mean.
"""

import fnmatch
import re
from collections.abc import Iterable

from jaxserve.errors import CheckpointError

_REGEX = "re:"


def is_named(module: str, entries: Iterable[str]) -> bool:
    """Whether an entry is a run of whole components of a module's name; `*` in an entry stands for any text of one."""
    parts = module.split(".")
    return any(_is_run(entry.strip(".").split("."), parts) for entry in entries)


def _is_run(wanted: list[str], parts: list[str]) -> bool:
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, parts[i : i + len(wanted)], wanted)) for i in starts)


def target_rank(target: str, module: str, torch_class: str, origin: str) -> int | None:
    """How a target of compressed-tensors means a module: 0 by its name, 1 by a pattern, 2 by its class; None: not.

    A pattern is written `re:` and a regular expression, which must match from the beginning. Raises CheckpointError for
    one that cannot be read.
    """
    if target.startswith(_REGEX):
        return 1 if matches(target.removeprefix(_REGEX), module, origin) else None
    return 0 if target == module else 2 if target == torch_class else None


def matches(pattern: str, module: str, origin: str) -> bool:
    """Whether a regular expression matches the beginning of a name. Raises CheckpointError for one that is none."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise CheckpointError(f"{origin}: {pattern!r} is no regular expression: {error}") from error
