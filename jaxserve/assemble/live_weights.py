"""`LiveWeights`: other weights for an engine that runs, and its device given back for a while. For every door.

New weights are made beside the old ones, on the thread of the caller: read, checked, cut over the devices, brought into
the form of the steps. So what does not fit changes nothing, and the loop stops only for the exchange of arrays, once no
step is in flight. Nothing is compiled for the steps, and the copies of arrays once. Both sets of weights are in memory
at that moment.

Methods wait for the loops: they are for threads that may wait, or drive the loops themselves. One runs at a time.
"""

import concurrent.futures
import contextlib
import dataclasses
import enum
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxserve.assemble.device import Device, WeightSource
from jaxserve.engine import AnyEngine, Engine
from jaxserve.engine.refusals import reason_of
from jaxserve.errors import CapacityError, ChangeUnderWay, EngineStopped, InvalidRequest
from jaxserve.runtime.runner import is_full
from jaxserve.sched.base import Operable, Releasable, Renewable, Runner, Scheduler

Work = Callable[[Runner, Scheduler], None]
Wait = Callable[[Sequence["concurrent.futures.Future[float]"]], None]

_THEN = ", then weights "


def wait_for(changes: Sequence["concurrent.futures.Future[float]"]) -> None:
    """For engines whose loops have threads of their own."""
    concurrent.futures.wait(changes)


class _Made(NamedTuple):
    """Other weights for a replica, and what its pages are named by from then on: the directory that they are from, so
    that engines with the same weights find each other's pages, or this update alone."""

    weights: Any
    namespace: str


def _name_of(device: Device, source: WeightSource, version: str) -> str:
    if device.namespace_of is not None and not isinstance(source, Mapping):
        return device.namespace_of(os.fspath(source))
    # A version may come again, with other arrays.
    return f"{device.namespace.split(_THEN)[0]}{_THEN}{version!r} of update {uuid.uuid4().hex}"


class Policy(enum.StrEnum):
    """What becomes of sequences that run when the weights change.

    Attributes:
      FINISH: they end on the old weights; requests that come after the call wait until they have.
      RECOMPUTE: they go on with the tokens that they have, whose keys and values the new weights compute anew.
      KEEP: they go on with the keys and values that they have; no other sequence ever finds these.
    """

    FINISH = "finish"
    RECOMPUTE = "recompute"
    KEEP = "keep"


class LiveWeights:
    """Used by any thread but those of the loops. A call that meets another one raises ChangeUnderWay.

    Attributes:
      version: of the weights, as the last update named them; empty: those of the start.
    """

    def __init__(self, engine: AnyEngine, devices: list[Device]) -> None:
        """`devices`: of the replicas; one that is built again has another in its place."""
        self.version = ""
        self._engine = engine
        self._devices = devices
        self._weights_kept = False  # on the host, while it sleeps
        self._changing = threading.Lock()
        self._released = False

    @property
    def asleep(self) -> bool:
        """The device of a replica has been given back, or will be. One that is built again meanwhile is awake."""
        return any(replica.asleep and replica.failure is None for replica in self._engine.replicas)

    def update(self, source: WeightSource, version: str, policy: str, wait: Wait = wait_for) -> float:
        """Gives every replica other weights. Returns the longest pause of a loop, in seconds.

        Args:
          source: arrays by the names of `jaxserve.models.load_trainable`, in the checkpoint's sizes, which stay the
            caller's; or a directory with a checkpoint of the same shapes.
          version: a name for answers to tell; not that of the weights before.
          policy: of sequences that run, see `Policy`.
          wait: returns when all of these are done; the default is for loops on threads of their own.

        Raises InvalidRequest, CheckpointError or ConfigError for what does not fit, and CapacityError when the device
        has no room for both sets of weights: nothing has changed then; and EngineStopped when a replica dies meanwhile:
        the others have the weights, and the same call gives them to it.
        """
        with self._alone():
            return self._update(source, version, policy, wait)

    def _update(self, source: WeightSource, version: str, policy: str, wait: Wait) -> float:
        if self.asleep:
            raise InvalidRequest("the engine sleeps; give the weights to `wake_up`")
        known = [one.value for one in Policy]
        if policy not in known:
            raise InvalidRequest(f"policy is {policy!r}; there are {', '.join(known)}")
        self._check_version(version)
        recompute = policy == Policy.RECOMPUTE
        replicas, made = self._engine.replicas, self._make(source, version)
        works = [(replicas[number], self._use(number, made[number], recompute)) for number in made]
        pause_s = self._change(works, wait, after_running=policy == Policy.FINISH, version=version)
        self.version = version
        return pause_s

    def _use(self, number: int, made: _Made, recompute: bool) -> Work:
        def work(runner: Runner, scheduler: Scheduler) -> None:
            assert isinstance(runner, Renewable) and isinstance(scheduler, Operable)
            runner.use_weights(made.weights)
            self._begin_anew(number, scheduler, made.namespace, recompute)

        return work

    def sleep(self, wait: Wait = wait_for, *, keep_weights: bool) -> None:
        """Gives back the device's memory once the running requests have ended; new ones are refused from now on.

        `keep_weights`: they go to the host's memory, for `wake_up`. Raises InvalidRequest when it sleeps already; and
        EngineStopped when a replica dies meanwhile: the others sleep, and the same call gives back that of the new one.
        """
        with self._alone():
            self._sleep(wait, keep_weights=keep_weights)

    def _sleep(self, wait: Wait, *, keep_weights: bool) -> None:
        self._check_renewable()
        awake = [(number, replica) for number, replica in enumerate(self._engine.replicas) if not replica.asleep]
        if not awake:
            raise InvalidRequest("the engine sleeps already; wake it up")
        self._weights_kept = keep_weights and (self._weights_kept or not self.asleep)
        for _, replica in awake:
            replica.set_asleep(True)

        def fall_asleep(number: int) -> Work:
            def work(runner: Runner, scheduler: Scheduler) -> None:
                assert isinstance(runner, Renewable) and isinstance(scheduler, Operable)
                # The same name: pages in a store are those of these weights still, and may be needed again.
                scheduler.begin_anew(self._devices[number].namespace, recompute=False)
                runner.sleep(keep_weights=keep_weights)

            return work

        works = [(replica, fall_asleep(number)) for number, replica in awake]
        self._change(works, wait, after_running=True, version=None)

    def wake_up(self, source: WeightSource | None, version: str, wait: Wait = wait_for) -> None:
        """Takes the device again, with an empty cache.

        `source` and `version` as in `update`; None and empty: the weights that were kept. Raises InvalidRequest when
        there are none or it does not sleep, and as `update`; what sleeps sleeps on then. Of the replicas that are
        awake, such as one that was built again meanwhile, each gets these weights, too. Once one replica has them, the
        others wake up with weights that are given alone: those that were kept are of another version.
        """
        with self._alone():
            self._wake_up(source, version, wait)

    def _wake_up(self, source: WeightSource | None, version: str, wait: Wait) -> None:
        if not self.asleep:
            raise InvalidRequest("the engine does not sleep")
        if source is None and version:
            raise InvalidRequest(
                f"version is {version!r}, but no weights are given: those that were kept have theirs; leave one out"
            )
        if source is None and not self._weights_kept:
            raise InvalidRequest(
                "the weights were dropped, or another replica has others by now; give `wake_up` others, with a version"
            )
        self._check_renewable()
        if source is not None:
            self._check_version(version)
        made = {} if source is None else self._make(source, version)

        def rise(number: int, replica: Engine) -> Work:
            def work(runner: Runner, scheduler: Scheduler) -> None:
                assert isinstance(runner, Renewable) and isinstance(scheduler, Operable)
                if source is None:
                    runner.wake_up(None)
                else:
                    runner.wake_up(made[number].weights)
                    self._begin_anew(number, scheduler, made[number].namespace, recompute=False)
                    self._weights_kept = False
                replica.set_asleep(False)

            return work

        works: list[tuple[Engine, Work]] = []
        for number, replica in enumerate(self._engine.replicas):
            if replica.asleep:
                works.append((replica, rise(number, replica)))
            elif source is not None:  # it was built again while the others slept
                works.append((replica, self._use(number, made[number], recompute=True)))
        self._change(works, wait, after_running=False, version=version or None)
        self.version = version or self.version

    def release(self) -> None:
        """Gives back the memory of engines that were stopped, for good: what can be asked of this object, too. Again:
        does nothing."""
        with self._changing:
            if self._released:
                return
            self._released = True
            for device in self._devices:
                if isinstance(device.runner, Releasable):
                    device.runner.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise ChangeUnderWay(
                "the weights are being changed, or the engine falls asleep or wakes up; call again when that has ended"
            )
        try:
            if self._released:
                raise EngineStopped("the engine was stopped, and its memory given back; start another one")
            yield
        finally:
            self._changing.release()

    def _make(self, source: WeightSource, version: str) -> dict[int, _Made]:
        """The weights of each replica. Whatever is wrong with them is found here."""
        self._check_renewable()
        if not isinstance(source, Mapping | str | os.PathLike):
            raise InvalidRequest(
                f"weights are a dictionary of arrays or the directory of a checkpoint, got {type(source).__name__}"
            )
        namespace: str | None = None
        made: dict[int, _Made] = {}
        for number, device in enumerate(self._devices):
            if device.new_weights is None:
                continue
            try:
                weights = device.new_weights(source)
            except jax.errors.JaxRuntimeError as error:
                if not is_full(error):
                    raise
                raise self._no_room(error) from error
            # Of a directory once it is known to be a checkpoint that fits.
            namespace = namespace or _name_of(device, source, version)
            made[number] = _Made(weights, namespace)
        return made

    def _no_room(self, error: Exception) -> CapacityError:
        what, remedy = "the weights that it has", "`sleep(keep_weights=False)` and `wake_up` need room for one set"
        if self.asleep:
            what, remedy = "what else it holds, and the engine sleeps on", "free memory of the device"
        return CapacityError(
            f"the device has no room for new weights beside {what}; {remedy}, or start with fewer pages "
            f"(cache.num_pages, cache.memory_fraction): {error}"
        )

    def _begin_anew(self, number: int, scheduler: Operable, namespace: str, recompute: bool) -> None:
        """On the replica's loop, at the step from which it computes under this name."""
        self._devices[number] = dataclasses.replace(self._devices[number], namespace=namespace)
        scheduler.begin_anew(namespace, recompute=recompute)

    def _check_version(self, version: str) -> None:
        if not isinstance(version, str) or not version or version == self.version:
            raise InvalidRequest(
                f"version is {version!r}, and that of the weights before {self.version!r}; give another text: answers "
                "say which weights drew their tokens"
            )

    def _check_renewable(self) -> None:
        for replica, device in zip(self._engine.replicas, self._devices, strict=True):
            if replica.failure is not None:
                raise EngineStopped(f"a replica has died: {reason_of(replica.failure)}")
            if device.new_weights is None:
                raise InvalidRequest(
                    "this engine keeps the weights that it has: it is one of several processes, its model takes "
                    "pictures, or its device is not jaxserve's own"
                )
            if not replica.is_operable:
                raise InvalidRequest(
                    "this engine keeps the weights that it has: its scheduler is none of jaxserve's, and could not "
                    "forget the pages of other weights (see `jaxserve.sched.base.Operable`)"
                )

    @staticmethod
    def _change(works: Sequence[tuple[Engine, Work]], wait: Wait, *, after_running: bool, version: str | None) -> float:
        """Each of these replicas does its own; the longest pause of a loop in seconds."""
        done: list[concurrent.futures.Future[float]] = []
        stopped: EngineStopped | None = None
        for replica, work in works:
            try:
                done.append(replica.change(work, after_running=after_running, version=version))
            except EngineStopped as error:  # it has died since it was looked at, and the others go on
                stopped = error
        wait(done)
        if stopped is not None:
            raise stopped
        return max(one.result() for one in done)
