"""A group of replicas on fake devices that can be held and broken, and what every request was told."""

import threading
import time
from collections.abc import Callable
from typing import Any

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.engine import Engine, EngineGroup, ModelInfo, Update
from jaxserve.engine.restarting import RestartOptions
from jaxserve.engine.step_deadlines import StepDeadlines
from jaxserve.routing import RouterOptions, create_router
from jaxserve.sched import ContinuousScheduler, InFlight, Scheduler, StepPlan, StepResult, create_scheduler
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits

GREEDY = SamplingParams(
    temperature=0.0, max_tokens=5, seed=3
)  # the fake device takes the seed for a part of the prompt
LONG = SamplingParams(temperature=0.0, max_tokens=40, seed=3)
WAIT_S = 120.0


class FragileRunner(FakeRunner):
    """Raises at its next dispatch when `broken`; waits there while `held`. Its `weights` may be exchanged."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.broken = False
        self.open = threading.Event()
        self.open.set()
        self.weights: Any = "first"
        self.sleeps = False

    def use_weights(self, weights: Any) -> None:
        assert not self.sleeps
        self.weights = weights

    def sleep(self, *, keep_weights: bool) -> None:
        assert not self.sleeps
        self.sleeps = True
        self.weights = self.weights if keep_weights else None

    def wake_up(self, weights: Any | None) -> None:
        assert self.sleeps
        self.sleeps = False
        self.weights = self.weights if weights is None else weights

    def dispatch(self, plan: StepPlan) -> InFlight:
        flight, runner = super().dispatch(plan), self

        class Held:
            def result(self) -> StepResult:
                assert runner.open.wait(WAIT_S), "the test forgot to release the runner"
                if runner.broken:
                    raise RuntimeError("the device is lost")
                return flight.result()

        return Held()


class Group:
    """Engines of their own runners in one group, and what every request was told."""

    def __init__(
        self,
        count: int = 2,
        *,
        policy: str = "least_load",
        max_waiting: int = 100,
        retries: int = 2,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        rebuild: Callable[[int, Engine], Engine] | None = None,
        restarts: RestartOptions = RestartOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.runners: list[FragileRunner] = []
        self.schedulers: list[Scheduler] = []
        self._options: dict[str, Any] = {"max_waiting": max_waiting, "clock": clock}
        self._deadline_s = deadline_s
        self.deadlines: list[StepDeadlines] = []
        self.engines = [self.make_engine(number) for number in range(count)]
        router = create_router(policy, RouterOptions(slack=2))
        self.group = EngineGroup(self.engines, router, retries=retries, rebuild=rebuild, restarts=restarts, clock=clock)
        self.updates: dict[str, list[Update]] = {}

    def make_engine(self, number: int, dead: Engine | None = None) -> Engine:
        """With a runner and a scheduler of its own, in the place of `dead`."""
        runner = FragileRunner(make_limits(), vocab_size=256, mode="context")
        scheduler = create_scheduler("fcfs", runner.limits)
        self.runners[number : number + 1] = [runner]
        self.schedulers[number : number + 1] = [scheduler]
        observers = [] if self._deadline_s is None else [StepDeadlines(self._deadline_s, 1.0)]
        self.deadlines[number : number + 1] = observers
        return Engine(
            runner=runner,
            scheduler=scheduler,
            tokenizer=ByteTokenizer(),
            model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,)),
            seed=5,
            observers=observers,
            name=f"replica {number}",
            replaces=dead,
            **self._options,
        )

    def submit(self, prompt="abc", sampling: SamplingParams = GREEDY, **options) -> str:
        request = self.group.prepare(prompt, sampling, RequestOptions(**options))
        self.group.submit(request, self.updates.setdefault(request.request_id, []).append)
        return request.request_id

    def end(self, request_id: str) -> Update:
        ends = [u for u in self.updates[request_id] if u.last]
        assert len(ends) == 1, f"{request_id} was told {len(ends)} times that it ended"
        assert self.updates[request_id][-1] is ends[0]
        return ends[0]

    def texts(self, request_id: str) -> dict[int, str]:
        updates = self.updates[request_id]
        return {k: "".join(u.text for u in updates if u.index == k) for k in {u.index for u in updates}}

    def tokens(self, request_id: str) -> list[tuple[int, int]]:
        return sorted((u.index, i) for u in self.updates[request_id] for i in u.token_ids)

    def check_idle(self) -> None:
        assert self.group.num_live == self.group.num_unstarted == 0
        assert not self.group._routed
        assert [self.group._balancer.load(k) for k in range(len(self.engines))] == [0] * len(self.engines)
        for engine, scheduler in zip(self.group.replicas, self.schedulers, strict=True):
            assert isinstance(scheduler, ContinuousScheduler)
            if engine.failure is None:
                scheduler.check()
                assert scheduler.num_held_pages == 0

    def wait_until_ended(self) -> None:
        start_s = time.monotonic()
        while not all(updates and updates[-1].last for updates in self.updates.values()):
            assert time.monotonic() - start_s < WAIT_S, "requests do not end"
            time.sleep(0.002)
