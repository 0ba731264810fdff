"""One service of several processes: how each of them starts, and how each of them ends.

The channel between them is in `hosts`.

An end is more than a return: a device may wait for ever for a process that is gone, and JAX would wait for it at the
exit of the interpreter. So a process that has failed tells the others and then exits without waiting for its devices.
"""

import atexit
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

from jaxserve import __version__, assemble
from jaxserve.assemble import Assembly
from jaxserve.assemble.device import Device
from jaxserve.assemble.devices import find_devices
from jaxserve.assemble.page_store import prepare_page_stores
from jaxserve.config import ResolvedConfig
from jaxserve.config.addresses import is_loopback
from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import Config, HostsConfig
from jaxserve.engine import Engine
from jaxserve.errors import EngineStopped, UserError
from jaxserve.hosts import (
    Follower,
    JointStore,
    Leader,
    LeaderRunner,
    LocalStore,
    StepDigest,
    StorePart,
    check_hosts,
    config_facts,
    device_facts,
    follow,
)
from jaxserve.hosts.distributed import check_devices, join_processes, leave_processes
from jaxserve.hosts.settings import read_trust
from jaxserve.offline.console import leave_without_devices
from jaxserve.progress import Progress
from jaxserve.runtime.build import BuildHooks
from jaxserve.serve.key_files import has_key_files

logger = logging.getLogger(__name__)

_FINISH_S = 30.0  # for the last steps of all processes


@contextlib.contextmanager
def lead(resolved: ResolvedConfig, progress: Progress) -> Iterator[Assembly]:
    """Process 0: an assembly whose engine runs on the devices of all processes; they end when the block ends.

    When a process is lost the engine fails with the reason, and the others end with it. Raises ConfigError, HostLost,
    HostMismatch and what `assemble` raises.
    """
    config = resolved.config
    check_hosts(config)
    leader = Leader(
        address=_listen_address(config.hosts),
        num_processes=config.hosts.num_processes,
        heartbeat_s=config.hosts.heartbeat_s,
        check_every=config.hosts.check_every,
        trust=read_trust(config.hosts),
        max_plan_bytes=config.hosts.max_plan_bytes,
    )
    try:
        assembly, runner = _assemble_leading(resolved, leader, progress)
        engine = assembly.engine
        assert isinstance(engine, Engine), "several replicas were refused"
        leader.on_failure(engine.interrupt)
        yield assembly
        if isinstance(engine.failure, EngineStopped):
            raise engine.failure
        if engine.failure is not None:
            raise EngineStopped(f"the engine of process 0 has died: {engine.failure!r}") from engine.failure
        runner.close(_FINISH_S)
        leader.finish(_FINISH_S)
        leader.close()
        leave_processes()
    except BaseException as error:
        _leave_at_once(error)
        leader.give_up(error)
        leader.close()
        raise


def _assemble_leading(resolved: ResolvedConfig, leader: Leader, progress: Progress) -> tuple[Assembly, LeaderRunner]:
    hosts = resolved.config.hosts
    progress.begin(f"waiting for {hosts.num_processes - 1} other processes")
    leader.meet("join", _facts(resolved.config), {}, hosts.join_s)
    join_processes(hosts)
    find_devices(resolved.config)
    check_devices(resolved.config.parallel)
    runners: list[LeaderRunner] = []

    def make_devices(config: Config, progress: Progress) -> list[Device]:
        digest = StepDigest()
        device = _build(config, progress, digest, lambda numbers: leader.meet("memory", {}, numbers, None))
        progress.begin("waiting until all processes are ready")
        leader.meet("ready", device_facts(device.runner.limits, device.facts), {}, None)
        runner = LeaderRunner(device.runner, leader, digest, heartbeat_s=hosts.heartbeat_s, stall_s=hosts.stall_s)
        runners.append(runner)
        joint = functools.partial(join_stores, leader, runner, hosts.num_processes)
        return [dataclasses.replace(device, runner=runner, join_stores=joint)]

    assembly = assemble.assemble(resolved, progress=progress, make_devices=make_devices)
    return assembly, runners[0]


def join_stores(leader: Leader, runner: LeaderRunner, num_processes: int, store: LocalStore) -> JointStore:
    """The store of all processes, of which `store` is that of process 0. It can be made once."""
    joint = JointStore(store, num_processes=num_processes, send=leader.order, in_order=runner.in_order)
    leader.on_outcome(joint.take)
    leader.on_failure(joint.fail)
    return joint


def attend(resolved: ResolvedConfig, progress: Progress, on_ready: Callable[[], None] = lambda: None) -> int:
    """Every other process: runs the plans that process 0 sends until it ends the service. Returns the exit code 0.

    `on_ready` is called when the start is over; `progress` shows the start.

    Raises ConfigError, HostLost, HostMismatch, PlanCorrupt and what building the device raises.
    """
    config, hosts = resolved.config, resolved.config.hosts
    check_hosts(config)
    page_stores = prepare_page_stores(config)
    link = Follower(
        address=f"{_coordinator_host(hosts)}:{hosts.plan_port}",
        process_id=hosts.process_id,
        num_processes=hosts.num_processes,
        host=socket.gethostname(),
        heartbeat_s=hosts.heartbeat_s,
        join_s=hosts.join_s,
        trust=read_trust(hosts),
        max_plan_bytes=hosts.max_plan_bytes,
    )
    try:
        progress.begin("waiting for process 0")
        link.meet("join", _facts(config), {})
        join_processes(hosts)
        find_devices(config)
        check_devices(config.parallel)
        digest = StepDigest()
        device = _build(config, progress, digest, lambda numbers: link.meet("memory", {}, numbers))
        part = None
        if page_stores is not None:
            part = StorePart(assemble.open_store(page_stores, device), link.answer)
        progress.begin("waiting until all processes are ready")
        link.meet("ready", device_facts(device.runner.limits, device.facts), {})
        on_ready()
        logger.info("process %d of %d follows %s", hosts.process_id, hosts.num_processes, hosts.coordinator)
        _outlive_one_signal(rereads=has_key_files(config.serve))
        follow(
            device.runner,
            link,
            digest,
            heartbeat_s=hosts.heartbeat_s,
            check_every=hosts.check_every,
            finish_s=_FINISH_S,
            store=part,
        )
        if part is not None:
            part.close()
        link.close()
        leave_processes()
    except BaseException as error:
        _leave_at_once(error)
        link.give_up(error)
        link.close()
        raise
    return 0


def _build(
    config: Config,
    progress: Progress,
    digest: StepDigest,
    agree: Callable[[Mapping[str, int]], Mapping[str, int]],
) -> Device:
    hooks = BuildHooks(one_of_many=True, on_buffer=digest.observe, agree=agree)
    [device] = assemble.build_devices(config, progress, hooks=hooks)
    # A process keeps its own shards: stores that several processes reach must not take those of one for another's.
    hosts = config.hosts
    part = f"{device.page_layout}, part {hosts.process_id} of {hosts.num_processes}"
    return dataclasses.replace(device, page_layout=part)


def _facts(config: Config) -> dict[str, str]:
    return config_facts(config, resolve_model_path(config.model.path), __version__)


def _coordinator_host(hosts: HostsConfig) -> str:
    assert hosts.coordinator is not None
    return hosts.coordinator.rpartition(":")[0]


def _listen_address(hosts: HostsConfig) -> str:
    """All interfaces, as for JAX's own port; the loopback alone when all processes are on one host."""
    assert hosts.coordinator is not None
    host = _coordinator_host(hosts) if is_loopback(hosts.coordinator.rpartition(":")[0]) else "[::]"
    return f"{host}:{hosts.plan_port}"


def _outlive_one_signal(*, rereads: bool) -> None:
    """Ignores one signal: a terminal or an orchestrator ends all processes at once, but process 0 drains first.
    `rereads`: for process 0, SIGHUP is no reason to end, and here it is ignored."""

    def take(number: int, frame: object) -> None:
        logger.warning("%s: waiting for process 0 to end; once more ends this process", signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    if rereads:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # after nohup as well
    for number in (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,))):
        signal.signal(number, take)


def _leave_at_once(error: BaseException) -> None:
    """From now on the exit of the interpreter waits for no device, and for no other process."""
    code = 2 if isinstance(error, UserError) else 1

    atexit.register(leave_without_devices, code)
