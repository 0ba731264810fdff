"""The two loops around a device: `LeaderRunner`, which an engine takes for its device in process 0, and `follow`.

Process 0 runs the plans of its scheduler, the others run the plans that they are sent.
"""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxserve.errors import PlanCorrupt, StepStalled
from jaxserve.hosts.digest import StepDigest
from jaxserve.hosts.execution import Execution
from jaxserve.hosts.follower import Follower
from jaxserve.hosts.frames import Frame, Kind
from jaxserve.hosts.leader import Leader
from jaxserve.hosts.store_orders import decode_order
from jaxserve.hosts.store_part import StorePart
from jaxserve.sched import Limits, Runner, StepPlan, StepResult

logger = logging.getLogger(__name__)

_GRACE_S = 1.0  # a device may see that a peer is gone this much before the watch of heartbeats does


class LeaderRunner:
    """A `sched.base.Runner` of several processes: each plan goes to all of them, then to the device of this one.

    Never waits for the others, but for one that is hundreds of steps behind (see `Leader.broadcast`). When one is lost
    every result raises the reason at once, even while the device still waits for that process.
    """

    def __init__(
        self, runner: Runner, leader: Leader, digest: StepDigest, *, heartbeat_s: float, stall_s: float
    ) -> None:
        """`digest.observe` must see what `runner` sends to its device. `runner` belongs to this object from now on."""
        self._limits = runner.limits
        self._leader = leader
        self._stall_s = stall_s
        self._execution = Execution(runner, digest, leader.record, patience_s=heartbeat_s + _GRACE_S)
        leader.on_failure(self._execution.fail)

    @property
    def limits(self) -> Limits:
        return self._limits

    def dispatch(self, plan: StepPlan) -> "_Awaited":
        """Sends and queues the plan. Raises the failure of the service; errors of the device come later."""
        seq = self._leader.broadcast(plan.to_json().encode())
        return _Awaited(seq, self._execution.submit(seq, plan), self._stall_s)

    def in_order(self, work: Callable[[], None]) -> None:
        """Runs `work`, which must return at once, on the thread that dispatches, behind the plans so far. From any
        thread; what it raises ends the steps that are under way."""
        self._execution.call(work)

    def close(self, timeout_s: float) -> bool:
        """Ends the threads, True when they ended in time."""
        return self._execution.close(timeout_s)


class _Awaited:
    """A step that is under way. `result` may be called once."""

    __slots__ = ("_future", "_seq", "_stall_s")

    def __init__(self, seq: int, future: "Future[StepResult]", stall_s: float) -> None:
        self._seq = seq
        self._future = future
        self._stall_s = stall_s

    def result(self) -> StepResult:
        """Raises the failure of the service, or StepStalled after `hosts.stall_s`."""
        try:
            return self._future.result(self._stall_s)
        except TimeoutError:
            if self._future.done():  # the device's own
                raise
            raise StepStalled(
                f"step {self._seq} has not ended within hosts.stall_s = {self._stall_s:g} s, although every process "
                "answers: a device or a link between devices is stuck; look at the devices of all hosts"
            ) from None


def follow(
    runner: Runner,
    link: Follower,
    digest: StepDigest,
    *,
    heartbeat_s: float,
    check_every: int,
    finish_s: float,
    store: StorePart | None = None,
) -> None:
    """Runs every plan that process 0 sends, until it says that there are no more and has found all digests equal.

    `store` carries out the orders between the plans; None: there must be none.

    Reports the digest after each `check_every` steps and whenever nothing more has come. Raises HostLost, PlanCorrupt
    or what the device raised; the device may then still be waiting on a thread of its own.
    """
    newest = -1

    def report(seq: int, finished: bytes) -> None:
        if (seq + 1) % check_every == 0 or seq >= newest:
            link.report(seq, finished)

    execution = Execution(runner, digest, report, patience_s=heartbeat_s + _GRACE_S)
    link.on_failure(execution.fail)
    link.start_serving()
    for frame in link.frames():
        try:
            work = _plan_of(frame) if frame.kind is Kind.PLAN else _order_of(frame, store)
        except PlanCorrupt as error:
            link.give_up(error)
            raise
        if isinstance(work, StepPlan):
            newest = frame.seq
            future = execution.submit(frame.seq, work)
        else:
            future = execution.call(work)
        future.add_done_callback(lambda future: _tell_failure(future, link))
    if not execution.close(finish_s):
        raise StepStalled(f"the last step has not ended within {finish_s:g} s after process 0 has")
    link.wait_for_end(finish_s)


def _plan_of(frame: Frame) -> StepPlan:
    try:
        return StepPlan.from_json(frame.payload.decode())
    except (ValueError, KeyError, TypeError) as error:
        raise PlanCorrupt(f"plan {frame.seq} cannot be read: {error!r}") from error


def _order_of(frame: Frame, store: StorePart | None) -> Callable[[], None]:
    if store is None:
        raise PlanCorrupt(f"order {frame.seq} for a store arrived, and this process has none")
    return functools.partial(store.carry_out, frame.seq, decode_order(frame))


def _tell_failure(future: "Future[Any]", link: Follower) -> None:
    error = future.exception()
    if error is not None:
        link.give_up(error)
