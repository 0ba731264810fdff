"""Values that the two sides exchange, and their JSON: requests, answers, and the settings of an engine.

Only the standard library is imported, because both sides read this file, one of them in an environment without
jaxserve.
"""

import dataclasses
from typing import Any

AS_PUBLISHED = "as published"  # the codes of a file, and what the engine does with them by default


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: greedy, to its full length whatever tokens come.

    Attributes:
      prompt: token ids.
      num_tokens: to generate.
      due_s: seconds after the start of the run before which the engine must not know of it.
    """

    prompt: tuple[int, ...]
    num_tokens: int
    due_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an `Ask`.

    Attributes:
      tokens: the generated ids.
      times_s: for each of them, seconds after the start of the run at which the engine's caller could have it.
    """

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is set up; the same for all but for what they cannot share.

    Attributes:
      model: directory with config.json, and model.safetensors unless `random_weights`; or a published GGUF file.
      random_weights: the engine makes weights of its own on the device.
      dtype: "float32", "bfloat16", of llama.cpp "q8_0", or `AS_PUBLISHED`.
      device: "cpu" or "gpu".
      threads: of a CPU.
      max_len: tokens of the longest request, prompt and output.
      max_requests: that are ever asked at once.
      kv_bytes: for keys and values on a CPU.
      memory_share: of a GPU, for all this engine needs.
      overrides: further settings by name, for engines that take some.
    """

    model: str
    random_weights: bool
    dtype: str
    device: str
    threads: int
    max_len: int
    max_requests: int
    kv_bytes: int
    memory_share: float
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)


def asks_to_json(asks: list[Ask]) -> list[list[Any]]:
    return [[list(ask.prompt), ask.num_tokens, ask.due_s] for ask in asks]


def asks_from_json(found: list[list[Any]]) -> list[Ask]:
    return [Ask(prompt=tuple(prompt), num_tokens=count, due_s=due_s) for prompt, count, due_s in found]


def answers_to_json(answers: list[Answer]) -> list[list[Any]]:
    return [[list(answer.tokens), list(answer.times_s)] for answer in answers]


def answers_from_json(found: list[list[Any]]) -> list[Answer]:
    return [Answer(tokens=tuple(tokens), times_s=tuple(times_s)) for tokens, times_s in found]
