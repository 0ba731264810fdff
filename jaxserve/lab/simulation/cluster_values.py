"""Values of a simulated cluster: the events that can happen to it, the rule of scaling by load, and the result."""

import dataclasses
import math

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.values import CostModel, SimulatedStep, SimulationResult
from jaxserve.sched.plan import Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a replica runs on. `limits` may have other rows, pages and buckets than those of its neighbours."""

    cost_model: CostModel
    limits: Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A replica dies at `at_s`, with its cache and all its requests, and is back, empty, at `back_s`."""

    at_s: float
    replica: int
    back_s: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Every step that a replica plans between `at_s` and `until_s` takes `factor` times as long."""

    at_s: float
    replica: int
    factor: float
    until_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ConfigError(f"replica {self.replica} is to be {self.factor} times as slow; give more than 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTo:
    """From `at_s` on there are `replicas`. Fewer: the surplus ends what it has and takes nothing new."""

    at_s: float
    replicas: int

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"a cluster of {self.replicas} replicas was asked for; it needs 1 or more")


Event = Failure | Slowdown | ScaleTo


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Autoscale:
    """Scaling by load: as many replicas as have `target` requests each, within bounds.

    Attributes:
      target: requests that have not ended, a replica.
      interval_s: between two checks.
      start_up_s: from the decision to a replica that answers, with an empty cache: its cold start, which is paid for.
      down_after_s: it shrinks to the most replicas that were wanted in this many last seconds.
    """

    target: float
    min_replicas: int
    max_replicas: int
    interval_s: float = 10.0
    start_up_s: float = 60.0
    down_after_s: float = 120.0

    def __post_init__(self) -> None:
        more, least = (self.target, self.interval_s), (self.start_up_s, self.down_after_s)
        if not (all(0 < value < math.inf for value in more) and all(0 <= value < math.inf for value in least)):
            raise ConfigError(f"{self}: target and interval_s are numbers above 0, the other times from 0")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(f"{self}: there must be 1 replica at least, and max_replicas no less than min_replicas")

    @classmethod
    def parse(cls, text: str) -> "Autoscale":
        """From 'MIN:MAX:LOAD' or 'MIN:MAX:LOAD:SECONDS', the seconds of a start. Raises ConfigError."""
        parts = text.split(":")
        try:
            least, most, target, *more = parts
            start_up = {"start_up_s": float(*more)} if more else {}
            return cls(min_replicas=int(least), max_replicas=int(most), target=float(target), **start_up)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"--autoscale {text!r}: write MIN:MAX:LOAD or MIN:MAX:LOAD:SECONDS, as 1:8:20:90"
            ) from error

    def wanted(self, num_requests: int) -> int:
        """Replicas for that many requests."""
        return max(self.min_replicas, math.ceil(min(self.max_replicas, num_requests / self.target)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Prompts are computed on some replicas, and answered on the others (docs/apart.md).

    Attributes:
      prefill: replicas that compute prompts, the first ones.
      above: prompts of more tokens are computed there; the others where they are answered.
      bandwidth: bytes a second of the link by which such a replica sends pages, one prompt after the other.
      latency_s: from the end of a prompt until its first page arrives: two calls, and the wait for slots.
      token_bytes: of the keys and values of a token.
      wait_s: from the end of a prompt until its pages are waited for no longer; what has not come is computed.
    """

    prefill: int
    above: int = 512
    bandwidth: float = 0.5e9
    latency_s: float = 0.005
    token_bytes: float
    wait_s: float = 1.0

    def __post_init__(self) -> None:
        more, least = (self.bandwidth, self.token_bytes, self.wait_s), (self.prefill - 1, self.above, self.latency_s)
        if not (all(0 < value < math.inf for value in more) and all(0 <= value < math.inf for value in least)):
            raise ConfigError(
                f"{self}: prefill is 1 or more, bandwidth, token_bytes and wait_s are numbers above 0, the rest from 0"
            )

    @property
    def token_s(self) -> float:
        """Seconds of a token on the link."""
        return self.token_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSummary:
    """One life of a replica; one that came back after a failure has two.

    Attributes:
      asked_s: when it was decided on; earlier than `started_s` by its cold start.
      started_s, ended_s: when it could take requests first, and when it died, had drained, or the run ended.
      requests: number that ended on it.
      steps: in order; empty unless kept.
    """

    number: int
    asked_s: float
    started_s: float
    ended_s: float
    requests: int
    num_steps: int
    device_s: float
    steps: tuple[SimulatedStep, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """A whole run of a cluster.

    Attributes:
      total: all requests, and the sums over replicas; its `steps` are empty: those of a replica are in `replicas`.
      sizes: (virtual seconds, replicas that take requests), whenever that changed.
      replica_s: seconds from `asked_s` to `ended_s`, summed over replicas: the cost, cold starts included.
    """

    total: SimulationResult
    replicas: tuple[ReplicaSummary, ...]
    sizes: tuple[tuple[float, int], ...]
    replica_s: float
