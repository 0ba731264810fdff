"""How evenly a simulated server treats its tenants: Jain's index, and the service of each over time."""

import collections
import statistics
from collections.abc import Iterator, Sequence

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.values import SimulatedRequest


def jain_index(values: Sequence[float]) -> float:
    """Jain, Chiu and Hawe, 1984: 1 where all are equal, 1/n where one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fairness(requests: Sequence[SimulatedRequest]) -> float | None:
    """Jain's index over tenants of the mean time for each output token, arrival to end; None with fewer than two."""
    by_tenant: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for request in requests:
        if request.last_token_s is not None and request.output_tokens:
            by_tenant[request.tenant].append((request.last_token_s - request.arrival_s) / request.output_tokens)
    means = [statistics.fmean(values) for values in by_tenant.values()]
    return jain_index(means) if len(means) > 1 else None


def service_over_time(
    requests: Sequence[SimulatedRequest], window_s: float, input_weight: float = 1.0, output_weight: float = 2.0
) -> dict[str, list[float]]:
    """Service of each tenant in windows of `window_s` seconds from 0 on, all lists of one length.

    Service is that of the Virtual Token Counter (Sheng et al., OSDI 2024): `input_weight` for each token of a prompt
    that was computed, here when the first token is there, and `output_weight` for each generated token, with the
    paper's weights unless given.

    Raises ConfigError for windows of no length, and where the times of tokens were not kept.
    """
    if not window_s > 0:
        raise ConfigError(f"window_s is {window_s}, but must be more than 0 seconds")
    if any(request.output_tokens and not request.token_times_s for request in requests):
        raise ConfigError("service over time needs the times of tokens: simulate with keep_token_times=True")
    last_s = max((request.last_token_s or 0.0 for request in requests), default=0.0)
    service = {name: [0.0] * (int(last_s / window_s) + 1) for name in sorted({r.tenant for r in requests})}
    for request in requests:
        for time_s, amount in _served(request, input_weight, output_weight):
            service[request.tenant][int(time_s / window_s)] += amount
    return service


def _served(request: SimulatedRequest, input_weight: float, output_weight: float) -> Iterator[tuple[float, float]]:
    """Times and amounts."""
    if request.first_token_s is not None:
        yield request.first_token_s, input_weight * (request.prompt_tokens - request.cached_tokens)
    for time_s in request.token_times_s:
        yield time_s, output_weight
