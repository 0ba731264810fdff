"""The statistics against what clients saw: every definition by hand, then by an oracle on crowds of requests."""

import gc
import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from jaxserve.api import FinishReason, RequestOptions, SamplingParams
from jaxserve.engine import Engine, EngineGroup, ModelInfo, Update
from jaxserve.engine.histogram import SECONDS, Histogram
from jaxserve.engine.stats import KEPT_REQUESTS, KEPT_STEPS, EngineStats
from jaxserve.routing import RouterOptions, create_router
from jaxserve.sched import InFlight, SchedulerOptions, StepPlan, StepResult, create_scheduler
from jaxserve.sched.plan import Drafted
from jaxserve.testing import ByteTokenizer, FakeRunner, ManualClock, make_limits


class TimedRunner:
    """Time passes while a result is waited for, and then only: the k-th takes `seconds[k]`, or the last of them."""

    def __init__(self, inner: FakeRunner, clock: ManualClock, seconds: list[float]) -> None:
        self.limits = inner.limits
        self.clock = clock
        self._inner = inner
        self._seconds = list(seconds)

    def dispatch(self, plan: StepPlan) -> InFlight:
        return _Timed(self, self._inner.dispatch(plan))

    def wait(self) -> None:
        self.clock.advance(self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0])


class _Timed:
    def __init__(self, runner: TimedRunner, handle: InFlight) -> None:
        self._runner = runner
        self._handle = handle

    def result(self) -> StepResult:
        self._runner.wait()
        return self._handle.result()


class Parts:
    """An engine on a clock, and when each sequence's tokens reached its client."""

    def __init__(
        self,
        seconds: list[float],
        *,
        prefix_caching: bool = True,
        accept: Callable[[str, int, int, int], int] | None = None,
        **limits,
    ) -> None:
        self.clock = ManualClock(100.0)
        inner = FakeRunner(make_limits(**limits), vocab_size=259, accept=accept)
        self.runner = TimedRunner(inner, self.clock, seconds)
        # Admission that never looks ahead, so that a small pool preempts.
        options = SchedulerOptions(prefix_caching=prefix_caching, watermark=0.0, growth=0.0)
        self.scheduler = create_scheduler("fcfs", self.runner.limits, options=options, clock=self.clock)
        self.engine = Engine(
            runner=self.runner,
            scheduler=self.scheduler,
            tokenizer=ByteTokenizer(),
            model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,)),
            clock=self.clock,
        )
        self.stats = self.engine.stats[0]
        self.arrivals: dict[str, float] = {}
        self.times: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}
        self.drafts: dict[tuple[str, int], Drafted | None] = {}

    def submit(self, prompt: str, **sampling) -> str:
        request = self.engine.prepare(prompt, SamplingParams(temperature=0.0, **sampling))
        self.arrivals[request.request_id] = self.clock()
        self.engine.submit(request, self._see)
        return request.request_id

    def _see(self, update: Update) -> None:
        self.times[update.request_id, update.index] += [self.clock()] * len(update.token_ids)
        if update.finish_reason is not None:
            self.drafts[update.request_id, update.index] = update.drafts
        if update.last:
            assert update.finish_reason is not None
            self.reasons[update.request_id] = update.finish_reason


def test_definitions_by_hand() -> None:
    parts = Parts([1.0, 0.25, 0.5])
    parts.submit("ab", max_tokens=3)
    parts.clock.advance(2.0)  # it waits in the inbox
    parts.engine.run_until_idle()
    (request,) = parts.stats.requests()
    assert (request.queue_s, request.ttft_s, request.tpot_s, request.e2e_s) == (2.0, 3.0, 0.375, 3.75)
    assert (request.prompt_tokens, request.new_tokens, request.cached_tokens) == (3, 3, 0)  # with the begin token
    assert request.finish_reason is FinishReason.LENGTH
    steps = parts.stats.steps()
    assert [(s.decode_rows, s.chunks, s.prefill_tokens, s.new_tokens) for s in steps] == [
        (0, 1, 3, 1),
        (1, 0, 0, 1),
        (1, 0, 0, 1),
    ]
    assert [s.itl_s for s in steps] == [0.0, 0.25, 0.5]
    assert [s.wait_s for s in steps] == [1.0, 0.25, 0.5]
    assert [s.slots for s in steps] == [8, 1, 1]  # the smallest mixed bucket, then that of one row
    totals = parts.stats.totals()
    assert (totals.computed_tokens, totals.slots, totals.prompt_tokens, totals.new_tokens) == (5, 10, 3, 3)
    assert totals.part_s["wait"] == 1.75
    assert totals.ended[FinishReason.LENGTH] == 1
    assert totals.histograms["itl"].total == 0.75
    assert totals.histograms["prefill"].total == 1.0
    assert totals.histograms["queue"].total == 2.0


def test_drafts_by_hand() -> None:
    """Of three drafts the first two are right. The prompt's step draws `c`, the next `def`. The one after it is planned
    before that is known, so that it has room for one token, `g`; and `h` is left for the last."""
    parts = Parts([1.0], accept=lambda request_id, index, position, count: min(2, count), shapes=((4, 1),))
    request_id = parts.submit("ab", max_tokens=6)
    parts.engine.run_until_idle()
    assert [(s.width, s.decode_rows, s.drafted, s.accepted, s.new_tokens) for s in parts.stats.steps()] == [
        (1, 0, 0, 0, 1),
        (4, 1, 3, 2, 3),
        (1, 1, 0, 0, 1),
        (1, 1, 0, 0, 1),
    ]
    totals = parts.stats.totals()
    assert totals.drafts == (1, 3, 2, (1, 1, 1), (1, 1, 0))
    assert (totals.decode_rows, totals.decode_tokens) == (3, 5)
    (request,) = parts.stats.requests()
    assert (request.drafted_tokens, request.accepted_tokens, request.new_tokens) == (3, 2, 6)
    assert parts.drafts == {(request_id, 0): Drafted(3, 2)}


@pytest.mark.parametrize(
    ("stop", "accepted", "delivered"),
    [("d", 1, 2), ("e", 2, 3), ("f", 3, 4), ("g", 3, 5), ("h", 4, 6), ("c", 0, 1)],
)
def test_drafts_behind_the_end_of_an_answer_are_no_part_of_it(stop: str, accepted: int, delivered: int) -> None:
    """All drafts are right: the first wide step draws `defg`, of which `g` is no draft, and the next `hijk`."""
    parts = Parts([1.0], accept=lambda request_id, index, position, count: count, shapes=((4, 1),))
    request_id = parts.submit("ab", max_tokens=30, stop=[stop])
    parts.engine.run_until_idle()
    (request,) = parts.stats.requests()
    assert (request.new_tokens, request.accepted_tokens) == (delivered, accepted)
    found = parts.drafts[request_id, 0]
    assert found is None if stop == "c" else found is not None and found.accepted == accepted < found.drafted + 1


def test_drafts_are_counted_for_the_request_that_has_the_row() -> None:
    rng = random.Random(3)
    parts = Parts(
        [1.0], accept=lambda *draft: rng.randint(0, draft[-1]), max_rows=4, num_pages=10, shapes=((2, 1), (4, 2))
    )
    names = [parts.submit("abcde"[: 1 + i % 5], max_tokens=3 + i % 20, n=1 + i % 2) for i in range(30)]
    parts.engine.run_until_idle()
    totals, requests = parts.stats.totals(), {r.request_id: r for r in parts.stats.requests()}
    assert parts.scheduler.num_preemptions > 3 and totals.drafts.accepted > 50
    assert sum(s.drafted for s in parts.stats.steps()) == totals.drafts.drafted
    assert sum(s.accepted for s in parts.stats.steps()) == totals.drafts.accepted == sum(totals.drafts.drawn)
    assert sum(r.drafted_tokens for r in requests.values()) <= totals.drafts.drafted
    for i, name in enumerate(names):
        found = [parts.drafts[name, index] or Drafted(0, 0) for index in range(1 + i % 2)]
        assert sum(one.accepted for one in found) == requests[name].accepted_tokens < requests[name].new_tokens
        assert sum(one.drafted for one in found) == requests[name].drafted_tokens
    parts = Parts([1.0])
    name = parts.submit("ab", max_tokens=6)
    parts.engine.run_until_idle()
    assert parts.drafts == {(name, 0): None}, "a server without drafts says nothing of them"


def test_several_tokens_of_a_step_come_together() -> None:
    parts = Parts([1.0, 0.25, 0.5], shapes=((1, 4),))
    parts.submit("ab", max_tokens=8)
    parts.engine.run_until_idle()
    steps = parts.stats.steps()
    assert [(s.decode_rows, s.slots, s.new_tokens, s.itl_s) for s in steps] == [
        (0, 8, 1, 0.0),
        (1, 4, 4, 0.25),
        (1, 4, 3, 0.5),
    ]
    totals = parts.stats.totals()
    assert (totals.steps, totals.computed_tokens, totals.slots, totals.new_tokens) == (3, 3 + 2, 8 + 4 + 4, 8)
    itl = totals.histograms["itl"]
    assert (itl.total, sum(itl.counts), itl.counts[0]) == (0.75, 7, 5)


def test_a_row_that_sits_out_a_step_has_the_longer_gap() -> None:
    """Without chunks, a long prompt makes the decoding rows wait: their next gap is two steps long."""
    parts = Parts([1.0], token_buckets=(8,), max_rows=4)
    first = parts.submit("a", max_tokens=6)
    parts.engine.step()
    parts.engine.step()
    parts.submit("b", max_tokens=6)
    parts.engine.run_until_idle()
    itl = parts.stats.totals().histograms["itl"]
    gaps = [b - a for times in parts.times.values() for a, b in itertools.pairwise(times)]
    assert itl.num_values == len(gaps) == 10
    assert itl.total == pytest.approx(sum(gaps))
    assert len(parts.times[first, 0]) == 6


@pytest.mark.parametrize("seed", range(6))
def test_sums_equal_what_clients_saw(seed: int) -> None:
    """Stop strings, n > 1, aborts, a pool so small that rows are taken away, prefixes that hit."""
    rng = random.Random(seed)
    parts = Parts([rng.uniform(0.01, 0.2) for _ in range(40)] + [0.03], num_pages=14, max_rows=4, max_model_len=48)
    ids = []
    for i in range(30):
        sampling = {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 1, 1, 3]), "ignore_eos": True}
        if i % 3 == 0:
            sampling["stop"] = ["de", "xy"]
        ids.append(parts.submit("hello abc"[: rng.randint(1, 9)] * rng.randint(1, 2), **sampling))
        for _ in range(rng.randint(0, 4)):
            parts.engine.step()
        if i % 7 == 6:
            parts.engine.abort(rng.choice(ids))
    parts.engine.run_until_idle()
    totals, times = parts.stats.totals(), [t for t in parts.times.values() if t]
    histograms = totals.histograms
    assert totals.new_tokens == sum(map(len, times))
    assert histograms["itl"].num_values == sum(len(t) - 1 for t in times)
    assert histograms["itl"].total == pytest.approx(sum(t[-1] - t[0] for t in times))
    firsts = {}
    for (request_id, _), seen in parts.times.items():
        if seen:
            firsts[request_id] = min(seen[0], firsts.get(request_id, seen[0]))
    ttfts = [first - parts.arrivals[request_id] for request_id, first in firsts.items()]
    assert histograms["ttft"].num_values == len(ttfts)
    assert histograms["ttft"].total == pytest.approx(sum(ttfts))
    assert {r: n for r, n in totals.ended.items() if n} == Counter(parts.reasons.values())
    assert len(parts.stats.requests()) == len(ids) == len(parts.reasons)
    for request in parts.stats.requests():
        sequences = [t for (i, _), t in parts.times.items() if i == request.request_id and len(t) > 1]
        if sequences:
            expected = sum(t[-1] - t[0] for t in sequences) / sum(len(t) - 1 for t in sequences)
            assert request.tpot_s == pytest.approx(expected)
    counts = parts.stats.counts
    assert counts is not None and counts.preemptions > 0, "the pool was too large for this test"
    assert counts.held_pages == counts.shared_pages == counts.running == counts.waiting == 0


def test_counts_and_page_letters() -> None:
    parts = Parts([0.1], num_pages=20, page_size=4)
    parts.submit("abcdefghi", max_tokens=8, n=2)
    for _ in range(4):
        parts.engine.step()
    counts, letters = parts.stats.counts, parts.stats.page_states()
    assert counts is not None
    by_letter = Counter(letters.decode())
    assert len(letters) == counts.pages == 20
    assert by_letter["s"] == counts.shared_pages == 2  # two full pages of the prompt, held by both sequences
    assert by_letter["u"] + by_letter["s"] == counts.held_pages
    assert by_letter["f"] == counts.free_pages and by_letter["c"] == counts.cached_pages == 0
    parts.engine.run_until_idle()
    counts = parts.stats.counts
    assert counts is not None
    assert Counter(parts.stats.page_states().decode())["c"] == counts.cached_pages > 0


def test_a_scheduler_of_somebody_else_is_unknown() -> None:
    class Foreign:
        def __init__(self, inner) -> None:
            self._inner = inner

        def __getattr__(self, name: str):
            return getattr(self._inner, name)

    parts = Parts([0.1])
    stats = EngineStats(Foreign(parts.scheduler), parts.runner.limits, parts.clock)
    assert stats.counts is None
    assert stats.page_states() == b""


def test_refused_and_aborted_requests_are_counted_once() -> None:
    parts = Parts([0.1], num_pages=4, page_size=4)
    parts.submit("a" * 40, max_tokens=4)  # more pages than there are: the scheduler refuses it
    aborted = parts.submit("b", max_tokens=4)
    parts.engine.abort(aborted)
    parts.engine.run_until_idle()
    ended = parts.stats.totals().ended
    assert ended[FinishReason.ERROR] == ended[FinishReason.ABORT] == 1
    assert sum(ended.values()) == 2
    assert [r.ttft_s for r in parts.stats.requests()] == [None, None]


def test_a_dead_engine_counts_what_it_took_down() -> None:
    clock = ManualClock()
    runner = FakeRunner(make_limits(), vocab_size=259, fail_at=(2, "result"))
    engine = Engine(
        runner=runner,
        scheduler=create_scheduler("fcfs", runner.limits),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=()),
        clock=clock,
    )
    for _ in range(3):
        engine.submit(engine.prepare([1, 2], SamplingParams(max_tokens=9)), lambda update: None)
    with pytest.raises(RuntimeError, match="injected"):
        engine.run_until_idle()
    assert engine.stats[0].totals().ended[FinishReason.ERROR] == 3


def test_a_pooled_prompt_is_no_token() -> None:
    parts = Parts([0.5])
    for pooling in (True, False):
        request = parts.engine.prepare("abc", SamplingParams(max_tokens=2), RequestOptions(pooling=pooling))
        parts.engine.submit(request, parts._see)
    parts.engine.run_until_idle()
    totals = parts.stats.totals()
    assert totals.new_tokens == sum(step.new_tokens for step in parts.stats.steps()) == 2
    assert totals.histograms["itl"].num_values == 1
    assert totals.histograms["ttft"].num_values == 2
    assert sum(totals.ended.values()) == 2


def test_memory_is_bounded() -> None:
    parts = Parts([0.001], max_rows=1)
    for _ in range(KEPT_REQUESTS + 50):
        parts.submit("a", max_tokens=3)
    parts.engine.run_until_idle()
    assert parts.stats.totals().steps > KEPT_STEPS
    assert len(parts.stats.steps()) == KEPT_STEPS
    assert len(parts.stats.requests()) == len(parts.stats.first_tokens()) == KEPT_REQUESTS


def test_read_from_another_thread_while_the_loop_runs() -> None:
    parts = Parts([0.001], max_rows=4, num_pages=64)
    for _ in range(300):
        parts.submit("abc", max_tokens=8)
    stop, problems = threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                totals = parts.stats.totals()
                assert totals.histograms["itl"].num_values <= 300 * 7
                assert len(parts.stats.page_states()) == 64
                steps = parts.stats.steps()
                assert (
                    [s.step_id for s in steps] == list(range(steps[0].step_id, steps[-1].step_id + 1)) if steps else 1
                )
                time.sleep(0.001)
        except BaseException as error:
            problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    parts.engine.run_until_idle()
    stop.set()
    reader.join(120)
    assert not reader.is_alive()
    assert not problems


def test_a_copy_is_whole_although_garbage_is_collected_meanwhile() -> None:
    """A collection may run Python code, JAX's for one, in which the interpreter may switch to the loop's thread."""
    parts = Parts([0.001])
    parts.submit("abc", max_tokens=20)
    parts.engine.run_until_idle()
    stats = parts.stats
    queues, thresholds = (stats._steps, stats._firsts, stats._requests), gc.get_threshold()

    num_collections = 0

    def loop_goes_on(phase: str, info: dict[str, int]) -> None:
        nonlocal num_collections
        num_collections += 1
        for queue in queues:
            queue.rotate()

    gc.callbacks.append(loop_goes_on)
    gc.set_threshold(1)
    try:
        for _ in range(50):
            assert stats.steps() and stats.first_tokens() and stats.requests()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(loop_goes_on)
    assert num_collections > 0, "nothing was collected"


def test_a_dead_replica_holds_nothing_and_keeps_its_sums() -> None:
    engines = [Parts([0.1]).engine, Parts([0.1]).engine]
    group = EngineGroup(engines, create_router("least_load", RouterOptions(slack=8, table_blocks=16, seed=0)))
    for _ in range(4):
        group.submit(group.prepare("ab", SamplingParams(max_tokens=6)), lambda update: None)
    for _ in range(4):
        group.step()
    dead, well = group.stats
    assert dead.counts is not None and dead.counts.running == 2
    group.replicas[0].fail(RuntimeError("the device is lost"))
    group.run_until_idle()
    assert (dead.alive, well.alive) == (False, True)
    assert dead.counts is not None
    assert not any(dead.counts._replace(pages=0, page_size=0, grantable_pages=0, queried_tokens=0))
    assert dead.counts.pages > 0 and dead.counts.queried_tokens == 6
    assert dead.page_states() == b"" != well.page_states()
    assert dead.totals().ended[FinishReason.ERROR] == 2 and dead.totals().new_tokens > 0


def test_a_group_has_one_for_each_replica() -> None:
    engines = [Parts([0.1]).engine for _ in range(3)]
    group = EngineGroup(engines, create_router("least_load", RouterOptions(slack=8, table_blocks=16, seed=0)))
    for _ in range(6):
        group.submit(group.prepare("ab", SamplingParams(max_tokens=2)), lambda update: None)
    group.run_until_idle()
    assert [sum(s.totals().ended.values()) for s in group.stats] == [2, 2, 2]


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (2.0, 1), (9.0, 3)):
        histogram.add(value, times)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (3, 2, 3)
    assert snapshot.num_values == 8
    assert snapshot.total == 0.5 + 2 + 1.5 + 2 + 27
    assert list(SECONDS) == sorted(set(SECONDS))
