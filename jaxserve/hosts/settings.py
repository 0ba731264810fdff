"""The check of a config for several processes, before anything is loaded, and the files of secrets and certificates.

Checks that need a device are in `distributed`, checks of single fields in the schema.
"""

import ssl
from pathlib import Path

from jaxserve.config.addresses import is_loopback
from jaxserve.config.schema import Config, HostsConfig
from jaxserve.errors import ConfigError
from jaxserve.hosts.link import Tls, Trust

_LEAST_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096


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
    for name in ("data", "pipeline"):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"parallel.{name} is {getattr(parallel, name)}, but over several processes this version has tensor "
                "parallelism alone: set it to 1 and parallel.tensor to the number of all devices; for more replicas "
                "start more services behind `jaxserve route`"
            )


def read_trust(hosts: HostsConfig) -> Trust:
    """Reads the secret and the certificates. Raises ConfigError that names the setting."""
    secret = b""
    if hosts.secret_file is not None:
        secret = _read("hosts.secret_file", hosts.secret_file).strip()
        if not _LEAST_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
            raise ConfigError(
                f"hosts.secret_file: {hosts.secret_file} holds {len(secret)} bytes, but a secret has "
                f"{_LEAST_SECRET_BYTES} to {_MAX_SECRET_BYTES}; make one with: openssl rand -hex 32"
            )
    if hosts.tls_cert is None or hosts.tls_key is None or hosts.tls_ca is None:
        return Trust(secret)
    tls = Tls(
        _read("hosts.tls_cert", hosts.tls_cert),
        _read("hosts.tls_key", hosts.tls_key),
        _read("hosts.tls_ca", hosts.tls_ca),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(hosts.tls_cert, hosts.tls_key, password=_no_password)
    except (ssl.SSLError, ConfigError) as error:
        raise ConfigError(
            f"hosts.tls_cert {hosts.tls_cert} and hosts.tls_key {hosts.tls_key} are no pair of PEM files without a "
            f"password: {error}"
        ) from error
    try:
        context.load_verify_locations(hosts.tls_ca)
    except ssl.SSLError as error:
        raise ConfigError(f"hosts.tls_ca: {hosts.tls_ca} holds no certificates in PEM: {error}") from error
    return Trust(secret, tls)


def _no_password() -> str:
    raise ConfigError("the key asks for a password")


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
