"""How late the event loop of a server is while megabytes of text arrive: its tokenizer is the demo model's.

    python scripts/bench_event_loop.py --prompts 5

Prints the median and the 99th percentile in ms, and those of a process that only sleeps beside it: what a busy machine
adds is not the server's. The device is a fake one; the clients are in a process of their own.
"""

import argparse
import asyncio
import dataclasses
import statistics
import subprocess
import sys
import time

from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.engine import Engine, ModelInfo
from jaxserve.models import resolve_model_path
from jaxserve.sched import InFlight, Limits, StepPlan, StepResult, create_scheduler
from jaxserve.serve.service import Addresses, Shutdown, serve
from jaxserve.testing import FakeRunner, make_limits
from jaxserve.text import load_tokenizer

PATIENCE_S = 600.0
STEP_S = 0.005

CROWD = """
import asyncio, sys
from jaxserve.api import SamplingParams
from jaxserve.client import AsyncClient, RequestFailed

async def main(address, num_prompts):
    prompt = " ".join(f"The fox number {k} lives near a river." for k in range(30_000))[: 2**20]
    sampling = SamplingParams(max_tokens=400, temperature=0.0)
    async with AsyncClient(address) as streaming, AsyncClient(address) as huge:
        streams = [asyncio.ensure_future(streaming.complete([k + 1], sampling)) for k in range(8)]
        for k in range(num_prompts):
            try:
                await huge.complete(prompt + str(k), sampling)
            except RequestFailed as error:
                assert "tokens; a sequence holds 512" in str(error), error
        assert len(await huge.tokenize(prompt)) > 100_000
        for stream in streams:
            assert (await stream).num_generated_tokens == 400

asyncio.run(asyncio.wait_for(main(sys.argv[1], int(sys.argv[2])), float(sys.argv[3])))
"""


IDLE = """
import statistics, sys, threading, time
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
lags_ms = [0.0, 0.0]
while not ended.is_set():
    start_s = time.perf_counter()
    time.sleep(0.001)
    lags_ms.append((time.perf_counter() - start_s - 0.001) * 1000)
print(statistics.quantiles(lags_ms, n=100)[98])
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlowRunner:
    """A fake device whose steps take `STEP_S`."""

    inner: FakeRunner

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        return SlowStep(self.inner.dispatch(plan))


class SlowStep:
    def __init__(self, inner: InFlight) -> None:
        self._inner = inner

    def result(self) -> StepResult:
        time.sleep(STEP_S)
        return self._inner.result()


def make_engine() -> Engine:
    limits = make_limits(max_rows=8, num_pages=1024, page_size=8, max_model_len=512, token_buckets=(16, 64))
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    return Engine(
        runner=SlowRunner(inner=FakeRunner(limits, vocab_size=128, keep_plans=False)),
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=tokenizer,
        model=ModelInfo(name="fake", vocab_size=tokenizer.vocab_size, max_model_len=512, eos_token_ids=(257,)),
    )


async def measure(num_prompts: int) -> tuple[list[float], float]:
    """Lags of the loop in ms, and the 99th percentile of the process beside it."""
    lags_ms: list[float] = []
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    config = ServeConfig(grpc=GrpcConfig(port=0, max_message_bytes=2**22), http=HttpConfig())
    shutdown = Shutdown()
    serving = asyncio.create_task(serve(make_engine(), config, shutdown, ready.set_result))
    address = (await ready).grpc

    async def look() -> None:
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(0.001)
            lags_ms.append((time.perf_counter() - start_s - 0.001) * 1000)

    looking = asyncio.create_task(look())
    idle = subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    command = [sys.executable, "-c", CROWD, str(address), str(num_prompts), str(PATIENCE_S)]
    crowd = await asyncio.create_subprocess_exec(*command)
    code = await crowd.wait()
    looking.cancel()
    out, _ = await asyncio.to_thread(idle.communicate, b"")
    shutdown.request()
    await serving
    if code != 0:
        raise SystemExit(f"the clients failed with exit code {code}")
    return lags_ms, float(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=5, help="of a megabyte each, one after the other")
    lags_ms, machine_ms = asyncio.run(measure(parser.parse_args().prompts))
    p50_ms, p99_ms = statistics.median(lags_ms), statistics.quantiles(lags_ms, n=100)[98]
    print(f"lag of {len(lags_ms)} looks: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms; beside it p99 {machine_ms:.2f} ms")


if __name__ == "__main__":
    main()
