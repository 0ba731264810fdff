"""A device that is a clock, and the engine and the clients around it: what `bench_host.py` and `bench_growth.py` run.

The device's time line is known exactly. Loads and their clients are here; the two scripts measure.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.api import Request, RequestOptions, SamplingParams
from jaxserve.engine import AsyncEngine, Engine, ModelInfo, Update
from jaxserve.engine.interpreter import Interpreter
from jaxserve.runtime import pack as packing
from jaxserve.runtime.row_state import NUM_ROW_FIELDS
from jaxserve.sched import Bucket, Limits, SchedulerOptions, StepPlan, StepResult, create_scheduler
from jaxserve.sched.plan import Drafted
from jaxserve.sched.speculate import SpeculationOptions
from jaxserve.text import Tokenizer

PAGE_SIZE = 16
PROMPT_LEN = 200
WARM_STEPS = 50
TEXT = (
    "Once upon a time there was a little engine that wanted to be quick. It looked at the clock, it counted the "
    "tokens, and it wondered where the time had gone. One day a friend came by and said: do less. So it did less, "
    "and the big machine behind it never had to wait again. The end of the day was warm and bright. "
)


class ClockDevice:
    """A `Runner` that packs each step and lets it take a fixed time. Mutated by the loop's thread.

    Attributes:
      idle_s, is_decode: of each step, in order: how long the device had waited for it, and its kind.
      begun_s: when the first step of each began; `host_s` between the results of two steps.
    """

    def __init__(self, limits: Limits, token_ids: Sequence[int], step_s: float) -> None:
        self.limits = limits
        self.idle_s: list[float] = []
        self.is_decode: list[bool] = []
        self.slept_s = 0.0
        self._ids = np.asarray(token_ids)
        self._step_s = step_s
        self._free_s = 0.0
        self._layouts = {
            bucket: packing.Layout.of(
                bucket,
                max_rows=limits.max_rows,
                num_params=NUM_ROW_FIELDS,
                page_size=limits.page_size,
                num_groups=len(limits.page_groups),
            )
            for bucket in limits.buckets
        }
        self._row_params = np.zeros((limits.max_rows + 1, NUM_ROW_FIELDS), np.int32)

    def dispatch(self, plan: StepPlan) -> "_ClockFlight":
        bucket = self.limits.bucket_of(plan)
        assert bucket is not None, plan.step_id
        layout = self._layouts[bucket]
        grants, _ = packing.split_grants(plan.grants, layout.max_grants, layout.max_rows)
        packing.pack(plan, layout, self._row_params, np.zeros((len(self._row_params), packing.NUM_STOPS)), {}, grants)
        now_s = time.perf_counter()
        begin_s = max(now_s, self._free_s)
        self.idle_s.append(begin_s - self._free_s)
        self.is_decode.append(plan.decode_only)
        # A step with prompts takes longer, as on a real device: about a token's worth of compute for each.
        self._free_s = begin_s + self._step_s * (1.0 if plan.decode_only else 1.0 + plan.num_tokens / 1024)
        return _ClockFlight(self, plan, self._free_s)

    def draw(self, plan: StepPlan) -> StepResult:
        """Tokens by step, row and place. Of the drafts of a row all, none or some are right, by step and row."""
        rows = np.asarray(plan.sampled_rows)
        if not plan.row_tokens:
            return StepResult(token_ids=self._ids[(plan.step_id + 97 * rows) % len(self._ids)].tolist())
        counts = np.minimum(1 + (plan.step_id + rows) % plan.width, plan.row_tokens)
        which = np.repeat(plan.step_id + 97 * rows, counts) + np.concatenate([np.arange(n) for n in counts])
        return StepResult(
            token_ids=self._ids[which % len(self._ids)].tolist(),
            counts=counts.tolist(),
            drafts=[[Drafted(plan.width - 1, int(n) - 1)] for n in counts],
        )


class _ClockFlight:
    def __init__(self, device: ClockDevice, plan: StepPlan, ready_s: float) -> None:
        self._device, self._plan, self._ready_s = device, plan, ready_s

    def result(self) -> StepResult:
        begin_s = time.perf_counter()
        while (left_s := self._ready_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        self._device.slept_s += time.perf_counter() - begin_s
        return self._device.draw(self._plan)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load."""

    rows: int
    device_ms: float
    clients: str
    churn: bool
    steps: int
    read_us: float = 0.0
    width: int = 1  # tokens that a row feeds in a step

    @property
    def name(self) -> str:
        more = ", churn" * self.churn + f", width {self.width}" * (self.width > 1)
        reading = f" {self.read_us:g} us" if self.read_us and self.clients == "streams" else ""
        return f"{self.rows} rows, {self.device_ms:g} ms, {self.clients}{reading}{more}"


def make_limits(rows: int, max_len: int, width: int) -> Limits:
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < rows] + [rows]
    decode = [Bucket(size * wide, size, True, wide) for wide in sorted({1, width}) for size in sizes]
    mixed = [Bucket(tokens, min(rows, tokens), False) for tokens in (256, 512, 1024, 2048)]
    return Limits(
        max_rows=rows,
        num_pages=rows * (max_len // PAGE_SIZE + 2),
        page_size=PAGE_SIZE,
        max_model_len=max_len,
        buckets=tuple(sorted([*decode, *mixed])),
    )


class Clients:
    """Sends requests and reads what comes. `num_read` counts characters, so that nothing can be left out."""

    def __init__(self, engine: Engine, case: Case, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.engine = engine
        self.num_read = 0
        self._case = case
        self._max_tokens = max_tokens
        self._rng = np.random.default_rng(0)
        self._vocab_size = tokenizer.vocab_size
        self._stopping = False
        self._numbers = iter(range(1 << 30))

    def start(self) -> None:
        """Sends one request for each row."""
        if self._case.clients == "none":
            for _ in range(self._case.rows):
                self._send()
            return
        self._thread = threading.Thread(target=lambda: asyncio.run(self._stream_all()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sends no more, and lets what runs be aborted by the engine's end."""
        self._stopping = True

    def join(self) -> None:
        """Waits for the readers."""
        if self._case.clients != "none":
            self._thread.join()

    def _request(self) -> Request:
        number = next(self._numbers)
        # With churn lives are spread, so that in the long run a request ends every few steps.
        tokens = 32 + int(self._rng.integers(480)) if self._case.churn else self._max_tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompt = self._rng.integers(3, self._vocab_size, PROMPT_LEN).tolist()
        return self.engine.prepare(prompt, sampling, RequestOptions(request_id=f"r{number}"))

    def _send(self) -> None:
        self.engine.submit(self._request(), self._take)

    def _take(self, update: Update) -> None:
        self.num_read += len(update.text)
        if update.last and self._case.churn and not self._stopping:
            self._send()

    async def _stream_all(self) -> None:
        streams = AsyncEngine(self.engine)
        await asyncio.gather(*(self._read(streams) for _ in range(self._case.rows)))
        streams.close()

    async def _read(self, streams: AsyncEngine) -> None:
        while not self._stopping:
            async for update in streams.stream(self._request()):
                self.num_read += len(update.text)
                end_s = time.perf_counter() + self._case.read_us / 1e6
                while self._case.read_us and time.perf_counter() < end_s:
                    pass
            if not self._case.churn:
                return


def make_engine(case: Case, tokenizer: Tokenizer) -> tuple[Engine, ClockDevice, int]:
    max_tokens = (case.steps + WARM_STEPS + 400) * case.width
    limits = make_limits(case.rows, PROMPT_LEN + max_tokens + 32, case.width)
    options = SchedulerOptions(speculation=SpeculationOptions(width=case.width, rounds=1, adaptive=False))
    device = ClockDevice(limits, tokenizer.encode(TEXT, add_special_tokens=False), case.device_ms / 1e3)
    engine = Engine(
        runner=device,
        scheduler=create_scheduler("fcfs", limits, options=options),
        tokenizer=tokenizer,
        model=ModelInfo(
            name="clock", vocab_size=tokenizer.vocab_size, max_model_len=limits.max_model_len, eos_token_ids=()
        ),
        observers=[Interpreter()],
    )
    return engine, device, max_tokens
