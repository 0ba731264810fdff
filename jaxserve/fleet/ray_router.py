"""The policies of `jaxserve.routing` as a request router of Ray Serve: which replica Ray sends a request to.

The policy is named by `route:` in the engine's config. Ray calls all methods on one event loop of the ingress, so each
ingress replica counts only the requests that it has sent itself.
"""

import collections
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxserve.routing import Balancer, PromptKey, RouterOptions, create_router


class FleetRouter(RequestRouter):
    """Made by Ray in each ingress replica, from the name in the deployment's options."""

    # Ray's signature is open; what it hands over is exactly the deployment's `request_router_kwargs`.
    def initialize_state(self, *, policy: str, slack: int, table_blocks: int, seed: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Ray's second constructor. Raises ConfigError for a policy that does not exist."""
        options = RouterOptions(slack=slack, table_blocks=table_blocks, seed=seed)
        self._balancer = Balancer(create_router(policy, options))
        # Ray also reports the end of requests that were never taken (a full replica), and does not tell attempts apart.
        self._running: collections.Counter[tuple[str, str]] = collections.Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others by load, in case it is full. One that has just failed comes last, and one
        that has set room aside for the request (`wanted`) first."""
        if pending_request is None or "prompt_key" not in pending_request.kwargs or not candidate_replicas:
            return [candidate_replicas]
        by_id = {_id(replica.replica_id): replica for replica in candidate_replicas}
        avoid = pending_request.kwargs["avoid"]
        fresh = [name for name in by_id if name not in avoid] or list(by_id)
        chosen = pending_request.kwargs.get("wanted")
        if chosen not in by_id:
            chosen = self._balancer.choose(pending_request.kwargs["prompt_key"], fresh)
        others = sorted((name for name in by_id if name != chosen), key=lambda n: (n in avoid, self._balancer.load(n)))
        return [[by_id[name]] for name in (str(chosen), *others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica has taken it."""
        if "prompt_key" in pending_request.kwargs:
            key: PromptKey = pending_request.kwargs["prompt_key"]
            self._balancer.start(key, _id(replica_id))
            self._running[pending_request.metadata.internal_request_id, _id(replica_id)] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has ended, for whatever reason."""
        attempt = (internal_request_id, _id(replica_id))
        if self._running[attempt]:
            self._balancer.end(_id(replica_id))
            self._running[attempt] -= 1
        if not self._running[attempt]:
            del self._running[attempt]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes Ray's list of replicas, whenever it changes. The caches of replicas that left are gone."""
        left = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in left:
            self._balancer.forget(_id(replica_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A caller has found the replica dead, before Ray's list changes."""
        super().on_replica_actor_died(replica_id)
        self._balancer.forget(_id(replica_id))


def _id(replica_id: ReplicaID) -> str:
    return replica_id.unique_id
