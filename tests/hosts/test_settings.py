"""What several processes refuse by name, before anything is loaded."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from certificates import Authority

from jaxserve import LLM, run
from jaxserve.assemble import many_hosts
from jaxserve.config import load_config
from jaxserve.config.schema import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.hosts import Tls, Trust, check_hosts
from jaxserve.hosts.distributed import check_devices
from jaxserve.hosts.settings import read_trust

GOOD: dict[str, Any] = {
    "hosts.coordinator": "a:8475",
    "hosts.num_processes": 2,
    "hosts.process_id": 1,
    "hosts.secret_file": "/a-file",
    "parallel.tensor": 2,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"hosts.coordinator": None},
            "hosts.num_processes is 2 and hosts.process_id 1, but hosts.coordinator is not set",
        ),
        ({"hosts.num_processes": 1, "hosts.process_id": 0}, "hosts.num_processes is 1; set both"),
        ({"hosts.process_id": 2}, "hosts.process_id is 2, but hosts.num_processes is 2: numbers go from 0 to 1"),
        ({"hosts.coordinator": "a"}, "hosts.coordinator is 'a', but must be HOST:PORT"),
        ({"hosts.coordinator": "a:b"}, "must be HOST:PORT"),
        ({"hosts.coordinator": "a:8476"}, "hosts.plan_port is 8476, which hosts.coordinator uses"),
        ({"hosts.secret_file": None}, r"'a:8475', which other machines reach, but hosts\.secret_file is not set"),
        ({"hosts.secret_file": None, "hosts.coordinator": "localhost.example.org:1"}, "secret_file is not set"),
        ({"hosts.secret_file": None, "hosts.coordinator": "[::]:1"}, "secret_file is not set"),
        ({"hosts.tls_cert": "a"}, r"needs all of .* not set: hosts\.tls_key, hosts\.tls_ca"),
        ({"parallel.data": 2}, "parallel.data is 2, but several processes run one replica .* `jaxserve route`"),
        ({"parallel.pipeline": 3}, r"pipeline is 3, but hosts\.num_processes is 2, .* set it to 2 at most"),
        ({"store.pages": "canonical"}, "store.pages is canonical and hosts.num_processes 2, but such pages are whole"),
        ({"store.connector": "memory"}, "store.connector is 'memory' and hosts.num_processes 2, but a connector moves"),
    ],
)
def test_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_hosts(load_config(None, {**GOOD, **change}, environ={}).config)


def test_taken() -> None:
    check_hosts(load_config(None, GOOD, environ={}).config)
    check_hosts(load_config(None, {**GOOD, "parallel.pipeline": 2, "parallel.tensor": 1}, environ={}).config)
    check_hosts(load_config(None, {}, environ={}).config)
    for loopback in ("localhost:1", "127.0.0.2:1", "[::1]:1"):
        config = load_config(
            None, {**GOOD, "hosts.coordinator": loopback, "hosts.secret_file": None}, environ={}
        ).config
        check_hosts(config)
        assert many_hosts._listen_address(config.hosts).startswith(loopback[:-1])
        assert read_trust(config.hosts) == Trust()
    assert many_hosts._listen_address(load_config(None, GOOD, environ={}).config.hosts) == "[::]:8476"


@pytest.mark.parametrize(
    ("owners", "cut", "text"),
    [
        ([0, 1], {"tensor": 2}, None),
        ([0, 1], {"pipeline": 2}, None),
        ([0, 0, 1, 1], {"pipeline": 2, "tensor": 2}, None),
        ([0, 1, 2, 3], {"pipeline": 2, "tensor": 2}, None),
        ([0, 0, 1, 1], {"tensor": 2}, r"pipeline x parallel\.tensor is 1 x 2, but the 2 processes have 4 devices"),
        ([0, 1], {"pipeline": 2, "tensor": 2}, "is 2 x 2, but the 2 processes have 2 devices together, 1 of them here"),
        ([0, 0, 1, 1], {"pipeline": 4}, "process 0, which has 2 devices, would have some of 2 stages.* a multiple of"),
        ([0, 1, 1, 2], {"pipeline": 2, "tensor": 2}, "process 1, which has 2 devices, would have some of 2 stages"),
    ],
)
def test_the_devices_of_a_process_are_of_one_stage(
    owners: list[int], cut: dict[str, int], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {
        "devices": [SimpleNamespace(process_index=owner) for owner in owners],
        "device_count": len(owners),
        "process_count": len(set(owners)),
        "local_device_count": owners.count(0),
    }
    for name, value in facts.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)
    with contextlib.nullcontext() if text is None else pytest.raises(ConfigError, match=text):
        check_devices(ParallelConfig(**cut))


def test_a_secret_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    resolved = load_config(None, GOOD, environ={"JAXSERVE_HOSTS_SECRET_FILE": "/elsewhere"})
    assert resolved.config.hosts.secret_file == "/a-file", "what is given at the command line wins"
    hosts = load_config(None, {}, environ={"JAXSERVE_HOSTS_SECRET_FILE": str(file)}).config.hosts
    with pytest.raises(ConfigError, match=rf"hosts\.secret_file: cannot read {file}: No such file"):
        read_trust(hosts)
    file.write_text("a secret\n")
    with pytest.raises(ConfigError, match="has 8 bytes, but a secret has 16 to 4096; make one with: openssl"):
        read_trust(hosts)
    file.write_text("a longer secret of us\n")
    assert read_trust(hosts) == Trust(b"a longer secret of us")


def test_certificates_from_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    pair, other = authority.issue("a"), authority.issue("b")
    given = {"hosts.tls_cert": pair.certificate, "hosts.tls_key": pair.key, "hosts.tls_ca": authority.path}
    tls = read_trust(load_config(None, given, environ={}).config.hosts).tls
    assert tls == Tls(*(Path(path).read_bytes() for path in (*pair, authority.path)))
    for name, path, text in (
        ("hosts.tls_key", other.key, "no pair of PEM files"),
        ("hosts.tls_cert", authority.path + "x", "cannot read"),
        ("hosts.tls_ca", pair.key, "holds no certificates in PEM"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}.*{text}|{text}.*"):
            read_trust(load_config(None, {**given, name: path}, environ={}).config.hosts)


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("jaxserve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.usefixtures("_logging_as_before")
def test_the_command_line_checks_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--prompt", "a", "--set", "hosts.num_processes=2"]) == 2
    assert "hosts.coordinator is not set" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["JAXSERVE_COORDINATOR", "JAXSERVE_NUM_PROCESSES"])
def test_a_notebook_has_the_devices_of_one_host(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, {"JAXSERVE_COORDINATOR": "a:1", "JAXSERVE_NUM_PROCESSES": "2"}[variable])
    with pytest.raises(ConfigError, match=f"set by environment {variable}.* on every host"):
        LLM("demo")
