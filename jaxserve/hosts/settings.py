"""The check of a config for several processes, before anything is loaded, and their secret and certificates.

Checks that need a device are in `distributed`, checks of single fields in the schema.
"""

from jaxserve.config.addresses import is_loopback
from jaxserve.config.schema import Config, HostsConfig
from jaxserve.config.secret_files import read_mutual_tls, read_secret
from jaxserve.errors import ConfigError
from jaxserve.hosts.link import Trust


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
    if hosts.secret_file is None and not is_loopback(hosts.coordinator.rpartition(":")[0]):
        raise ConfigError(
            f"hosts.coordinator is {hosts.coordinator!r}, which other machines reach, but hosts.secret_file is not "
            "set: whoever speaks to hosts.plan_port would get the prompts. Put one secret into a file on every host "
            "(openssl rand -hex 32) and name it there or in JAXSERVE_HOSTS_SECRET_FILE"
        )
    tls = {name: getattr(hosts, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    if None in tls.values() and any(tls.values()):
        missing = ", ".join(f"hosts.{name}" for name, path in tls.items() if path is None)
        raise ConfigError(f"TLS between hosts needs all of hosts.tls_cert, tls_key and tls_ca, but not set: {missing}")
    if parallel.data != 1:
        raise ConfigError(
            f"parallel.data is {parallel.data}, but several processes run one replica together: set it to 1, and start "
            "more services behind `jaxserve route`"
        )
    if parallel.pipeline > hosts.num_processes:
        raise ConfigError(
            f"parallel.pipeline is {parallel.pipeline}, but hosts.num_processes is {hosts.num_processes}, and a "
            f"process has the devices of one stage only: set it to {hosts.num_processes} at most, and parallel.tensor "
            "to the number of devices of a stage"
        )
    if config.store.connector is not None:
        raise ConfigError(
            f"store.connector is {config.store.connector!r} and hosts.num_processes {hosts.num_processes}, but a "
            "connector moves whole pages, and no process has any; name a store in store.kind, or leave one of them out"
        )
    if config.store.pages == "canonical":
        raise ConfigError(
            f"store.pages is canonical and hosts.num_processes {hosts.num_processes}, but such pages are whole, and no "
            "process has whole pages; leave store.pages out"
        )


def read_trust(hosts: HostsConfig) -> Trust:
    """Reads the secret and the certificates. Raises ConfigError that names the setting."""
    secret = b"" if hosts.secret_file is None else read_secret(hosts.secret_file, "hosts.secret_file")
    if hosts.tls_cert is None or hosts.tls_key is None or hosts.tls_ca is None:
        return Trust(secret)
    return Trust(secret, read_mutual_tls(hosts.tls_cert, hosts.tls_key, hosts.tls_ca, "hosts."))
