"""What docs/scheduling.md says that a policy may rely on: a witness looks, under random operations."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from sched_world import World, random_limits, random_request

from jaxserve.sched import Sequence, SequenceState, StepPlan
from jaxserve.sched.lengths import LengthPredictor
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.policies import PriorityPolicy

WAITING, RUNNING, PREEMPTED = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED


class Witness(PriorityPolicy):
    """Preempts as the order allows, and asserts whatever it can see."""

    preemptive = True
    is_bound = False

    def bind(self, memory: SequenceMemory, lengths: LengthPredictor, clock: Callable[[], float]) -> None:
        assert not self.is_bound
        self.is_bound = True
        super().bind(memory, lengths, clock)
        self.live: dict[Sequence, SequenceState] = {}
        self.num_observed = self.num_runs = self.num_ends = self.num_kept = 0
        self.num_taken = {"page": 0, "admission": 0}
        self.served_id = -1
        self.last_served: tuple[Seq[Sequence], list[Sequence]] = ([], [])

    def key(self, seq: Sequence, now_s: float) -> float:
        assert self.live[seq] is seq.state
        assert now_s == self.clock()
        return super().key(seq, now_s)

    def line(self, seq: Sequence) -> str:
        assert self.live[seq] is seq.state
        return ""

    def may_admit(self, seq: Sequence, running: Seq[Sequence]) -> bool:
        assert seq.state in (WAITING, PREEMPTED)
        holders = {s for s, state in self.live.items() if state is RUNNING}
        assert {s for s in holders if s.row >= 0} == set(running)
        assert all(s.num_fed == s.max_fed for s in holders - set(running)), "only the last token is awaited"
        return True

    def victim_for_page(self, seq: Sequence, behind: Seq[Sequence]) -> Sequence | None:
        num_wanted = max(len(self.memory.groups), self.memory.num_wanted(seq, len(seq.tokens)))
        assert behind and self.memory.pool.num_available < num_wanted
        self._look_at_order([seq, *behind])
        self.num_taken["page"] += 1
        return behind[len(behind) // 2]

    def victim_for_admission(self, seq: Sequence, running: Seq[Sequence]) -> Sequence | None:
        self._look_at_order(running)
        worse = [other for other in running if self.key(other, self.clock()) > self.key(seq, self.clock())]
        self.num_taken["admission"] += bool(worse)
        return worse[-1] if worse else None

    def _look_at_order(self, running: Seq[Sequence]) -> None:
        assert all(seq.state is RUNNING and seq.num_fed < seq.max_fed for seq in running)
        places = [(self.key(seq, self.clock()), seq.order, seq.index) for seq in running]
        assert places == sorted(places)

    def on_wait(self, seq: Sequence) -> None:
        assert (self.live.get(seq), seq.state) in ((None, WAITING), (RUNNING, PREEMPTED))
        self.live[seq] = seq.state

    def on_run(self, seq: Sequence) -> None:
        assert self.live[seq] in (WAITING, PREEMPTED)
        assert seq.state is RUNNING and seq.row >= 0
        assert len(seq.tokens) > seq.num_cached == seq.num_fed
        for group, table in zip(self.memory.groups, seq.tables, strict=True):
            needed = len(seq.tokens) if group.window is None else seq.num_fed + 1  # then a chunk at a time
            assert len(table.page_ids) * self.memory.page_size >= needed
        self.live[seq] = RUNNING
        self.num_runs += 1

    def observe(self, decoding: Seq[Sequence], prefills: Seq[tuple[Sequence, int]]) -> None:
        assert decoding or prefills
        assert all(length >= 1 for _, length in prefills)
        self.num_observed += 1
        assert self.num_observed - (self.served_id + 1) in (1, 2)

    def on_served(self, plan: StepPlan, served: Seq[Sequence]) -> None:
        assert plan.step_id == self.served_id + 1
        assert len(served) == len(plan.sampled_rows)
        before, copy = self.last_served
        assert list(before) == copy, "changed in place"
        self.num_kept += before is served
        self.last_served = (served, list(served))
        self.served_id += 1

    def on_end(self, seq: Sequence) -> None:
        assert self.live.pop(seq) is seq.state
        self.num_ends += 1


def test_what_a_policy_may_rely_on() -> None:
    seen = dict.fromkeys(("page", "admission", "runs", "ends", "kept"), 0)
    for seed in range(60):
        rng = random.Random(seed)
        world = World(random_limits(rng), policy=Witness, look_ahead=rng.random() < 0.3, chunked=rng.random() < 0.7)
        for number in range(200):
            op = rng.choices(("add", "abort", "schedule", "commit"), (6, 0.5, 10, 10))[0]
            if op == "add" and len(world.live()) < 20:
                world.add(random_request(rng, number, world.clock()))
            elif op == "abort" and world.live():
                world.abort(*rng.choice(world.live()))
            elif op == "commit":
                world.commit()
            else:
                world.schedule()
        world.finish()
        policy = world.scheduler.policy
        assert isinstance(policy, Witness)
        assert not policy.live, "ended without on_end"
        for name, number in (*policy.num_taken.items(), ("runs", policy.num_runs), ("ends", policy.num_ends)):
            seen[name] += number
        seen["kept"] += policy.num_kept
    assert seen["page"] > 50 and seen["admission"] > 50 and seen["runs"] > seen["ends"] > 500 < seen["kept"], seen
