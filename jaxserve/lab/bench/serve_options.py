"""The options of `bench serve`, and the checks of them that need no server and no file."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.lab.workloads.metrics import Goodput, check_percentiles

BACKENDS = ("openai", "openai-chat", "grpc")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The endpoint that is measured.

    Attributes:
      backend: one of `BACKENDS`.
      url: of an OpenAI server, as far as /v1; or HOST:PORT for grpc.
      model: None asks the server.
      api_key: sent as a bearer token.
      ca_file: authorities that may have signed the server's certificate; for grpc it turns TLS on.
      temperature: None leaves it to the server.
    """

    backend: str
    url: str
    model: str | None = None
    api_key: str | None = None
    ca_file: Path | None = None
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"there is no backend {self.backend!r}; there are {', '.join(BACKENDS)}")
        if self.backend == "grpc" and ("://" in self.url or not self.url):
            raise ConfigError(f"--url is {self.url!r}; for grpc it is HOST:PORT")
        if self.ca_file is not None and self.url.startswith("http://"):
            raise ConfigError(f"--ca-file is given, but {self.url} is not https://")
        if self.backend != "grpc" and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {self.url!r}; it begins with http:// or https://")
        if self.backend == "grpc" and (self.extra or self.model is not None):
            raise ConfigError("--extra-body and --model are for OpenAI servers, not for grpc")
        if self.model == "":
            raise ConfigError("--model is ''; give a name, or leave it out for the first that the server names")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature is {self.temperature}, but must be a number from 0, or nan to send none")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The form of prompts: token ids with `vocab_size`, text of a `tokenizer` directory, or words with neither."""

    tokenizer: Path | None = None
    vocab_size: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """All options of `bench serve`.

    Attributes:
      max_concurrency: requests at once; None: no limit.
      sweep_rates, sweep_concurrencies: one run for each; at most one of the two.
      warmup: requests sent before, which do not count.
      timeout_s: for one request.
    """

    endpoint: Endpoint
    dataset: DatasetOptions
    prompts: PromptOptions = dataclasses.field(default_factory=PromptOptions)
    arrivals: ArrivalOptions = dataclasses.field(default_factory=ArrivalOptions)
    max_concurrency: int | None = None
    sweep_rates: Sequence[float] = ()
    sweep_concurrencies: Sequence[int] = ()
    warmup: int = 1
    timeout_s: float = 600.0
    goodput: Goodput | None = None
    percentiles: Sequence[float] = (90, 95, 99)

    def __post_init__(self) -> None:
        if self.prompts.tokenizer is not None and self.prompts.vocab_size is not None:
            raise ConfigError("give --tokenizer for text or --vocab-size for token ids, not both")
        if self.sweep_rates and self.sweep_concurrencies:
            raise ConfigError("give --sweep-rate or --sweep-concurrency, not both")
        if self.sweep_rates and not self.arrivals.recorded:
            raise ConfigError("--sweep-rate takes the place of --rate, --ramp and --diurnal: leave them out")
        if not self.sweep_rates:
            self.arrivals.check_drawn()
        check_has_no_sessions(self.dataset)
        if self.sweep_concurrencies and self.max_concurrency is not None:
            raise ConfigError("--sweep-concurrency takes the place of --max-concurrency: leave it out")
        limits = [*self.sweep_concurrencies, *([] if self.max_concurrency is None else [self.max_concurrency])]
        if any(limit < 1 for limit in limits):
            raise ConfigError(f"a concurrency is 1 or more, got {min(limits)}")
        check_percentiles(self.percentiles)
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--timeout is {self.timeout_s}, but must be a number above 0")

    def as_json(self) -> dict[str, Any]:
        """Every option that shapes the load, as plain values."""
        prompts = self.prompts
        return {
            **self.dataset.as_json(),
            "prompts": "text"
            if prompts.tokenizer is not None
            else "ids"
            if prompts.vocab_size is not None
            else "words",
            **self.arrivals.as_json(),
            "temperature": self.endpoint.temperature,
            "ignore_eos": self.endpoint.ignore_eos,
            "extra_body": dict(self.endpoint.extra),
            "warmup": self.warmup,
            "timeout_s": self.timeout_s,
            "goodput": None if self.goodput is None else dataclasses.asdict(self.goodput),
        }


def check_has_no_sessions(dataset: DatasetOptions) -> None:
    """Raises ConfigError for conversations, which no command of `bench` supports."""
    if dataset.name == "agent":
        raise ConfigError(
            "the dataset agent is for jaxserve simulate: its prompts repeat answers, which are not known before a "
            "server has given them; prefix-repetition shares beginnings, mooncake replays recorded sessions"
        )
