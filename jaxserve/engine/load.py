"""`Load` and `Pending`: how much an engine has to do, and what is about to come."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias


class Load(NamedTuple):
    """The load of an engine, roughly: its loop goes on while this is read.

    Attributes:
      num_running: requests with their first token.
      num_waiting: sequences without one; a request asks for n of them.
      num_waiting_tokens: of the prompts of these sequences; a prompt counts for each of them.
      max_waiting, max_waiting_tokens: above these, requests are refused, but for those of owners that have few.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    max_waiting: int
    max_waiting_tokens: int


Pending: TypeAlias = Mapping[str, int]  # sequences that are about to be submitted, by owner
NOTHING_PENDING: Pending = MappingProxyType({})
