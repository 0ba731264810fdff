"""The reader of ShareGPT's own file: a JSON list of objects with `conversations`, of turns with `from` and `value`.

The first turn is the prompt and the second the answer, and conversations outside of the limits are left out, as vLLM
samples the file. A length is the number of words: no tokenizer is known here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.samples import Part, Shape

MIN_LEN = 4
MAX_PROMPT = 1024
MAX_TOTAL = 2048


def read_sharegpt(path: Path, limit: int | None, scale: float) -> Iterator[Shape]:
    """The first `limit` conversations that keep the limits, in the order of the file; lengths times `scale`.

    Raises ConfigError for a file that is no such list.
    """
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(tree, list):
        raise ConfigError(f"{path}: expected a list of conversations, got {type(tree).__name__}")
    count = 0
    for number, entry in enumerate(tree):
        if limit is not None and count >= limit:
            return
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f"{path}: entry {number} has no list of conversations; each needs one")
        if len(turns) < 2:
            continue
        prompt_len, output_len = (
            _length(turn, f"{path}: entry {number}, turn {k}") for k, turn in enumerate(turns[:2])
        )
        if min(prompt_len, output_len) < MIN_LEN or prompt_len > MAX_PROMPT or prompt_len + output_len > MAX_TOTAL:
            continue
        scaled = [max(1, round(length * scale)) for length in (prompt_len, output_len)]
        yield Shape(parts=(Part(number, scaled[0]),), output_len=scaled[1])
        count += 1


def _length(turn: object, place: str) -> int:
    value = turn.get("value") if isinstance(turn, dict) else None
    if not isinstance(value, str):
        raise ConfigError(f"{place} has no text under 'value'")
    return len(value.split())
