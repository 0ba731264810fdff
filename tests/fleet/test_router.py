"""The request router on its own: Ray's hooks are called as Ray calls them, on stand-ins for its replicas."""

import asyncio
import types
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

from jaxserve.fleet.ray_router import FleetRouter
from jaxserve.routing import key_of_text

LONG = "You answer in one short sentence. " * 8
OTHER = "You translate what you are given. " * 8


class Replica(types.SimpleNamespace):
    """As much of Ray's `RunningReplica` as the router reads."""

    def __init__(self, name: str) -> None:
        super().__init__(replica_id=types.SimpleNamespace(unique_id=name))


class World:
    """A router with its replicas."""

    def __init__(self, *names: str, policy: str = "prefix", slack: int = 2) -> None:
        self.router = FleetRouter.__new__(FleetRouter)  # Ray's own constructor wants a cluster
        self.router.initialize_state(policy=policy, slack=slack, table_blocks=1024, seed=0)
        self.replicas = {name: Replica(name) for name in names}
        self.num_requests = 0

    def ranked(self, text: str, avoid: tuple[str, ...] = ()) -> list[str]:
        pending: Any = self._pending(text, avoid)
        ranks = asyncio.run(self.router.choose_replicas(list(self.replicas.values()), pending))  # type: ignore[arg-type]
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id.unique_id for rank in ranks]

    def send(self, text: str) -> tuple[str, str]:
        """Routes a request to the first choice, which takes it. Returns the replica and the request's id."""
        chosen = self.ranked(text)[0]
        pending: Any = self._pending(text, ())
        self.router.on_request_routed(pending, self.replicas[chosen].replica_id, None)
        return chosen, pending.metadata.internal_request_id

    def end(self, replica: str, request_id: str) -> None:
        self.router.on_request_completed(self.replicas[replica].replica_id, request_id)

    def load(self, replica: str) -> int:
        return self.router._balancer.load(replica)

    def _pending(self, text: str, avoid: tuple[str, ...]) -> types.SimpleNamespace:
        self.num_requests += 1
        metadata = types.SimpleNamespace(internal_request_id=f"request-{self.num_requests}")
        return types.SimpleNamespace(kwargs={"prompt_key": key_of_text(text), "avoid": avoid}, metadata=metadata)


def test_one_beginning_stays_on_one_replica() -> None:
    world = World("a", "b", "c")
    homes = {text: world.send(text + "first") for text in (LONG, OTHER)}
    for text, sent in homes.items():
        world.end(*sent)
        for i in range(5):
            again = world.send(f"{text}question {i}")
            assert again[0] == sent[0]
            world.end(*again)
    assert len({replica for replica, _ in homes.values()}) == 2


def test_a_full_home_is_left() -> None:
    world = World("a", "b", slack=2)
    home = world.send(LONG)[0]
    for _ in range(2):
        assert world.send(LONG)[0] == home
    assert world.send(LONG)[0] != home, "three are running there, the other has none"


def test_all_replicas_are_ranked_and_what_failed_comes_last() -> None:
    world = World("a", "b", "c")
    home = world.send(LONG)[0]
    ranks = world.ranked(LONG)
    assert ranks[0] == home
    assert sorted(ranks) == ["a", "b", "c"]
    assert world.ranked(LONG, avoid=(home,))[-1] == home
    assert world.ranked(LONG, avoid=("a", "b", "c")), "with nothing else left it is tried again"


def test_the_replica_that_has_set_room_aside_comes_first() -> None:
    world = World("a", "b", "c")
    pending: Any = world._pending(LONG, avoid=())
    for wanted, first in (("c", {"c"}), ("b", {"b"}), ("gone", {"a", "b", "c"})):
        pending.kwargs["wanted"] = wanted
        ranks = asyncio.run(world.router.choose_replicas(list(world.replicas.values()), pending))  # type: ignore[arg-type]
        assert ranks[0][0].replica_id.unique_id in first and len(ranks) == 3


def test_loads_count_what_was_taken_and_has_not_ended() -> None:
    world = World("a", "b")
    first = world.send(LONG)
    second = world.send(LONG)
    assert world.load(first[0]) == 2
    world.end(*first)
    world.end(*first)  # Ray tells of a request that never began too
    assert world.load(second[0]) == 1
    world.end(*second)
    assert world.load(second[0]) == 0
    assert not world.router._running


def test_a_dead_replica_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("a", "b")
    monkeypatch.setattr(FleetRouter.__mro__[1], "on_replica_actor_died", lambda *_: None)
    home, request_id = world.send(LONG)
    world.router.on_replica_actor_died(world.replicas[home].replica_id)  # type: ignore[arg-type]
    world.end(home, request_id)
    other = ({"a", "b"} - {home}).pop()
    assert world.send(LONG + "x")[0] == other, "its cache is gone, so it is the other's turn"


def test_calls_without_a_prompt_go_anywhere_and_are_not_counted() -> None:
    world = World("a", "b")
    pending: Any = types.SimpleNamespace(kwargs={}, metadata=types.SimpleNamespace(internal_request_id="health"))
    replicas: Any = list(world.replicas.values())
    assert asyncio.run(world.router.choose_replicas(replicas, pending)) == [replicas]
    assert asyncio.run(world.router.choose_replicas(replicas)) == [replicas]
    world.router.on_request_routed(pending, replicas[0].replica_id, None)
    world.end("a", "health")
    assert world.load("a") == 0
