"""`Op`, the record of an operation, and the choice of its implementation, once, at start.

An `Op` is a record of all that is known of one operation: its implementations, which of them is preferred on which
backend, what they refuse, its named cases, and how to tell whether an implementation is right. Choosing, refusing,
checking and listing work from the record alone (`ops` has those of this package), so that another op is another record.

Nothing falls back later: a try/except around each call hides which kernel a figure was measured with. The
implementation that the log names is the one that runs.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from jaxserve.errors import ConfigError
from jaxserve.values.registry import Registry

logger = logging.getLogger(__name__)

ENTRY_POINTS = "jaxserve.kernels"  # under which other packages offer implementations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The facts about the hardware that an implementation may use.

    Attributes:
      backend: 'cpu', 'gpu' or 'tpu'.
      kind: JAX's `device_kind`, e.g. 'NVIDIA H200' or 'TPU v5 lite'; it names the tuned table.
      compute_capability: of NVIDIA GPUs, e.g. (9, 0).
    """

    backend: str
    kind: str
    compute_capability: tuple[int, int] | None = None


class Implementation(Protocol):
    """What every op's implementations have, whatever else theirs do.

    `refuses(use)` says why it cannot run a use, with the limit and the remedy, or None. `prepare(use)` makes ready what
    executables of that use call by name.
    """

    @property
    def name(self) -> str: ...
    @property
    def refuses(self) -> Callable[[Any], str | None]: ...
    @property
    def prepare(self) -> Callable[[Any], object]: ...


I = TypeVar("I", bound=Implementation)  # noqa: E741
U = TypeVar("U")  # a use: what is known of the calls before anything is compiled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op(Generic[I, U]):
    """One operation.

    Attributes:
      name: and the setting that names an implementation, `kernels.<name>`.
      kind: the type of its implementations.
      implementations: by name, a value for any device or a function that makes one for the device at hand.
      preferred: what 'auto' tries on each backend, in that order; it takes the first that does not refuse.
      reference: the implementation that refuses nothing, runs everywhere and is taken for right: XLA's.
      validate: raises ConfigError for a use that no implementation can have.
      describe: a use in words.
      cases: named batches of real models, for tests and benchmarks.
      case_of: a small case that shows whether a use is computed right.
      error: how far an implementation is from float64 over a case, relative; infinity for NaN.
      limit: the largest such error that rounding explains.
      slower: why 'auto' should pass an implementation over on this machine, by known or measured rates, or None.
    """

    name: str
    kind: type[I]
    implementations: Registry[I | Callable[[Device], I]]
    preferred: Mapping[str, Sequence[str]]
    reference: str = "xla"
    validate: Callable[[U], None] = lambda use: None
    describe: Callable[[U], str]
    cases: Mapping[str, Any]
    case_of: Callable[[U], Any]
    error: Callable[[I, Any], float]
    limit: Callable[[I, U], float]
    slower: Callable[[I, U], str | None] = lambda implementation, use: None

    def resolve(
        self,
        *,
        device: Device,
        uses: Sequence[U] = (),
        choice: str | I = "auto",
        passed_over: Mapping[str, str] = MappingProxyType({}),
    ) -> I:
        """The implementation that runs on `device`.

        `choice` is 'auto', a known name, 'package.module:NAME', or the implementation itself. `uses` are what it will
        be asked for, checked here. `passed_over`: names that 'auto' must not take, with the reasons.

        Raises ConfigError when the backend or the name is unknown, or the implementation named cannot run a use, or
        when 'auto' finds none.
        """
        if device.backend not in self.preferred:
            raise ConfigError(f"no kernels for backend {device.backend!r}; known: {', '.join(self.preferred)}")
        for use in uses:
            self.validate(use)
        if isinstance(choice, str) and choice == "auto":
            return self._best(device, uses, passed_over)
        found = self.make(choice, device)
        if refusals := _refusals(found, uses):
            raise ConfigError(
                f"kernels.{self.name} names {found.name!r}, which cannot run this model: {'; '.join(refusals)}"
            )
        logger.info("%s on %s: %r, since kernels.%s names it", self.name, device.kind, found.name, self.name)
        return found

    def make(self, choice: str | I | Callable[[Device], I], device: Device) -> I:
        """The implementation of that name, or of that maker, for a device. Raises ConfigError where there is none."""
        found = self.implementations.get(choice)
        made = found if isinstance(found, self.kind) or not callable(found) else found(device)
        if not isinstance(made, self.kind):
            raise ConfigError(
                f"{choice!r} is a {type(found).__name__}, but {self.name} needs a {self.kind.__name__} value or a maker"
            )
        return made

    def _best(self, device: Device, uses: Sequence[U], passed_over: Mapping[str, str]) -> I:
        reasons = []
        for name in self.preferred[device.backend]:
            if name in passed_over:
                reasons.append(f"{name!r} is passed over ({passed_over[name]})")
                continue
            found = self.make(name, device)
            refusals = _refusals(found, uses)
            if refusals:
                reasons.append(f"{name!r} cannot run this model ({'; '.join(refusals)})")
            else:
                reason = "; ".join(reasons) or f"it is the one made for {device.backend}"
                logger.info("%s on %s: %r, since %s", self.name, device.kind, name, reason)
                return found
        wanted = " and ".join(dict.fromkeys(map(self.describe, uses))) or "any use"
        raise ConfigError(f"no implementation of {self.name} runs {wanted} on {device.kind}: {'; '.join(reasons)}")

    def check(self, implementation: I, use: U, device: Device) -> float:
        """The relative error over a small batch on JAX's default device.

        Raises ConfigError where it is more than rounding explains. A kernel is proven for a device, a driver and a
        version of the compiler, and all three change under a server; wrong attention is not a crash, but fluent
        nonsense.
        """
        error, limit = self.error(implementation, self.case_of(use)), self.limit(implementation, use)
        if error > limit:
            raise ConfigError(
                f"the {self.name} implementation {implementation.name!r} is wrong on {device.kind}: it is off by "
                f"{error:.2g} of the right result, where rounding explains {limit:.2g}; set kernels.{self.name}: "
                f"{self.reference}, which is slower and right, and report this with the versions of jax and the driver"
            )
        return error


def _refusals(implementation: Implementation, uses: Sequence[Any]) -> list[str]:
    found = (implementation.refuses(use) for use in uses)
    return list(dict.fromkeys(reason for reason in found if reason is not None))
