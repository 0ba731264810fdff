"""The definitions, on events written by hand."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.lab.bench.lag import ClientLag, judge
from jaxserve.lab.workloads.metrics import Goodput, compute_metrics, request_times, spread_ms
from jaxserve.lab.workloads.outcome import Outcome


def answer(start_s: float, *times_s: float, tokens: int | None = None, prompt: int = 10, asked: int = 0) -> Outcome:
    return Outcome(
        start_s=start_s, output_times_s=times_s, prompt_tokens=prompt, output_tokens=tokens, asked_tokens=asked
    )


def failure(kind: str) -> Outcome:
    return Outcome(start_s=0.0, output_times_s=(0.1, 0.2), prompt_tokens=10, failure=kind)


# Sent at 10 s; output at 10.5, 10.7, 11.0 s; 3 tokens.
FIRST = answer(10.0, 10.5, 10.7, 11.0, tokens=3)
# Sent at 11.0 s; two pieces at 11.25 and 12.25 s that hold 5 tokens together.
BUNDLED = answer(11.0, 11.25, 12.25, tokens=5)
# Sent at 11.5 s; one token at 11.6 s.
SINGLE = answer(11.5, 11.6, tokens=1)


def test_one_request() -> None:
    times = request_times(FIRST)
    assert times.ttft_s == pytest.approx(0.5)
    assert times.e2el_s == pytest.approx(1.0)
    assert times.tpot_s == pytest.approx((1.0 - 0.5) / 2)
    assert times.itls_s == pytest.approx((0.2, 0.3))


def test_a_time_per_token_counts_tokens_and_a_gap_counts_pieces() -> None:
    times = request_times(BUNDLED)
    assert times.tpot_s == pytest.approx(1.0 / 4)
    assert times.itls_s == pytest.approx((1.0,))


def test_a_single_token_has_no_time_per_token() -> None:
    assert request_times(SINGLE).tpot_s is None


def test_pieces_stand_in_for_tokens_that_nobody_counted() -> None:
    uncounted = answer(0.0, 1.0, 2.0, 4.0)
    assert request_times(uncounted).output_tokens == 3
    assert request_times(uncounted).tpot_s == pytest.approx(1.5)
    metrics = compute_metrics([uncounted], 4.0, goodput=None, percentiles=())
    assert (metrics.num_uncounted, metrics.output_tokens) == (1, 3)


def test_all_figures() -> None:
    outcomes = [FIRST, failure("HTTP 429"), BUNDLED, SINGLE, failure("timeout"), failure("HTTP 429")]
    metrics = compute_metrics(outcomes, 2.5, goodput=Goodput(ttft_ms=300.0, tpot_ms=250.0), percentiles=(50, 99))
    assert (metrics.completed, metrics.failed) == (3, 3)
    assert metrics.failures == {"HTTP 429": 2, "timeout": 1}
    assert (metrics.input_tokens, metrics.output_tokens) == (30, 9)
    assert metrics.request_throughput == pytest.approx(3 / 2.5)
    assert metrics.output_throughput == pytest.approx(9 / 2.5)
    assert metrics.total_token_throughput == pytest.approx(39 / 2.5)
    assert metrics.ttft_ms.mean == pytest.approx((500 + 250 + 100) / 3)
    assert metrics.ttft_ms.median == pytest.approx(250)
    assert metrics.ttft_ms.percentiles[99] == pytest.approx(250 + 0.98 * 250)  # linear between the upper two of three
    assert metrics.tpot_ms.count == 2  # the single token has none
    assert metrics.tpot_ms.mean == pytest.approx(250)
    assert metrics.itl_ms.count == 3
    assert metrics.itl_ms.mean == pytest.approx((200 + 300 + 1000) / 3)
    assert metrics.e2el_ms.median == pytest.approx(1000)
    assert metrics.request_goodput == pytest.approx(2 / 2.5)  # FIRST is late; the others keep both limits


def test_the_deviation_is_that_of_the_population() -> None:
    assert spread_ms([0.001, 0.003], ()).std == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Goodput(ttft_ms=500.0), 3),  # a limit may be reached
        (Goodput(ttft_ms=499.0), 2),
        (Goodput(tpot_ms=249.0), 1),  # one token keeps any TPOT
        (Goodput(e2el_ms=1000.0), 2),
        (Goodput(ttft_ms=260.0, e2el_ms=1000.0), 1),
    ],
)
def test_goodput_keeps_every_limit(limits: Goodput, good: int) -> None:
    metrics = compute_metrics([FIRST, BUNDLED, SINGLE, failure("x")], 1.0, goodput=limits, percentiles=())
    assert metrics.request_goodput == good


def test_the_most_at_once_and_the_best_second() -> None:
    # Open: [0, 2], [1, 3], [2, 4]: the third comes as the first leaves.
    outcomes = [answer(0.0, 0.5, 2.0), answer(1.0, 1.5, 3.0), answer(2.0, 2.5, 2.9, 4.0)]
    metrics = compute_metrics(outcomes, 4.0, goodput=None, percentiles=())
    assert metrics.max_concurrency == 2
    assert metrics.max_output_tokens_per_s == 3  # seconds: 0.5 | 1.5 | 2.0 2.5 2.9 | 3.0 | 4.0


def test_short_answers_are_counted() -> None:
    outcomes = [answer(0.0, 1.0, tokens=3, asked=8), answer(0.0, 1.0, tokens=8, asked=8)]
    assert compute_metrics(outcomes, 1.0, goodput=None, percentiles=()).num_short == 1


def test_nothing_answered() -> None:
    metrics = compute_metrics([failure("timeout")], 1.0, goodput=Goodput(ttft_ms=1.0), percentiles=(99,))
    assert (metrics.completed, metrics.request_throughput, metrics.request_goodput) == (0, 0.0, 0.0)
    assert metrics.ttft_ms.mean is None
    assert metrics.as_json()["p99_ttft_ms"] is None


def test_names_are_those_of_the_common_result_files() -> None:
    tree = compute_metrics([FIRST], 1.0, goodput=None, percentiles=(99, 99.9)).as_json()
    expected = {"duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    expected |= {"output_throughput", "total_token_throughput", "max_concurrent_requests", "max_output_tokens_per_s"}
    expected |= {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99", "p99.9") for name in
                 ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    assert expected <= set(tree)


def test_goodput_options() -> None:
    assert Goodput.parse([]) is None
    assert Goodput.parse(["ttft:200", "tpot:50.5"]) == Goodput(ttft_ms=200.0, tpot_ms=50.5)
    for bad in ("ttft", "itl:3", "ttft:0", "ttft:x", "ttft:nan", "ttft:inf"):
        with pytest.raises(ConfigError, match="--goodput"):
            Goodput.parse([bad])
    with pytest.raises(ConfigError, match="each name once"):
        Goodput.parse(["ttft:1", "ttft:2"])


def lag(**values: float) -> ClientLag:
    quiet = {"loop_p50_ms": 0.1, "loop_p99_ms": 0.5, "loop_max_ms": 1.0, "send_p99_ms": 0.5, "cpu_share": 0.2}
    return ClientLag(loop="asyncio", **(quiet | values))


@pytest.mark.parametrize(
    ("values", "word"),
    [({"loop_p99_ms": 30.0}, "event loop"), ({"cpu_share": 0.95}, "bottleneck"), ({"send_p99_ms": 50.0}, "less even")],
)
def test_a_slow_generator_is_told(values: dict[str, float], word: str) -> None:
    metrics = compute_metrics([FIRST], 1.0, goodput=None, percentiles=())  # a median TPOT of 250 ms
    assert judge(lag(), metrics) == []
    assert judge(lag(loop_p99_ms=20.0), metrics) == []  # little beside 250 ms
    [warning] = judge(lag(**values), metrics)
    assert word in warning
