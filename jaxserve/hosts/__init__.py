"""Several processes, one per host, that run one model together.

    process 0                                             every other process
    ---------                                             -------------------
    front doors, engine, scheduler
    Scheduler.schedule -> StepPlan
    LeaderRunner.dispatch --- plan 17, as JSON bytes ---> Follower.plans
         |                                                      |
    Execution -> device  <---- collectives of the step ---> Execution -> device
         |                                                      |
    tokens -> Engine                                       tokens -> digest
    digest -> DigestBook  <--- digest up to step 15 ----- every hosts.check_every steps

A step is one program over the devices of all hosts, so every process must launch the same steps in the same order.
Where the stages of a pipeline are of several processes, a step is a program for each stage, and programs between them,
in an order that follows from the plan (`runtime.stage_links`). The plan is the only thing that varies, and it is a
small value: process 0 decides, the others execute, and there is nothing that they could decide differently. No process
waits for another's Python: the devices keep step through their collectives, the plans run ahead in a queue.

Plans contain the prompts of users, so a stranger must not get them: both sides of a connection prove that they know one
secret before anything else is sent, and every frame is sealed with a key of that connection.

Three things can go wrong, and each must be loud. A process dies or falls silent: both ends notice a broken connection
at once and a silent one within `hosts.heartbeat_s`, long before the runtime's own timeout, and every stream ends with
`HostLost`, which names the process and its host. Processes compute different things (a damaged plan, memory, or
device): the digests of what went in and what came out differ, and the service ends with `HostsDiverged` instead of
serving wrong tokens. Processes were started differently: they compare versions, settings, weights and sizes before
the first step, and refuse with a list of what differs.

Of a store of pages behind host memory (`store:`) each process has one of its own, for the parts of pages that its
devices hold. Process 0 sends orders for them through the same connections, between the plans.

A collective whose partner is gone may wait for ever inside of the device's runtime. So each process runs plans on
threads of their own (`execution`), waits for futures, and ends without asking those threads.

How the package is cut:

    frames, link, fingerprint, digest   bytes of a message, liveness, and the values that are compared
    handshake                           the proof of the secret, and the seals of frames
    leader, follower                    the two ends of the connection
    execution, running                  plans on a device, and the loops of both kinds of process
    store_orders, store_part            what process 0 orders the store of each process to do, and how that is done
    joint_store                         the stores of all processes as one, for the scheduler
    distributed, settings               the one call of `jax.distributed`; the check of a config, secrets and
                                        certificates from files
"""

from jaxserve.hosts.digest import StepDigest
from jaxserve.hosts.fingerprint import checkpoint_digest, config_facts, device_facts
from jaxserve.hosts.follower import Follower
from jaxserve.hosts.joint_store import JointStore
from jaxserve.hosts.leader import Leader
from jaxserve.hosts.link import Tls, Trust
from jaxserve.hosts.running import LeaderRunner, follow
from jaxserve.hosts.settings import check_hosts
from jaxserve.hosts.store_part import LocalStore, StorePart

__all__ = [
    "Follower",
    "JointStore",
    "Leader",
    "LeaderRunner",
    "LocalStore",
    "StepDigest",
    "StorePart",
    "Tls",
    "Trust",
    "check_hosts",
    "checkpoint_digest",
    "config_facts",
    "device_facts",
    "follow",
]
