"""Lengths live on the device: how long a plan believes its decode rows to be changes no token."""

import dataclasses

from whole import FIXTURES, POOL, build, run

from jaxserve.api import SamplingParams
from jaxserve.sched import InFlight, Limits, Runner, StepPlan


class Believing:
    """A runner that is told of longer decode rows than there are, as where earlier steps drew fewer tokens than they
    could."""

    def __init__(self, inner: Runner, more: int) -> None:
        self._inner = inner
        self._more = more
        self.num_changed = 0

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        self.num_changed += len(plan.decode_rows)
        positions = tuple(position + self._more for position in plan.decode_positions)
        return self._inner.dispatch(dataclasses.replace(plan, decode_positions=positions))


# Both runs are of one engine, whose programs other tests compile like this, too.
def test_positions_of_decode_rows_are_bounds() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.7, seed=5, detokenize=False, logprobs=1, ignore_eos=True)
    asked = [([3 + i, 17, 5, 90][: 1 + i % 4] * (3 + 8 * i), sampling) for i in range(5)]
    # Without hits, so that both runs cut their prompts alike: sums of another number of rows may round otherwise.
    engine = build(FIXTURES / "llama", cache__prefix_caching=False, **POOL)
    expected = run(engine, asked, stagger=2)
    believing = engine._runner = Believing(engine._runner, 7)
    found = run(engine, asked, stagger=2)
    assert believing.num_changed >= 5 * 19
    assert [[r.token_ids for r in answers] for answers in found] == [[r.token_ids for r in a] for a in expected]
    assert [[r.logprobs for r in answers] for answers in found] == [[r.logprobs for r in a] for a in expected]
