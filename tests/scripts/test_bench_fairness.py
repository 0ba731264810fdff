"""The simulated part of the bench of fairness, which knows no clock: shares are those of the weights."""

import bench_fairness as script
import pytest


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_fair_gives_the_smaller_owner_its_share(weight: float) -> None:
    served = script.run_simulated(script.Case("fair", weight))
    assert served.share == pytest.approx(weight / (weight + 1), rel=0.05)
    assert served.first_token_s is not None and served.first_token_s < 3.0


def test_by_arrival_it_waits_for_all_that_came_before() -> None:
    """What the shares above are worth."""
    served = script.run_simulated(script.Case("fcfs", 1.0), 20.0)
    assert (served.share, served.first_token_s) == (0.0, None)


def test_an_owner_alone_gets_what_it_gets_by_arrival() -> None:
    alone, by_arrival = (script.run_simulated(script.Case(policy, None), 20.0) for policy in ("fair", "fcfs"))
    assert alone == by_arrival
    assert alone.share == 0.0 and alone.tokens_per_s > 300
