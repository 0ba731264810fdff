"""Typed errors for everything a user can cause, and the status each one maps to.

`Status` is neutral to protocols: `serve` holds the one table that turns it into a code of gRPC or HTTP. An error that
only a bug can cause is an `assert`, not a class in this file, so that catching `UserError` never hides a defect.

Every message says what was asked, what the limit is, and what to change.
"""

import enum


class Status(enum.StrEnum):
    """The kind of an error, independent of any protocol."""

    INVALID = "invalid"  # the request itself is wrong; sending it again cannot help
    UNAUTHENTICATED = "unauthenticated"  # no credential, or one that is not known
    OVERLOADED = "overloaded"  # try again later
    UNAVAILABLE = "unavailable"  # the engine is stopping or dead
    DEADLINE = "deadline"
    INTERNAL = "internal"  # a bug of jaxserve


class JaxserveError(Exception):
    """Base of all typed errors. `status` says how a front door reports it."""

    status = Status.INTERNAL


class UserError(JaxserveError):
    """Something the user can change. A command line prints it in one line and exits with 2."""

    status = Status.INVALID


class ConfigError(UserError):
    """A config file, an override or an environment variable is unusable."""


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


class InvalidRequest(UserError):
    """A request has a value outside what this server takes."""


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


class Unauthenticated(UserError):
    """The caller gave no token, or one that this server does not know."""

    status = Status.UNAUTHENTICATED


class DeadlineExceeded(UserError):
    """A request did not end within the time that its sender gave it."""

    status = Status.DEADLINE


class EngineStopped(JaxserveError):
    """The engine is draining, stopped or has died; the message says which and why."""

    status = Status.UNAVAILABLE


class HostLost(EngineStopped):
    """A process of a service that spans several died, fell silent or gave up; the message names it and its host."""


class HostsDiverged(EngineStopped):
    """Two processes were given the same plans and computed different things; nothing since the last check is safe."""


class PlanCorrupt(EngineStopped):
    """A frame between two processes arrived damaged, or out of its order."""


class StepStalled(EngineStopped):
    """A step does not end although every process answers."""


class NotFinite(JaxserveError):
    """The model's numbers for one sequence are infinite or no numbers, so that no token follows from them."""


class MissingBucket(JaxserveError):
    """A plan needs a step shape that was not compiled at start. Nothing compiles after warm-up."""
