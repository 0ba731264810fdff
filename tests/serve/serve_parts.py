"""What the gRPC tests share: the real engine and scheduler on a fake runner that can be held, slowed and broken."""

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytest

from jaxserve.api import Request, SamplingParams
from jaxserve.client import Client, Retries
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig, TenantsConfig
from jaxserve.engine import Engine, ModelInfo, PictureReader, Reranker
from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.engine.degrading import DegradeOptions, Degrading
from jaxserve.engine.observers import StepObserver
from jaxserve.engine.step_deadlines import StepDeadlines
from jaxserve.kv.store import StoreUnavailable
from jaxserve.sched import ContinuousScheduler, InFlight, Limits, StepPlan, StepResult, create_scheduler
from jaxserve.sched.loading import Filled, SlotStore, StoreCounts, StoreKey, Written
from jaxserve.sched.plan import NO_ENCODER, NO_SLOTS, EncoderPool, HostSlots
from jaxserve.serve.handoff import HandoffSetup
from jaxserve.serve.orders import ShownSettings
from jaxserve.serve.service import Addresses, Shutdown, serve
from jaxserve.serve.weights import ChangesWeights
from jaxserve.testing import ByteTokenizer, FakeRunner, ManualClock, make_limits

WAIT_S = 120.0  # for anything that must happen: it ends a hang, and is far more than a busy machine takes
LONG_TOKENS = 20_000  # of an answer that surely runs while a test acts: on `serve_slowly` 100 s at least
LONG = SamplingParams(temperature=0.0, max_tokens=LONG_TOKENS)


class SteerableRunner:
    """Wraps a runner: `hold` stops results, `delay_s` slows them, `broken` loses the device.

    Attributes are set by the test's thread and read by the loop's.
    """

    def __init__(self, inner: FakeRunner, delay_s: float = 0.0) -> None:
        self.inner = inner
        self.delay_s = delay_s
        self.broken = False
        self.is_held = False  # a step is waiting for `release`
        self._open = threading.Event()
        self._open.set()
        self._free = 0  # steps that pass although it is held

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    def hold(self, after: int = 0) -> None:
        """No results from now on, but for those of the next `after` steps; again, while held, for more steps."""
        self._free = after
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def dispatch(self, plan: StepPlan) -> InFlight:
        return _Steered(self, self.inner.dispatch(plan))

    def wait(self) -> None:
        for _ in range(int(WAIT_S / 0.005)):
            if self._open.is_set():
                break
            if self._free > 0:
                self._free -= 1
                break
            self.is_held = True
            self._open.wait(0.005)
        else:
            raise AssertionError("the test forgot to release the runner")
        self.is_held = False
        time.sleep(self.delay_s)
        if self.broken:
            raise RuntimeError("the device is lost")


class _Steered:
    def __init__(self, runner: SteerableRunner, handle: InFlight) -> None:
        self._runner = runner
        self._handle = handle

    def result(self) -> StepResult:
        self._runner.wait()
        return self._handle.result()


class IdleStore:
    """A `SlotStore` that has nothing and takes nothing, and has counted something else.

    `flushed`: the salts of all flushes. `broken`: these fail.
    """

    counts = StoreCounts({"filled": 5, "write_skipped": 2}, 3)

    def __init__(self) -> None:
        self.flushed: list[str | None] = []
        self.broken = False

    def fill(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        return None

    def prefetch(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        return None

    def settle(self, ticket: int, num_used: int) -> None:
        raise AssertionError("nothing was prefetched")

    def cancel(self, ticket: int) -> None: ...

    def flush(self, salt: str | None) -> None:
        if self.broken:
            raise StoreUnavailable("the directory is gone; flush again")
        self.flushed.append(salt)

    def write(self, key: StoreKey, slot: int) -> bool:
        return False

    def poll(self) -> list[Filled | Written]:
        return []


class Parts:
    """An engine and what it is made of."""

    def __init__(
        self,
        *,
        mode: Literal["count", "context"] = "count",
        delay_s: float = 0.0,
        max_rows: int = 8,
        num_pages: int = 256,
        max_model_len: int = 512,
        max_waiting: int = 4096,
        max_waiting_tokens: int = 2**22,
        tokenizer: ByteTokenizer | None = None,
        forced: dict[tuple[str, int], dict[int, int]] | None = None,
        vocab_size: int = 128,
        reranker: Reranker | None = None,
        shapes: tuple[tuple[int, int], ...] = (),
        slots: HostSlots = NO_SLOTS,
        store: SlotStore | None = None,
        accept: Callable[[str, int, int, int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        degrade: DegradeOptions | None = None,
        deadline_s: float | None = None,
        page_size: int = 8,
        pictures: PictureReader | None = None,
        max_picture_bytes: int = 2**30,
        adapters: LoadedAdapters | None = None,
        policy: str = "fcfs",
    ) -> None:
        """`adapters`: of which one step can have one."""
        limits = make_limits(
            max_rows=max_rows,
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=max_model_len,
            token_buckets=(16, 64),
            shapes=shapes,
            slots=slots,
            encoder=EncoderPool(num_pages=8, page_size=8, max_patches=64) if pictures is not None else NO_ENCODER,
        )
        if adapters is not None:
            limits = dataclasses.replace(limits, adapter_slots=1)
        self.runner = SteerableRunner(
            FakeRunner(limits, vocab_size=vocab_size, mode=mode, forced=forced, keep_plans=False, accept=accept),
            delay_s,
        )
        scheduler = create_scheduler(policy, limits, store=store)
        assert isinstance(scheduler, ContinuousScheduler)
        self.scheduler = scheduler
        observers: list[StepObserver] = []
        if degrade is not None:
            observers.append(Degrading(degrade))
        if deadline_s is not None:
            observers.append(StepDeadlines(deadline_s, 1.0))
        self.engine = Engine(
            runner=self.runner,
            scheduler=scheduler,
            tokenizer=tokenizer,
            model=ModelInfo(
                name="fake",
                vocab_size=259 if tokenizer is None else tokenizer.vocab_size,
                max_model_len=max_model_len,
                eos_token_ids=(257,),
                reranker=reranker,
                drafter="ngram" if accept else "none",
                pictures=pictures,
                adapters=adapters,
            ),
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            max_picture_bytes=max_picture_bytes,
            clock=clock,
            observers=observers,
        )


class Served(Parts):
    """`Parts` behind a port. `exit_code` is there once serving has ended."""

    address: str
    http_url: str
    shutdown: Shutdown
    exit_code: int | None = None
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def release(self) -> None:
        """Lets what was held go on."""
        self.runner.release()

    def request_shutdown(self) -> None:
        """What a signal does."""
        self.loop.call_soon_threadsafe(self.shutdown.request)

    def wait_for_exit(self) -> int | None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "serving does not end"
        return self.exit_code


@contextmanager
def served(
    parts: Served,
    drain_s: float = WAIT_S,
    grpc_config: GrpcConfig = GrpcConfig(port=0),  # noqa: B008
    http_config: HttpConfig = HttpConfig(),  # noqa: B008
    admin_tokens_file: str | None = None,
    tenants: TenantsConfig = TenantsConfig(),  # noqa: B008
    handoff: HandoffSetup | None = None,
    weights: ChangesWeights | None = None,
    adapters_dir: str | None = None,
    log_refusals: bool = False,
    settings: ShownSettings | None = None,
    **serving: Any,
) -> Iterator[Served]:
    """Serves on a free port, on a thread of its own, until the block ends. `serving`: further settings of `serve`."""
    ready = threading.Event()
    config = ServeConfig(
        drain_s=drain_s,
        grpc=grpc_config,
        http=http_config,
        admin_tokens_file=admin_tokens_file,
        tenants=tenants,
        **serving,
    )

    async def main() -> int:
        parts.loop = asyncio.get_running_loop()
        parts.shutdown = Shutdown()
        return await serve(
            parts.engine,
            config,
            parts.shutdown,
            on_ready,
            handoff=handoff,
            weights=weights,
            adapters_dir=adapters_dir,
            log_refusals=log_refusals,
            settings=settings,
        )

    def on_ready(addresses: Addresses) -> None:
        parts.address = addresses.grpc or ""
        parts.http_url = f"http://{addresses.http}"
        ready.set()

    def run() -> None:
        try:
            parts.exit_code = asyncio.run(main())
        finally:
            ready.set()

    parts.thread = threading.Thread(target=run, name="test-server", daemon=True)
    parts.thread.start()
    try:
        assert ready.wait(WAIT_S), "the server does not start"
        yield parts
    finally:
        parts.release()
        with contextlib.suppress(RuntimeError):  # serving may end, and its loop close, at any moment
            parts.request_shutdown()
            parts.request_shutdown()
        parts.wait_for_exit()


def serve_bytes(**options: Any) -> Served:
    """A server for text, one id per byte; in mode "count" the text after "a" is "bcdef…"."""
    return Served(tokenizer=ByteTokenizer(), **options)


def serve_slowly(delay_s: float = 0.005, **options: Any) -> Served:
    """`serve_bytes` whose `LONG` answers last: a test has time to act in the middle of one, even if it halts."""
    return serve_bytes(delay_s=delay_s, **{"max_model_len": 2**15, "num_pages": 2**14, **options})


def stall(parts: Served, clock: ManualClock, until: Callable[[], bool]) -> None:
    """The device answers no more, and time goes by on the engine's clock, which stands still otherwise."""
    parts.runner.hold()
    wait_until(lambda: parts.runner.is_held, "the loop waits in a step")
    wait_until(lambda: clock.advance(0.5) or until(), "the watchdog has seen it")


ONE_CALL = Retries(attempts=0)  # for a client of a test in which the server's end is the point


def note_prepared(parts: Served, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that the engine prepares from now on, in order."""
    prepared: list[Request] = []
    prepare = parts.engine.prepare

    def noted(*args: Any, **kwargs: Any) -> Request:
        prepared.append(prepare(*args, **kwargs))
        return prepared[-1]

    monkeypatch.setattr(parts.engine, "prepare", noted)
    return prepared


def connect(parts: Served) -> Client:
    return Client(parts.address, retries=ONE_CALL)


def lines_told(stderr: str) -> list[str]:
    """What a server in a process wrote there, but for warnings that the machine was too busy to run its event loop."""
    return [line for line in stderr.splitlines() if not line.startswith("the event loop was held up")]


def objects_of(*kinds: type) -> list[Any]:
    """Those that the collector knows. Their types are asked, since `isinstance` asks the object of a weak proxy."""
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread does."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < WAIT_S, f"in vain: {what}"
        time.sleep(0.002)
