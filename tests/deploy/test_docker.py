"""The Dockerfiles, without Docker: a linter, and everything they name held against what there is."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_lines import parse_jaxserve, parse_run
from dockerfile_parse import DockerfileParser

from jaxserve.config import ENVIRONMENT, load_config
from jaxserve.config.addresses import is_loopback
from jaxserve.serve.grpc_server import LIVE_NAME
from jaxserve.serve.service import check_serve_config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
IMAGE_FOLDER = "/opt/jaxserve/"


class Dockerfile:
    """One file, parsed. Read only."""

    def __init__(self, path: Path) -> None:
        parser = DockerfileParser(path=str(path))
        self.env: dict[str, str] = dict(parser.envs)
        self.steps = [(s["instruction"], s["value"]) for s in parser.structure if s["instruction"] != "COMMENT"]

    def all(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]

    def one(self, instruction: str) -> str:
        (value,) = self.all(instruction)
        return value


@pytest.fixture(params=FILES, ids=lambda p: p.name)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def image(path: Path, tmp_path: Path) -> Dockerfile:
    copy = tmp_path / "Dockerfile"  # the parser opens its file for writing
    copy.write_text(path.read_text())
    return Dockerfile(copy)


def test_there_is_one_for_each_kind_of_device() -> None:
    assert [p.name for p in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile", "tpu.Dockerfile"]


def test_the_linter_has_nothing_to_say(path: Path) -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "")


def test_what_is_copied_exists_and_reaches_docker(image: Dockerfile) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore, ".dockerignore lets in only what it names"
    sources = [source for value in image.all("COPY") for source in value.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignore
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {project["project"]["readme"], *project["project"]["license-files"], "constraints.txt", "pyproject.toml"}
    wanted |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert wanted <= set(sources), "the package cannot be built without these"


def test_it_installs_the_extra_of_its_device(path: Path, image: Dockerfile) -> None:
    extras = image.one("ARG").removeprefix("EXTRAS=").split(",")
    assert set(extras) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert path.name.removesuffix(".Dockerfile") in extras
    assert any("--constraint constraints.txt" in run and '".[${EXTRAS}]"' in run for run in image.all("RUN"))


def test_it_runs_as_a_user_that_may_write_the_cache(image: Dockerfile) -> None:
    user = image.one("USER")
    assert user.split(":")[0].isdigit(), "Kubernetes can tell only from a number that it is not root"
    assert user != "0:0"
    cache = image.env["JAXSERVE_COMPILE_CACHE"]
    assert json.loads(image.one("VOLUME")) == [cache]
    created = image.all("RUN")[0]
    assert f"useradd --uid {user.split(':')[0]}" in created
    assert f"install --directory --owner jaxserve {cache}" in created
    assert [name for name, _ in image.steps].index("USER") < [name for name, _ in image.steps].index("ENTRYPOINT")


def test_its_environment_is_read(image: Dockerfile) -> None:
    assert {name for name in image.env if name.startswith("JAXSERVE_")} <= set(ENVIRONMENT)


def test_its_command_serves_at_both_doors_on_the_exposed_ports(image: Dockerfile) -> None:
    assert json.loads(image.one("ENTRYPOINT")) == ["python", "-m", "jaxserve.run"]
    options: dict[str, Any] = parse_run(json.loads(image.one("CMD")))
    file = str(options["config"])
    assert file.startswith(IMAGE_FOLDER)
    config = load_config(ROOT / file.removeprefix(IMAGE_FOLDER), options["set_"], environ=image.env).config
    assert [config.serve.grpc.port, config.serve.http.port] == [int(port) for port in image.one("EXPOSE").split()]
    check_serve_config(config.serve)
    assert config.serve.host == "0.0.0.0"
    assert config.runtime.compile_cache == image.env["JAXSERVE_COMPILE_CACHE"]
    assert image.one("STOPSIGNAL") == "SIGTERM"


def test_shipped_configs_that_other_machines_reach_have_the_http_door() -> None:
    """Without it there is neither the API of OpenAI, nor `/metrics`, nor the page."""
    configs = {path.name: load_config(path).config.serve for path in (ROOT / "configs").glob("*.yaml")}
    reached = {name: serve for name, serve in configs.items() if not is_loopback(serve.host)}
    assert "hf.yaml" in reached
    assert [name for name, serve in reached.items() if serve.http.port is None] == []
    for serve in reached.values():
        check_serve_config(serve)


def test_its_health_check_asks_for_life(image: Dockerfile) -> None:
    words = image.one("HEALTHCHECK").split("CMD", 1)
    program, *arguments = json.loads(words[1])
    assert program == "jaxserve"
    name, options = parse_jaxserve(arguments)
    assert name == "health"
    assert options["address"] == f"127.0.0.1:{image.one('EXPOSE').split()[0]}"
    assert options["service"] == LIVE_NAME
