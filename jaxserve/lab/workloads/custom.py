"""The reader of a user's own prompts in a JSONL file.

Each line is one object with "prompt" (text or token ids) or "messages" (chat), and, if wanted, "max_tokens" and
"arrival_s". Beside a prompt, "pictures" are those of a simulation: objects of `TracePicture`. Other names are errors,
so that a misspelt one is found before a load is sent.
"""

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.samples import Prompt, Sample, TracePicture

_KNOWN = ("prompt", "messages", "max_tokens", "arrival_s", "pictures")
_LARGEST_ID = 2**31 - 1


def read_custom(path: Path, output_len: int, limit: int | None) -> list[Sample]:
    """The first `limit` prompts; `output_len` for lines without max_tokens. Raises ConfigError with the line.

    Tokens of text are counted as its words, until the server counts them.
    """
    samples: list[Sample] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(samples) >= limit:
                    break
                if line.strip():
                    samples.append(_sample(line, f"{path}:{number}", output_len))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return samples


def _sample(line: str, place: str, output_len: int) -> Sample:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: expected an object, got {line.strip():.60}")
    unknown = sorted(set(fields) - set(_KNOWN))
    if unknown:
        raise ConfigError(f"{place}: unknown field {', '.join(unknown)}; known: {', '.join(_KNOWN)}")
    if ("prompt" in fields) == ("messages" in fields):
        raise ConfigError(f"{place}: give 'prompt' or 'messages'")
    prompt, prompt_len = _prompt(fields, place)
    pictures = _pictures(fields, prompt_len, place)
    max_tokens, arrival_s = fields.get("max_tokens", output_len), fields.get("arrival_s")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigError(f"{place}: max_tokens is {max_tokens!r}, but must be a number from 1")
    if arrival_s is not None and (
        isinstance(arrival_s, bool) or not isinstance(arrival_s, int | float) or not 0 <= arrival_s < float("inf")
    ):
        raise ConfigError(f"{place}: arrival_s is {arrival_s!r}, but must be seconds from 0")
    prompt_len += sum(picture.tokens for picture in pictures)
    return Sample(
        prompt=prompt, prompt_len=prompt_len, output_len=max_tokens, arrival_s=arrival_s, pictures=tuple(pictures)
    )


def _pictures(fields: dict[str, Any], prompt_len: int, place: str) -> list[TracePicture]:
    given = fields.get("pictures", [])
    if not isinstance(given, list) or (given and "prompt" not in fields):
        raise ConfigError(f"{place}: pictures must be a list, beside 'prompt'")
    pictures: list[TracePicture] = []
    for number, one in enumerate(given):
        names = set(TracePicture._fields)
        if not isinstance(one, dict) or set(one) != names or not isinstance(one["id"], str) or not one["id"]:
            raise ConfigError(f"{place}: pictures[{number}] must have {', '.join(sorted(names))}, the id a text")
        least = {"at": pictures[-1].at if pictures else 0, "patches": 1, "tokens": 1}
        for name, first in least.items():
            if isinstance(one[name], bool) or not isinstance(one[name], int) or one[name] < first:
                raise ConfigError(
                    f"{place}: pictures[{number}].{name} is {one[name]!r:.40}, but must be a number from {first}"
                )
        if one["at"] > prompt_len:
            raise ConfigError(
                f"{place}: pictures[{number}].at is {one['at']}, behind the prompt of {prompt_len} tokens"
            )
        pictures.append(TracePicture(**one))
    return pictures


def _prompt(fields: dict[str, Any], place: str) -> tuple[Prompt, int]:
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
            raise ConfigError(f"{place}: messages must be a list of {{role, content}} with text")
        return tuple(messages), sum(len(m["content"].split()) for m in messages)
    prompt = fields["prompt"]
    if isinstance(prompt, str) and prompt:
        return prompt, len(prompt.split())
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i <= _LARGEST_ID for i in prompt):
        return tuple(prompt), len(prompt)
    raise ConfigError(f"{place}: prompt must be text or a list of token ids from 0 to {_LARGEST_ID}, and not empty")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
