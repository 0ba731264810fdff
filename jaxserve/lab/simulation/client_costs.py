"""`ClientCosts`: what a client waits for beside the engine, measured, so that simulated times can be those of a client.

A simulated request begins when the scheduler gets it. Before that, a server reads the request and encodes its prompt;
afterwards it makes text and sends it. Measured are the times of a run of `jaxserve bench serve` less those that a
simulation gives the same requests, at the times at which that client sent them.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api import FinishReason, Request, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.fleet import Fleet
from jaxserve.lab.simulation.values import SimRequest, SimulatedRequest, SimulationResult

_LEAST_REQUESTS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientCosts:
    """Seconds that a client waits beside those of the simulated engine. All are delays: they take no simulated device.

    Attributes:
      first_s: of every request, before its first token.
      prompt_token_s: more of that, for each token of the prompt.
      token_s: for each later token, beside the one before it.
    """

    first_s: float
    prompt_token_s: float
    token_s: float

    def __str__(self) -> str:
        return (
            f"{1e3 * self.first_s:.2f} ms and {1e3 * self.prompt_token_s:.4f} ms for each token of the prompt before "
            f"the first token, {1e3 * self.token_s:.3f} ms for each later one"
        )

    def add_to(self, result: SimulationResult) -> SimulationResult:
        """The result as a client sees it: later tokens. Steps and `duration_s` remain those of the engine."""
        return dataclasses.replace(result, requests=tuple(map(self._delayed, result.requests)))

    def _delayed(self, request: SimulatedRequest) -> SimulatedRequest:
        if request.first_token_s is None or request.last_token_s is None:
            return request
        first_s = self.first_s + self.prompt_token_s * request.prompt_tokens
        later_s = self.token_s * (request.output_tokens - 1)
        return dataclasses.replace(
            request,
            first_token_s=request.first_token_s + first_s,
            last_token_s=request.last_token_s + first_s + later_s,
            token_times_s=tuple(t + first_s + i * self.token_s for i, t in enumerate(request.token_times_s)),
        )


class _Sent(NamedTuple):
    """An answered request as its client saw it: seconds since the load began, and from there to its outputs."""

    start_s: float
    outputs_s: Sequence[float]
    prompt_tokens: int
    output_tokens: int


def measure_client_costs(run: Path, fleet: Fleet, policy: str) -> ClientCosts:
    """The costs that explain a run of `jaxserve bench serve --json FILE --save-requests` against this server.

    Medians over the requests, so that a few that met a pause of the machine change nothing; the part for each token of
    a prompt is the median of the slopes between two requests. Where a client's tokens come no later than the simulated
    ones, a part is 0.

    Args:
      run: its file; of a sweep the first run counts.
      fleet: the simulated server, fitted to a step log of the one that was measured.
      policy: the one that it served with.

    Raises ConfigError for a file without the times of 20 answered requests, or of another form.
    """
    sent = _read(run)
    trace = [_request(number, one) for number, one in enumerate(sent)]
    found = fleet.run(policy, trace, keep_token_times=False)
    simulated = found if isinstance(found, SimulationResult) else found.total
    by_number = {int(request.request_id): request for request in simulated.requests}
    lengths: list[float] = []
    first_s: list[float] = []
    gaps_s: list[float] = []
    for number, one in enumerate(sent):
        request = by_number[number]
        if request.finish_reason is FinishReason.ERROR or request.first_token_s is None or request.last_token_s is None:
            raise ConfigError(f"{run}: the simulated server refuses request {number}: {request.error}")
        lengths.append(one.prompt_tokens)
        first_s.append(one.outputs_s[0] - (request.first_token_s - request.arrival_s))
        if one.output_tokens > 1:
            measured_s = one.outputs_s[-1] - one.outputs_s[0]
            simulated_s = request.last_token_s - request.first_token_s
            gaps_s.append((measured_s - simulated_s) / (one.output_tokens - 1))
    slope_s = max(0.0, _median_slope(np.array(lengths), np.array(first_s)))
    rest_s = [value - slope_s * length for value, length in zip(first_s, lengths, strict=True)]
    return ClientCosts(
        first_s=max(0.0, statistics.median(rest_s)),
        prompt_token_s=slope_s,
        token_s=max(0.0, statistics.median(gaps_s)) if gaps_s else 0.0,
    )


def _median_slope(x: np.ndarray, y: np.ndarray) -> float:
    """Of all pairs with different x (Theil and Sen); 0 where there is none."""
    rows, columns = np.triu_indices(len(x), 1)
    differ = x[rows] != x[columns]
    rows, columns = rows[differ], columns[differ]
    return float(np.median((y[rows] - y[columns]) / (x[rows] - x[columns]))) if len(rows) else 0.0


def _read(path: Path) -> list[_Sent]:
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--client-costs {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--client-costs {path} is not JSON: {error}") from error
    try:
        sent = [
            _Sent(
                float(raw["start"]),
                [float(time_s) for time_s in raw["outputs"]],
                int(raw["input_tokens"]),
                len(raw["outputs"]) if raw["output_tokens"] is None else int(raw["output_tokens"]),
            )
            for raw in tree["runs"][0]["requests"]
            if raw["failure"] is None
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--client-costs {path} has no times of single requests; write it with jaxserve bench serve --json FILE "
            "--save-requests"
        ) from error
    if len(sent) < _LEAST_REQUESTS:
        raise ConfigError(
            f"--client-costs {path} has {len(sent)} answered requests; medians need {_LEAST_REQUESTS}: measure with a "
            "larger --num-prompts"
        )
    return sorted(sent)


def _request(number: int, sent: _Sent) -> SimRequest:
    """As the client sent it. Its tokens are its own, so that no prefix cache finds them."""
    begin = 1 + number * (1 << 20)
    request = Request(
        request_id=str(number),
        prompt_token_ids=tuple(itertools.islice(itertools.count(begin), sent.prompt_tokens)),
        sampling=SamplingParams(max_tokens=sent.output_tokens),
        max_tokens=sent.output_tokens,
        seed=0,
        stop_token_ids=frozenset(),
        arrival_s=sent.start_s,
    )
    return SimRequest(request=request, arrival_s=sent.start_s, output_len=sent.output_tokens)
