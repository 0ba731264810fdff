"""The one call of `jax.distributed`, with settings that fit a service.

Liveness is watched by `leader` and `follower`, which report a loss sooner and in better words than JAX does when it
aborts a process.
"""

import jax

from jaxserve.config.schema import HostsConfig, ParallelConfig
from jaxserve.errors import ConfigError

# JAX aborts every process when one is silent for this long. It is the second net: long enough that the watch of
# `hosts`, which tells clients and the operator before the process ends, is always the first.
_SILENCE_FACTOR = 10
_MIN_SILENCE_S = 60
_SHUTDOWN_S = 30


def join_processes(hosts: HostsConfig) -> None:
    """Makes the devices of all processes visible to each. To be called before anything else uses JAX.

    Raises RuntimeError when the processes do not come together within `hosts.join_s`.
    """
    # Its handler of SIGTERM would replace the one of the service, which drains.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=hosts.coordinator,
        num_processes=hosts.num_processes,
        process_id=hosts.process_id,
        cluster_detection_method="deactivate",  # nothing is detected; local devices stay as the platform has them
        initialization_timeout=max(1, int(hosts.join_s)),
        heartbeat_timeout_seconds=max(_MIN_SILENCE_S, int(_SILENCE_FACTOR * hosts.heartbeat_s)),
        shutdown_timeout_seconds=_SHUTDOWN_S,
    )


def check_devices(parallel: ParallelConfig) -> None:
    """Raises ConfigError unless every device of every process takes part, since one without would have nothing to run,
    and each process has devices of one stage."""
    tensor, stages = parallel.tensor, parallel.pipeline
    if tensor * stages != jax.device_count():
        raise ConfigError(
            f"parallel.pipeline x parallel.tensor is {stages} x {tensor}, but the {jax.process_count()} processes have "
            f"{jax.device_count()} devices together, {jax.local_device_count()} of them here; over several processes "
            "it must be all of them"
        )
    owners = [device.process_index for device in jax.devices()]
    for process_id in range(jax.process_count()):
        found = {at // tensor for at, owner in enumerate(owners) if owner == process_id}
        if len(found) > 1:
            raise ConfigError(
                f"parallel.pipeline x parallel.tensor is {stages} x {tensor}, so process {process_id}, which has "
                f"{owners.count(process_id)} devices, would have some of {len(found)} stages, and a process has those "
                f"of one only; make parallel.tensor a multiple of the devices of each process, or start a process "
                "for each stage"
            )


def leave_processes() -> None:
    """Leaves in order, which waits until all other processes leave, too."""
    jax.distributed.shutdown()
