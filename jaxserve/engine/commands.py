"""The commands that other threads put into the loop's inbox; `engine` carries them out."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.api import Request
from jaxserve.engine.outputs import Sink
from jaxserve.errors import JaxserveError
from jaxserve.sched.base import Runner, Scheduler


class Submit(NamedTuple):
    request: Request
    sink: Sink
    submitted_s: float


class Abort(NamedTuple):
    """Of many at once: thousands of commands would hold the loop up, most of them for nothing."""

    request_ids: tuple[str, ...]
    request: Request | None  # None: any request that has one of the ids


class Wake(NamedTuple):
    """Makes the loop look at its flags."""


class Call(NamedTuple):
    """Work with the scheduler between two steps, unless `done` is cancelled before."""

    work: Callable[[Scheduler], Any]
    done: concurrent.futures.Future[Any]

    def carry_out(self, scheduler: Scheduler) -> None:
        """A typed error is the caller's. After any other the scheduler's state is unknown, so it is raised as well."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work(scheduler))
        except JaxserveError as error:
            self.done.set_exception(error)
        except BaseException as error:
            self.done.set_exception(error)
            raise

    def refuse(self, error: JaxserveError) -> None:
        """The loop has ended before its turn."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class Change(NamedTuple):
    """Work with the device and the scheduler while no step is in flight, such as to give it other weights.

    Attributes:
      work: called on the loop's thread. A typed error is the caller's, and says that all is as it was; any other one
        ends the loop.
      after_running: only when all sequences have ended that run; requests that come meanwhile wait for it.
      version: of the weights from then on; None: they stay.
      done: gets the seconds for which the loop launched no step, from the first that it could have launched on.
    """

    work: Callable[[Runner, Scheduler], None]
    after_running: bool
    version: str | None
    done: concurrent.futures.Future[float]

    def refuse(self, error: JaxserveError) -> None:
        """The loop has ended before its turn."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class Interrupt(NamedTuple):
    error: BaseException


Command = Submit | Abort | Wake | Call | Change | Interrupt
