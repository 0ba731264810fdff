"""What of a config several processes can do, checked before anything is loaded.

Owns the combinations of settings. Refuses what needs a device (`distributed`) and values of one field (the schema).
"""

from jaxserve.config_schema import Config
from jaxserve.errors import ConfigError


def check_hosts(config: Config) -> None:
    """Raises ConfigError for settings that several processes cannot run."""
    hosts, parallel = config.hosts, config.parallel
    if hosts.coordinator is None:
        if hosts.num_processes == 1 and hosts.process_id == 0:
            return
        raise ConfigError(
            f"hosts.num_processes is {hosts.num_processes} and hosts.process_id {hosts.process_id}, but "
            "hosts.coordinator is not set: give HOST:PORT of process 0, or leave all three out"
        )
    if hosts.num_processes < 2:
        raise ConfigError("hosts.coordinator is set, but hosts.num_processes is 1; set both, or neither")
    if hosts.process_id >= hosts.num_processes:
        raise ConfigError(
            f"hosts.process_id is {hosts.process_id}, but hosts.num_processes is {hosts.num_processes}: numbers go "
            f"from 0 to {hosts.num_processes - 1}"
        )
    _, colon, port = hosts.coordinator.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"hosts.coordinator is {hosts.coordinator!r}, but must be HOST:PORT of process 0")
    if int(port) == hosts.plan_port:
        raise ConfigError(f"hosts.plan_port is {port}, which hosts.coordinator uses for JAX itself; take another")
    for name in ("data", "pipeline"):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"parallel.{name} is {getattr(parallel, name)}, but over several processes this version has tensor "
                "parallelism alone: set it to 1 and parallel.tensor to the number of all devices; for more replicas "
                "start more services behind `jaxserve route`"
            )
