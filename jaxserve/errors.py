"""Typed errors for everything a user can cause, and the status each one maps to.

`Status` is neutral to protocols: `serve` holds the one table that turns it into a code of gRPC or HTTP. An error that
only a bug can cause is an `assert`, not a class in this file, so that catching `UserError` never hides a defect.

Every message says what was asked, what the limit is, and what to change.
"""

import enum


def how_to_install(extra: str) -> str:
    """The remedy where a library of an optional part is missing. jaxserve is installed from its repository, as its
    README does: no index of packages has it under that name."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the repository of jaxserve"


class Status(enum.StrEnum):
    """The kind of an error, independent of any protocol."""

    INVALID = "invalid"  # the request itself is wrong; sending it again cannot help
    NOT_FOUND = "not_found"  # nothing of the name that the request gives is here
    UNAUTHENTICATED = "unauthenticated"  # no credential, or one that is not known
    OVERLOADED = "overloaded"  # try again later
    UNAVAILABLE = "unavailable"  # the engine is stopping or dead
    DEADLINE = "deadline"
    QUARANTINED = "quarantined"  # the request ends the servers that run it; sending it again does harm
    INTERNAL = "internal"  # a bug of jaxserve


class JaxserveError(Exception):
    """Base of all typed errors. `status` says how a front door reports it."""

    status = Status.INTERNAL


class UserError(JaxserveError):
    """Something the user can change. A command line prints it, in one line for each mistake, and exits with 2."""

    status = Status.INVALID


class ConfigError(UserError):
    """A config file, an override or an environment variable is unusable."""


class SeveralMistakes(ConfigError):
    """A config with more than one mistake: the message has a line for each."""


class PolicyError(UserError):
    """A scheduling policy broke a rule of its interface, so the engine cannot go on. Names policy, method and rule."""

    status = Status.INTERNAL  # the sender of a request is not at fault


class MissingCompiler(ConfigError):
    """The compiler for a device that is not here is not installed; the message names the package."""


class KernelsUnavailable(ConfigError):
    """The compiler of some kernels is installed, and fails; the message has its reason and the remedy."""


class HostMismatch(ConfigError):
    """Processes that run one model together were started with different versions, settings or weights."""


class CheckpointError(UserError):
    """A model directory is missing, incomplete, truncated or of an unknown kind."""


class CapacityError(UserError):
    """The configured sizes cannot fit the device. The message names the setting to change."""


class StepLogError(UserError):
    """A step log cannot be read, is damaged, or does not fit the device that replays it."""


class ForkedProcess(UserError):
    """An engine is used, or made, in a child that was forked from a process in which JAX computes."""


class InvalidRequest(UserError):
    """A request has a value outside what this server takes."""


class UnknownModel(InvalidRequest):
    """A request names a model, or a LoRA adapter, that this engine does not have."""

    status = Status.NOT_FOUND


class AdapterError(UserError):
    """The files of a LoRA adapter are incomplete, damaged, or do not fit the model or the limits of the engine."""


class AdapterMemoryFull(UserError):
    """Requests have all adapters that the memory of the host has room for, so that no other one fits now."""

    status = Status.OVERLOADED


class UnsupportedOption(InvalidRequest):
    """A sampling or request option exists elsewhere but not here, or exceeds a device slot limit."""


class PromptTooLong(InvalidRequest):
    """The prompt alone leaves no room for one generated token."""


class RequestRejected(InvalidRequest):
    """Admission refused the request because it could never run with the configured pool and rows."""


class QueueFull(UserError):
    """The waiting queue is at its limit; nothing was accepted.

    `retry_after_s`: seconds after which there may be room, an estimate; None when nothing is known.
    """

    status = Status.OVERLOADED

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MessagesFull(QueueFull):
    """The messages of all calls together have as many bytes as they may; nothing was read."""


class ChangeUnderWay(UserError):
    """The weights are being changed, or the device is being given back or taken again; one such call runs at a time."""

    status = Status.OVERLOADED


class TenantLimited(QueueFull):
    """A tenant has used up what it may; nothing was accepted.

    `limit`: which of its limits, "requests", "tokens" or "concurrent_tokens".
    """

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit


class Unauthenticated(UserError):
    """The caller gave no token, or one that this server does not know."""

    status = Status.UNAUTHENTICATED


class DeadlineExceeded(UserError):
    """A request did not end within the time that its sender gave it."""

    status = Status.DEADLINE


class RequestQuarantined(UserError):
    """The request has ended the servers that ran it, and is refused for a time. Only a router raises it."""

    status = Status.QUARANTINED


class EngineStopped(JaxserveError):
    """The engine has stopped or died; the message says which and why."""

    status = Status.UNAVAILABLE


class Draining(EngineStopped):
    """The engine is being shut down and has not failed: the request can begin, or go on, at another one at once."""


class HostLost(EngineStopped):
    """A process of a service that spans several died, fell silent or gave up; the message names it and its host."""


class HostsDiverged(EngineStopped):
    """Two processes were given the same plans and computed different things; nothing since the last check is safe."""


class PlanCorrupt(EngineStopped):
    """A frame between two processes arrived damaged, or out of its order."""


class StepStalled(EngineStopped):
    """A step does not end, so the engine was given up; of several processes, although every one answers."""


class ReplicaDown(EngineStopped):
    """A replica has died, and was built again as often as may be; it stays down until its process is restarted."""


class NotFinite(JaxserveError):
    """The model's numbers for one sequence are infinite or no numbers, so that no token follows from them."""


class MissingBucket(JaxserveError):
    """A plan needs a step shape that was not compiled at start. Nothing compiles after warm-up."""
