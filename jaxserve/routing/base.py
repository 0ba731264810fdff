"""`Router`, the base class of routing policies, and the values `Load` and `RouterOptions` that a policy is given.

Requests are counted in `balancer`. A policy is given only replicas that are alive, so none can choose a dead one.
"""

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.routing.prompts import PromptKey

Replica = Hashable  # a number or an address: the same one for as long as the replica lives


class Load(NamedTuple):
    """A replica that is alive, and how many requests it has that have not ended."""

    replica: Replica
    load: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Settings of the built-in policies; the fields of `route:` in a config.

    Attributes:
      slack: prefix policy, requests that a replica may have above the least loaded and still be preferred.
      table_blocks: prefix policy, blocks of prompts remembered for each replica.
      seed: power_of_two policy.
    """

    slack: int = 8
    table_blocks: int = 65536
    seed: int = 0

    def __post_init__(self) -> None:
        if self.slack < 0:
            raise ConfigError(f"route.slack is {self.slack}, but must be 0 requests or more")
        if self.table_blocks < 1:
            raise ConfigError(f"route.table_blocks is {self.table_blocks}, but must be 1 block or more")


class Router(abc.ABC):
    """Base of all policies. Mutated by one caller at a time: its owner holds a lock, or has one thread.

    `uses_prompt` False: `choose` is given an empty key, so that prompts are not hashed in vain.
    """

    uses_prompt = False

    def __init__(self, options: RouterOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def choose(self, key: PromptKey, loads: Sequence[Load]) -> int:
        """The position in `loads` of the replica to ask. `loads` is never empty.

        The replica may still refuse; then `choose` is called again without it.
        """

    def routed(self, key: PromptKey, replica: Replica) -> None:  # noqa: B027  (a hook)
        """Called when `replica` has taken the request."""

    def forget(self, replica: Replica) -> None:  # noqa: B027  (a hook)
        """Called when `replica` has died or left: its cache is gone."""


def least_loaded(loads: Sequence[Load], first: int) -> int:
    """The position of the least load; among equals the next at or after position `first`, around the end."""
    values = [load for _, load in loads]
    least, start = min(values), first % len(values)
    return values.index(least, start) if least in values[start:] else values.index(least)
