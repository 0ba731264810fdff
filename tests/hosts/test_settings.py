"""What several processes refuse by name, before anything is loaded."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import LLM, run
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.hosts import check_hosts

GOOD: dict[str, Any] = {
    "hosts.coordinator": "a:8475",
    "hosts.num_processes": 2,
    "hosts.process_id": 1,
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
        ({"parallel.data": 2}, "parallel.data is 2, but over several processes .* `jaxserve route`"),
        ({"parallel.pipeline": 2}, "parallel.pipeline is 2, but over several processes"),
    ],
)
def test_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_hosts(load_config(None, {**GOOD, **change}, environ={}).config)


def test_taken() -> None:
    check_hosts(load_config(None, GOOD, environ={}).config)
    check_hosts(load_config(None, {}, environ={}).config)


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
