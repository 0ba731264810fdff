"""What the tests of several hosts share: `python -m jaxserve.run` in several processes, and a fake device for them.

Run as a program it is that command on the fake device, with everything real but JAX. Its first argument is JSON:
`corrupt_at` damages the plan of that step after it has arrived, `hang_at` never ends that step, `num_pages` is what
this process has room for, `facts` are told of the device, `step_s` is the time of a step. With `real` nothing is fake,
but `corrupt_at` still works, and pages in host memory are loaded whatever that takes: a step of a small model is so
short that computing may win by the clock of a busy machine.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxserve.sched import InFlight, Limits, Runner, StepPlan, StepResult
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits

WAIT_S = 120.0  # for anything that must happen; far more than it takes, for the sake of busy machines
COMPILE_S = 240.0


class ObservedRunner:
    """A fake device that tells what it was fed, and may be fed something else than was sent."""

    def __init__(self, limits: Limits, on_buffer: Any, behaviour: Mapping[str, Any]) -> None:
        self._inner = FakeRunner(limits, vocab_size=128, keep_plans=False)
        self._on_buffer = on_buffer
        self._behaviour = behaviour

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        if plan.step_id == self._behaviour.get("corrupt_at"):
            plan = damaged(plan)
        self._on_buffer(plan.to_json().encode())
        hangs = plan.step_id == self._behaviour.get("hang_at")
        return _Slow(self._inner.dispatch(plan), self._behaviour.get("step_s", 0.0), hangs)


class DamagingRunner:
    """Any device, whose plan of one step is damaged."""

    def __init__(self, inner: Runner, corrupt_at: int) -> None:
        self._inner = inner
        self._corrupt_at = corrupt_at

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        return self._inner.dispatch(damaged(plan) if plan.step_id == self._corrupt_at else plan)


class _Slow:
    def __init__(self, inner: InFlight, step_s: float, hangs: bool) -> None:
        self._inner = inner
        self._step_s = step_s
        self._hangs = hangs

    def result(self) -> StepResult:
        time.sleep(self._step_s)
        if self._hangs:
            threading.Event().wait()
        return self._inner.result()


def damaged(plan: StepPlan) -> StepPlan:
    """The first token of the first prompt of the step is another one; what the step draws stays the same."""
    chunk = plan.chunks[0]
    assert len(chunk.token_ids) > 1, "the last token decides what is drawn"
    assert not plan.setups[0].token_ids, "the prompt travels in the chunk alone"
    token_ids = ((chunk.token_ids[0] + 1) % 128, *chunk.token_ids[1:])
    return dataclasses.replace(plan, chunks=(chunk._replace(token_ids=token_ids), *plan.chunks[1:]))


class Process:
    """One process of a service. `log` is its stderr so far, `out` its stdout."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 (closed by `kill`)
        out, log = self._files
        self.popen = subprocess.Popen(command, stdout=out, stderr=log, env={**os.environ, **environment})

    @property
    def out(self) -> str:
        return self._read(0)

    @property
    def log(self) -> str:
        return self._read(1)

    def _read(self, which: int) -> str:
        file = self._files[which]
        return os.pread(file.fileno(), 2**20, 0).decode()

    def wait_for_exit(self, timeout_s: float = WAIT_S) -> int:
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.popen.pid} does not end: {self.log}") from None

    def wait_for(self, text: str, timeout_s: float = WAIT_S) -> str:
        """The first line on stdout or stderr that holds `text`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for line in (self.out + self.log).splitlines():
                if text in line:
                    return line
            code = self.popen.poll()
            assert code is None and time.monotonic() < deadline_s, f"no {text!r} (exit code {code}): {self.log}"
            time.sleep(0.02)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait(WAIT_S)
        for file in self._files:
            file.close()


class Service:
    """All processes of one service; process 0 serves on `address` or answers prompts."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes

    @property
    def address(self) -> str:
        """Of the gRPC door, once it is open."""
        return self.processes[0].wait_for("serving gRPC on").rpartition(" ")[2]


PROGRAM = (sys.executable, str(Path(__file__)))


@contextlib.contextmanager
def service(
    *behaviours: Mapping[str, Any],
    arguments: tuple[str, ...] = ("--set", "serve.grpc.port=0"),
    own_arguments: Mapping[int, tuple[str, ...]] | None = None,
    heartbeat_s: float = WAIT_S,
    environment: Mapping[str, str] | None = None,
    leader_after: str | None = None,
) -> Iterator[Service]:
    """One process per behaviour, with the same command but for their numbers; all dead at the end of the block.

    `leader_after`: process 0 starts once all others have logged this.
    """
    coordinator, plans = free_ports(2)
    settings = {"hosts.plan_port": plans, "hosts.heartbeat_s": heartbeat_s, "hosts.join_s": WAIT_S}
    options = [item for name, value in settings.items() for item in ("--set", f"{name}={value}")]
    with contextlib.ExitStack() as stack:
        secret = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        secret.write("the secret of this service\n")
        secret.flush()

        def start(process_id: int) -> Process:
            own = (own_arguments or {}).get(process_id, ())
            process = Process(
                [*PROGRAM, json.dumps(behaviours[process_id]), *options, *arguments, *own],
                {
                    "JAXSERVE_COORDINATOR": f"127.0.0.1:{coordinator}",
                    "JAXSERVE_NUM_PROCESSES": str(len(behaviours)),
                    "JAXSERVE_PROCESS_ID": str(process_id),
                    "JAXSERVE_HOSTS_SECRET_FILE": secret.name,
                    **(environment or {}),
                },
            )
            stack.callback(process.kill)
            return process

        if leader_after is None:
            processes = [start(process_id) for process_id in range(len(behaviours))]
        else:
            others = [start(process_id) for process_id in range(1, len(behaviours))]
            for process in others:
                process.wait_for(leader_after)
            processes = [start(0), *others]
        yield Service(processes)


def free_ports(count: int) -> list[int]:
    """Ports of this host that nothing listened on a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def main() -> int:
    behaviour = json.loads(sys.argv[1])
    from jaxserve import assemble, run
    from jaxserve.assemble import many_hosts

    if behaviour.get("real"):
        build_real = assemble.build_devices

        def build_damaging(config: Any, progress: Any, *, hooks: Any) -> list[assemble.Device]:
            [device] = build_real(config, progress, hooks=hooks)
            return [dataclasses.replace(device, runner=DamagingRunner(device.runner, behaviour.get("corrupt_at", -1)))]

        create_real = assemble.create_scheduler

        def create_loading(*args: Any, **options: Any) -> Any:
            scheduler: Any = create_real(*args, **options)
            scheduler.memory.costs.note_commit = lambda *_: None
            return scheduler

        assemble.build_devices, assemble.create_scheduler = build_damaging, create_loading
        return run.main(sys.argv[2:])

    def build_devices(config: Any, progress: Any, *, hooks: Any) -> list[assemble.Device]:
        pages = hooks.agree({"pages": behaviour.get("num_pages", 256), "slots": 0})["pages"]
        limits = make_limits(max_rows=4, num_pages=pages, max_model_len=512)
        device = assemble.Device(
            runner=ObservedRunner(limits, hooks.on_buffer, behaviour),
            vocab_size=ByteTokenizer.vocab_size,
            eos_token_ids=(257,),
            sampling_defaults={"temperature": 0.0},
            facts=behaviour.get("facts", {}),
        )
        return [device]

    assemble.build_devices = build_devices
    assemble.build_tokenizer = lambda config: ByteTokenizer()
    for name in ("join_processes", "check_devices"):
        setattr(many_hosts, name, lambda settings: None)
    many_hosts.leave_processes = lambda: None
    return run.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
