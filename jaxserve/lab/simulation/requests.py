"""From workloads to simulated requests: token ids, owners, tenants and priorities are added to lengths and times.

Ids belong to no vocabulary: in a simulation it only matters whether tokens are equal, so they are runs of integers
whose first one follows from the key of a part, a hundred times cheaper than drawing them. A trace is made anew each
time that it is iterated, one request at a time: every policy gets the same one, and a million requests need no room.
"""

import dataclasses
import hashlib
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxserve.api import Request, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.arriving import Chains
from jaxserve.lab.simulation.simulate import SimRequest
from jaxserve.lab.workloads.arrivals import ArrivalOptions, time_shapes
from jaxserve.lab.workloads.custom import read_custom
from jaxserve.lab.workloads.datasets import DatasetOptions, check_dataset, iter_shapes
from jaxserve.lab.workloads.samples import Part, Prompt, Sample, Shape
from jaxserve.lab.workloads.sessions import SessionOptions
from jaxserve.values.content import Picture, PlacedPicture

# An odd number near 2**32 over the golden ratio: keys below 2**32 get beginnings that are distinct and far apart.
_SPREAD = 2_654_435_769
_ID_BITS = 0xFFFF_FFFF
_STOP_ID = 2**39  # above all ids of prompts
_PLACEHOLDER = -1  # below them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of clients beside their prompts.

    Attributes:
      max_tokens: limit of every request; shorter outputs stop by themselves. None: the limit of each request is
        the length that it will generate, so that policies know every length.
      tenants: names tenant-0, tenant-1, …; the requests of a session have the same.
      tenant_skew: tenant k sends a share in proportion to 1 / (k + 1) ** skew; 0: equal shares.
      owner_weights: a weight for each of the owners owner-0, owner-1, …, between whom the policy `fair` shares tokens
        first; drawn beside the tenant, and those of a session have the same. Empty: requests have no owner.
      owner_skew: as `tenant_skew`, of owners.
      priorities: levels 0, 1, …, drawn evenly.
      deadline_s: seconds after its arrival at which a request ends, finished or not.
      clients: a closed loop of so many clients, each of which sends its next request when its last one has ended. None:
        an open loop, whose requests arrive at their times.
      client_think_s: seconds between the two, mean of an exponential distribution.
      turns_wait: turns of the dataset `agent` arrive when the answer before them has come and the user has thought.
        False: at the times that follow from an assumed pace of answers.
    """

    max_tokens: int | None = None
    tenants: int = 1
    tenant_skew: float = 1.0
    owner_weights: Sequence[float] = ()
    owner_skew: float = 1.0
    priorities: int = 1
    deadline_s: float = math.inf
    clients: int | None = None
    client_think_s: float = 0.0
    turns_wait: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "tenants", "priorities", "clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, but must be 1 or more")
        for name in ("tenant_skew", "owner_skew"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}, but must be 0 or more")
        for weight in self.owner_weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"owner_weights has {weight}, but a weight must be a number above 0")
        if not 0 <= self.client_think_s < math.inf or (self.client_think_s and self.clients is None):
            raise ConfigError(f"client_think_s is {self.client_think_s}; give 0 or more, and the number of clients")
        if not self.deadline_s > 0:
            raise ConfigError(f"deadline_s is {self.deadline_s}, but must be more than 0")

    def as_json(self) -> dict[str, Any]:
        """Every option as a plain value; no deadline is None."""
        return dataclasses.asdict(self) | {"deadline_s": None if self.deadline_s == math.inf else self.deadline_s}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A workload that `simulate` takes; iterating again gives equal requests. The seed is that of the dataset.

    Raises ConfigError where it is made for options that cannot be, and while it is iterated for files that cannot.
    """

    dataset: DatasetOptions
    arrivals: ArrivalOptions = dataclasses.field(default_factory=ArrivalOptions)
    clients: ClientOptions = dataclasses.field(default_factory=ClientOptions)

    def __post_init__(self) -> None:
        check_dataset(self.dataset)
        self.arrivals.check_drawn()
        if self.dataset.name == "agent" and not self.arrivals.recorded:
            raise ConfigError(
                "the turns of the dataset agent follow each other: leave out --rate, --ramp and --diurnal; "
                "--session-rate says how many sessions begin in a second"
            )

        if self.clients.clients is not None and (self.dataset.name == "agent" or not self.arrivals.recorded):
            raise ConfigError(
                "clients in a closed loop send when they have their answers: leave out --rate, --ramp and --diurnal, "
                "and take another dataset than agent, whose sessions wait with --turns-wait"
            )
        if self.clients.turns_wait and self.dataset.name != "agent":
            raise ConfigError(
                f"turns_wait is for the dataset agent, and {self.dataset.name} has no turns; leave it out"
            )

    def load(self) -> "Trace | Chains":
        """For `simulate`: chains where requests wait for answers, else the trace itself. Raises as iterating."""
        clients = self.clients
        if clients.clients is None and not clients.turns_wait:
            return self
        chains: dict[int, list[SimRequest]] = {}
        if clients.clients is not None:
            rng = np.random.default_rng((self.dataset.seed, 2))
            for number, request in enumerate(self):
                chain = chains.setdefault(number % clients.clients, [])
                chain.append(_wait(request, float(rng.exponential(clients.client_think_s)) if chain else 0.0))
        else:
            free_s: dict[int, float] = {}  # by session: the assumed end of its last answer
            for shape, request in zip(self._shapes()[0], self, strict=True):
                assert shape.session is not None, "the dataset agent has sessions"
                wait_s = request.arrival_s - free_s.get(shape.session, 0.0)
                chains.setdefault(shape.session, []).append(_wait(request, max(0.0, wait_s)))
                free_s[shape.session] = request.arrival_s + request.output_len / SessionOptions().output_pace
        return Chains(chains=tuple(map(tuple, chains.values())))

    def __iter__(self) -> Iterator[SimRequest]:
        shapes, samples = self._shapes()
        return sim_requests(shapes, self.clients, self.dataset.seed, samples)

    def _shapes(self) -> tuple[Iterable[Shape], Iterable[Sample | None]]:
        """Shapes with times, and the samples whose prompts take the place of their ids."""
        dataset = self.dataset
        if dataset.name == "custom":
            assert dataset.path is not None, "checked before"
            samples = read_custom(dataset.path, dataset.output_len, dataset.num_prompts)
            shapes: Iterable[Shape] = (_as_shape(number, sample) for number, sample in enumerate(samples))
            given: Iterable[Sample | None] = samples
            count = len(samples)
        else:
            shapes, given = iter_shapes(dataset), itertools.repeat(None)
            count = None if dataset.path is not None else dataset.num_prompts  # a file may have fewer
        return time_shapes(shapes, self.arrivals, dataset.seed, count), given


def _wait(request: SimRequest, wait_s: float) -> SimRequest:
    """The request with a wait for its arrival, as `Chains` take it."""
    asked = request.request
    deadline_s = asked.deadline_s - asked.arrival_s + wait_s
    moved = dataclasses.replace(asked, arrival_s=wait_s, deadline_s=deadline_s)
    return dataclasses.replace(request, request=moved, arrival_s=wait_s)


def sim_requests(
    shapes: Iterable[Shape],
    clients: ClientOptions = ClientOptions(),
    seed: int = 0,
    samples: Iterable[Sample | None] = itertools.repeat(None),
) -> Iterator[SimRequest]:
    """The requests of shapes that have times. A sample that is not None has the prompt that takes the place of the ids
    of its shape, and the pictures in it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=None, detokenize=False)  # checked once, for all
    rng = np.random.default_rng((seed, 1))
    edges, weights = _edges(clients.tenants, clients.tenant_skew), clients.owner_weights
    owner_edges = _edges(max(1, len(weights)), clients.owner_skew)
    for number, (shape, sample) in enumerate(zip(shapes, samples, strict=False)):
        assert shape.arrival_s is not None, "time_shapes gives each its time"
        drawing = rng if shape.session is None else np.random.default_rng((seed, shape.session))
        tenant, owner = _draw(edges, drawing), _draw(owner_edges, drawing)
        max_tokens = shape.output_len if clients.max_tokens is None else clients.max_tokens
        token_ids, pictures = (spell(shape.parts), ()) if sample is None else _prompt_of(sample)
        request = Request(
            request_id=str(number),
            prompt_token_ids=token_ids,
            pictures=pictures,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=0,
            stop_token_ids=frozenset((_STOP_ID,)) if max_tokens > shape.output_len else frozenset(),
            arrival_s=shape.arrival_s,
            priority=int(rng.integers(clients.priorities)) if clients.priorities > 1 else 0,
            tenant=f"tenant-{tenant}" if clients.tenants > 1 else "",
            owner=f"owner-{owner}" if weights else "",
            owner_weight=weights[owner] if weights else 1.0,
            deadline_s=shape.arrival_s + clients.deadline_s,
        )
        yield SimRequest(
            request=request,
            arrival_s=shape.arrival_s,
            output_len=shape.output_len,
            output_token_id=None if shape.answer_key is None else _first_id(shape.answer_key),
        )


def _edges(count: int, skew: float) -> np.ndarray:
    """Where the shares of so many names end, between 0 and 1."""
    shares = np.arange(1, count + 1) ** -skew
    return np.cumsum(shares / shares.sum())


def _draw(edges: np.ndarray, rng: np.random.Generator) -> int:
    """The number of a name. Nothing is drawn where there is only one."""
    return min(int(np.searchsorted(edges, rng.random())), len(edges) - 1) if len(edges) > 1 else 0


def spell(parts: Sequence[Part]) -> tuple[int, ...]:
    """Token ids: equal for equal keys, as far as the shorter part goes. An answer is one id over and over."""
    ids: list[int] = []
    for part in parts:
        first = _first_id(part.key)
        ids.extend([first] * part.length if part.answer else range(first, first + part.length))
    return tuple(ids)


def _first_id(key: int) -> int:
    return key * _SPREAD & _ID_BITS


def _as_shape(number: int, sample: Sample) -> Shape:
    parts = (Part(number, sample.prompt_len),)
    return Shape(parts=parts, output_len=sample.output_len, arrival_s=sample.arrival_s)


def _prompt_of(sample: Sample) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
    """Ids with a placeholder for each token of a picture, and the pictures, which have no pixels."""
    text, ids, placed, done = _ids_of(sample.prompt), [], [], 0
    for one in sample.pictures:
        ids += text[done : one.at]
        done = one.at
        digest = hashlib.sha256(one.id.encode()).digest()
        picture = Picture(digest=digest, grid=(1, 1, one.patches), num_tokens=one.tokens, pixels=b"")
        placed.append(PlacedPicture(picture, len(ids)))
        ids += [_PLACEHOLDER] * one.tokens
    return (*ids, *text[done:]), tuple(placed)


def _ids_of(prompt: Prompt) -> tuple[int, ...]:
    """Ids as they are; of text one for each word, so that equal beginnings of text stay equal."""
    if isinstance(prompt, str):
        return tuple(zlib.crc32(word.encode()) for word in prompt.split()) or (0,)
    ids: list[int] = []
    for piece in prompt:
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids.extend(zlib.crc32(word.encode()) for word in (piece["role"], *piece["content"].split()))
    return tuple(ids)
