"""A real Ray cluster of its own on this machine, and how all of it is ended: for the fleet test and `scripts/chaos.py`.

Ray runs in processes of its own and is never imported here: its warnings, signal handlers and exit hooks stay out of
the test process, and what is tested is the command line that an operator types.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import yaml

from jaxserve.client import Client

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WAIT_S = 300.0  # for anything that must happen; far more than it takes, for the sake of busy machines
TITLE = "ray::ServeReplica:jaxserve:"


class Fleet:
    """A cluster and the application on it."""

    def __init__(
        self, address: str, head: psutil.Process, folder: Path, serve: Callable[[Mapping[str, object]], None]
    ) -> None:
        self.address = address
        self._head = head
        self._logs = folder / "session_latest" / "logs"
        self._serve = serve

    def scale(self, num_replicas: int) -> None:
        """From now on this many replicas, as an operator does it: the other ones are not restarted."""
        bounds = {"min_replicas": num_replicas, "max_replicas": num_replicas}
        self._serve({"deployments": [{"name": "Engine", "autoscaling_config": bounds}]})

    def deploy(self, args: Mapping[str, object]) -> None:
        """Builds the application again with other `args`: its replicas are replaced."""
        self._serve({"args": dict(args), "deployments": []})

    def log(self, pid: int | None = None) -> str:
        """What a replica has logged, or all of them."""
        files = self._logs.glob("worker-*.err" if pid is None else f"worker-*-{pid}.err")
        return "\n".join(file.read_text(errors="replace") for file in sorted(files))

    def pids(self, deployment: str = "Engine") -> set[int]:
        """Processes of the replicas of a deployment."""
        return self.titled(TITLE + deployment)

    def titled(self, beginning: str) -> set[int]:
        """Processes of this cluster, by the titles that Ray gives them, such as ray::ProxyActor."""
        found = set()
        for process in self._head.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(beginning):
                    found.add(process.pid)
        return found


def environment() -> dict[str, str]:
    """One CPU device, and no word to anybody outside."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return {
        **kept,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray is polite to its neighbours on a machine (niceness 15), and starves where there are others at work.
        "RAY_worker_niceness": "0",
        # A replica that answers no look at it would not answer a request to end either.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # On a busy machine a proxy that takes six seconds to start is not broken either.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(WAIT_S),
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(WAIT_S),
    }


@contextlib.contextmanager
def run_fleet(args: Mapping[str, object], env: Mapping[str, str], log: Path) -> Iterator[Fleet]:
    """`deploy/ray/serve.yaml` with other ports and `args` on a cluster of its own; yields once it serves."""
    head_port, http_port, grpc_port, agent_port = _free_ports(4)
    deployed = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    deployed["http_options"]["port"] = http_port
    deployed["grpc_options"]["port"] = grpc_port
    deployed["applications"][0]["args"] |= args
    folder = tempfile.mkdtemp(prefix="js", dir="/tmp")
    head = [
        "ray",
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--port={head_port}",
        f"--temp-dir={folder}",
        "--num-cpus=4",
    ]
    head += ["--include-dashboard=false", f"--dashboard-agent-listen-port={agent_port}", "--disable-usage-stats"]
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], cwd=ROOT, env=dict(env), stdout=output, stderr=output
            )
        started.append(process)
        return process

    def serve(changes: Mapping[str, object]) -> None:
        deployed["applications"][0] |= changes
        file = log.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(deployed))
        command = ["serve", "run", "--non-blocking", f"--address=127.0.0.1:{head_port}", str(file)]
        assert start(command).wait(WAIT_S) == 0, log.read_text()

    try:
        fleet = Fleet(f"127.0.0.1:{grpc_port}", psutil.Process(start(head).pid), Path(folder), serve)
        wait_until(lambda: b"Ray runtime started" in log.read_bytes(), "Ray runs")
        serve({})
        with Client(fleet.address) as client:
            wait_until(lambda: client.is_serving(timeout_s=5.0), "the fleet serves")
        yield fleet
    finally:
        _kill_with_children(started)
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Fails after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.25)


def _kill_with_children(roots: list[subprocess.Popen[bytes]]) -> None:
    """Ray's own farewell takes half a minute, and nothing of it is wanted."""
    children = []
    for root in roots:
        with contextlib.suppress(psutil.Error):
            children += psutil.Process(root.pid).children(recursive=True)
    for process in (*roots, *children):
        with contextlib.suppress(psutil.Error):
            process.kill()
    for root in roots:
        root.wait(WAIT_S)
    psutil.wait_procs(children, timeout=WAIT_S)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
