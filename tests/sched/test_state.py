"""Four states, and no arrows but the legal ones."""

import pytest

from jaxserve.sched.state import Sequence, SequenceState, sequence_seed
from jaxserve.testing import make_request

W, R, P, F = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.FINISHED
LEGAL = {(W, R), (R, P), (P, R), (W, F), (R, F), (P, F)}


@pytest.mark.parametrize("source", SequenceState)
@pytest.mark.parametrize("target", SequenceState)
def test_arrows(source: SequenceState, target: SequenceState):
    seq = Sequence(make_request("a", [1]), 0, 0, 10)
    seq.state = source
    if (source, target) in LEGAL:
        seq.move(target)
        assert seq.state is target
    else:
        with pytest.raises(AssertionError, match="cannot become"):
            seq.move(target)


def test_seeds_are_distinct_and_the_first_is_the_requests_own():
    request = make_request("a", [1], seed=2**63 - 1)
    seeds = [sequence_seed(request, i) for i in range(1024)]
    assert seeds[0] == 2**63 - 1
    assert len(set(seeds)) == 1024
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [sequence_seed(request, i) for i in range(1024)]
