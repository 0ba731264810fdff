"""`Part`, `Shape` and `Sample`: requests, as values between datasets, prompts and clients.

A shape has no tokens yet, because the same dataset is sent as token ids to one endpoint and as text to another.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

Prompt = tuple[int, ...] | str | tuple[Mapping[str, str], ...]  # token ids, text or chat messages


class Part(NamedTuple):
    """A stretch of a prompt. Parts of the same key have the same tokens, up to the shorter one's length.

    `answer` says that it repeats what an engine answered to the shape of that `answer_key`.
    """

    key: int
    length: int  # tokens
    answer: bool = False


class TracePicture(NamedTuple):
    """A picture of a request that is only simulated: it has no pixels.

    Attributes:
      id: equal for equal pictures.
      at: tokens of the text before it.
      patches, tokens: of it.
    """

    id: str
    at: int
    patches: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A request without its tokens.

    Attributes:
      arrival_s: seconds after the start; None where the dataset says nothing about time.
      session: number of the conversation that this is a turn of; None: of none.
      answer_key: of the parts of later prompts that repeat its answer; None: none does.
    """

    parts: tuple[Part, ...]
    output_len: int
    arrival_s: float | None = None
    session: int | None = None
    answer_key: int | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, all parts together."""
        return sum(part.length for part in self.parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request ready to be sent.

    Attributes:
      prompt_len: tokens as counted here, those of pictures too; the server's count takes its place.
      output_len: tokens to ask for.
      arrival_s: seconds after the first request of its trace.
      pictures: in the order of `at`.
    """

    prompt: Prompt
    prompt_len: int
    output_len: int
    arrival_s: float | None = None
    pictures: tuple[TracePicture, ...] = ()
