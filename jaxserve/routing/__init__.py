"""The choice of a replica for a request: small policies that know loads and prompts, but no devices or networks.

    base      what a policy is: `Load`, `Router`, `RouterOptions`
    prompts   prompt beginnings as chained hashes, and a memory of the replicas that have seen them
    policies  round_robin, least_load, power_of_two
    prefix    affinity to the replica whose cache has the beginning, within a cap on its load
    balancer  a policy together with the counts that it needs

The same objects route between the replicas of one process (`engine.replicas`) and between processes
(`serve.route`), and a simulator can drive them too: they are plain Python, they never look at a clock, and the one
that draws random numbers has a seed. They see only a list of loads of the replicas that are alive.

Loads are requests that were routed and have not ended, as counted where the routing is done. That number is exact and
current; a figure reported by a replica would be old when it arrives, and all routers would send their requests to the
replica that was idle a second ago. Several routers before the same replicas each see their own share.

To bring another policy, derive from `Router` and name it: an entry point in the group `jaxserve.routers`,
`package.module:Class`, or the class itself.
"""

from jaxserve.routing.balancer import Balancer
from jaxserve.routing.base import Load, Replica, Router, RouterOptions
from jaxserve.routing.prompts import PrefixTable, PromptKey, key_of_text, key_of_tokens
from jaxserve.values.registry import Registry, make_derived

__all__ = [
    "ROUTERS",
    "Balancer",
    "Load",
    "PrefixTable",
    "PromptKey",
    "Replica",
    "Router",
    "RouterOptions",
    "create_router",
    "key_of_text",
    "key_of_tokens",
]

ROUTERS: Registry[type[Router] | Router] = Registry(
    "router",
    "jaxserve.routers",
    {
        "prefix": "jaxserve.routing.prefix:Prefix",
        "least_load": "jaxserve.routing.policies:LeastLoad",
        "power_of_two": "jaxserve.routing.policies:PowerOfTwo",
        "round_robin": "jaxserve.routing.policies:RoundRobin",
    },
)


def create_router(policy: str | type[Router] | Router, options: RouterOptions | None = None) -> Router:
    """Builds the router that a config or a notebook asks for, see `registry.make_derived`. Raises ConfigError."""
    return make_derived(ROUTERS, policy, Router, options or RouterOptions())
