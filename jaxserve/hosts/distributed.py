"""The one call of `jax.distributed`, with settings that fit a service.

Owns the joining of JAX's own runtime. Refuses plans and liveness: those are `leader` and `follower`, whose news come
sooner and in better words than what JAX prints when it aborts a process.
"""

import jax

from jaxserve.config_schema import HostsConfig, ParallelConfig
from jaxserve.errors import ConfigError

# JAX aborts every process when one is silent for this long. It is the second net: long enough that ours, which tells
# clients and the operator before it ends, is always the first.
_SILENCE_FACTOR = 10
_MIN_SILENCE_S = 60
_SHUTDOWN_S = 30


def join_processes(hosts: HostsConfig) -> None:
    """Makes the devices of all processes visible to each. To be called before anything else uses JAX.

    Raises RuntimeError when the processes do not come together within `hosts.join_s`.
    """
    # Its handler of SIGTERM would take the place of ours, which drains.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=hosts.coordinator,
        num_processes=hosts.num_processes,
        process_id=hosts.process_id,
        cluster_detection_method="deactivate",  # all is said above; local devices stay as the platform finds them
        initialization_timeout=max(1, int(hosts.join_s)),
        heartbeat_timeout_seconds=max(_MIN_SILENCE_S, int(_SILENCE_FACTOR * hosts.heartbeat_s)),
        shutdown_timeout_seconds=_SHUTDOWN_S,
    )


def check_devices(parallel: ParallelConfig) -> None:
    """Raises ConfigError unless every device of every process takes part: one without would have nothing to run."""
    if parallel.tensor != jax.device_count():
        raise ConfigError(
            f"parallel.tensor is {parallel.tensor}, but the {jax.process_count()} processes have {jax.device_count()} "
            f"devices together, {jax.local_device_count()} of them here; over several processes it must be all of them"
        )


def leave_processes() -> None:
    """The orderly end, which waits for all others to come to it."""
    jax.distributed.shutdown()
