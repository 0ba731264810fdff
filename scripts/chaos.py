"""Kills, halts and upgrades servers under load and compares every stream with one that nothing disturbed.

    python scripts/chaos.py --json chaos.json                  # through a router
    python scripts/chaos.py --door client --json chaos.json    # the client library alone, before all servers
    python scripts/chaos.py --door ray --json chaos.json       # a fleet on a Ray cluster of this machine
    python scripts/chaos.py --upgrades 1 --json chaos.json     # every server shut down and started again, in turn
    python scripts/chaos.py --cancels 0.33 --json chaos.json   # a third of the streams left by their clients

Three servers of the demo model, each a process of its own, answer streams: greedy and seeded ones, several answers of
one prompt, penalties, stop strings, JSON schemas and tool calls. Meanwhile servers are killed (SIGKILL) and started
again on their ports, and halted (SIGSTOP) for longer than a router waits. An upgrade instead shuts one server after the
other down (SIGTERM), and starts the next one when the last is well again. The first answers, from one server that is
left alone, say what every stream must be. The report counts streams that ended otherwise, and tokens that came twice or
not at all; the recovery of a stream is the time between its last token before it moved and its first one after.

With `--door ray` the servers are replicas of `deploy/ray/serve.yaml`, on a cluster of `tests/fleet/ray_fleet.py`, which
Ray starts again by itself. The report then also counts by which of Ray's errors its ingress has lost them, and moves
that were left to the client library. Ray looks for a replica that is halted much later than a router does, so a stream
of a short halt only pauses. `--proxies`, `--ingresses` and `--controllers` kill processes of Ray Serve itself: that
which holds the clients' connections, that which routes, and that which starts the others.

`--streams` says how the kills, halts and upgrades are spread, and how many streams there are at least: the load goes on
until the last of them is done and its server serves again, at most `--at-most-s` seconds.

Exit code 1: something was lost, repeated or changed, or not all servers were killed, halted and upgraded in that time.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import write_record

from jaxserve.api import SamplingParams, StructuredOutput
from jaxserve.client import CallOptions, Client, Completion, RequestFailed, Retries, collect_replies
from jaxserve.serve.gen import inference_pb2 as pb

if TYPE_CHECKING:
    from ray_fleet import Fleet

START_S = 600.0
_FIRST_UPGRADE = 0.05  # of the streams have ended; the others follow one another
PROMPTS = (
    "Once upon a time there was a little fox",
    "One day a girl named Lily",
    "What is 12+7?",
    "The bird and the cat",
)
_OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "find"]}, "arguments": _OBJECT},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
_LEAVES = re.compile(
    r"request '(\w+)'(?: leaves replica \S+| lost its server|: (?:a )?replica(?: \S+)? is lost on attempt \d+,)"
    r" after (\d+) tokens"
)
_RAY_ERROR = re.compile(r"is lost on attempt \d+, after \d+ tokens: (\w+),")


def samplings(num_tokens: int) -> list[SamplingParams]:
    """One of each kind."""
    hot: dict[str, Any] = {"temperature": 1.0, "max_tokens": num_tokens}
    form = {"json_schema": _OBJECT}, {"json_schema": _CALL}
    return [
        SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        SamplingParams(seed=1, ignore_eos=True, **hot),
        SamplingParams(seed=2, ignore_eos=True, presence_penalty=0.5, repetition_penalty=1.2, **hot),
        SamplingParams(seed=3, n=2, stop=["the end", "lived happily"], min_tokens=8, ignore_eos=True, **hot),
        SamplingParams(seed=4, structured=StructuredOutput.from_dict(form[0]), **hot),
        SamplingParams(seed=5, structured=StructuredOutput.from_dict(form[1]), **hot),
        SamplingParams(seed=6, logprobs=2, top_p=0.9, ignore_eos=True, **hot),
    ]


class Server:
    """One server process on a port of its own, and its successors there. Mutated by the thread of the chaos."""

    def __init__(self, number: int, log_dir: Path, max_rows: int, upgrade: dict[str, Any]) -> None:
        """`upgrade`: settings of servers that are upgraded."""
        self._upgrade = upgrade
        self.port = free_port()
        self.address = self.name = f"127.0.0.1:{self.port}"
        self._log = (log_dir / f"server{number}.log").open("w")
        self._max_rows = max_rows
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "jaxserve.run"]
        for name, value in {**sizes(self._max_rows), "serve.grpc.port": self.port, **self._upgrade}.items():
            command += ["--set", f"{name}={json.dumps(value)}"]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def kill_and_start(self) -> None:
        self.kill()
        self.process = self._start()

    def halt(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def upgrade(self) -> None:
        """Shuts it down, and starts it again."""
        self.process.terminate()
        if (code := self.process.wait()) != 0:
            raise SystemExit(f"server {self.address} ended with {code}; see {self._log.name}")
        self.process = self._start()
        self.wait()

    def wait(self) -> None:
        """Until it serves."""
        end_s = time.monotonic() + START_S
        with Client(self.address) as client:
            while not client.is_serving(timeout_s=2.0):
                if self.process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(f"server {self.address} does not start; see {self._log.name}")
                time.sleep(0.1)

    @property
    def serves(self) -> bool:
        with Client(self.address) as client:
            return client.is_serving(timeout_s=2.0)


class RayReplica:
    """One of the replicas of a fleet on Ray, the k-th of those that serve: Ray starts another where one was killed."""

    def __init__(self, number: int, fleet: "Fleet") -> None:
        self.address = fleet.address
        self._number = number
        self._fleet = fleet

    def _ready(self) -> list[int]:
        return sorted(pid for pid in self._fleet.pids() if " serves " in self._fleet.log(pid))

    @property
    def name(self) -> str:
        """The process that it is now."""
        return f"process {self._ready()[self._number]}"

    def kill_and_start(self) -> None:
        pid = self._ready()[self._number]
        os.kill(pid, signal.SIGKILL)
        while pid in self._fleet.pids():  # else the next kill might be of the same process
            time.sleep(0.02)

    def halt(self, seconds: float) -> None:
        pid = self._ready()[self._number]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # Ray may have killed it
            os.kill(pid, signal.SIGCONT)

    @property
    def serves(self) -> bool:
        return self._number < len(self._ready())


class RayPart:
    """The one process of Ray Serve with some title; Ray starts it again where it was killed."""

    def __init__(self, title: str, fleet: "Fleet") -> None:
        self._title = title
        self._fleet = fleet

    @property
    def name(self) -> str:
        return f"{self._title}, process {self._pid()}"

    def _pid(self) -> int:
        while not (found := self._fleet.titled(self._title)):
            time.sleep(0.1)
        return min(found)

    def kill_and_start(self) -> None:
        os.kill(self._pid(), signal.SIGKILL)


RAY_PARTS = {  # the titles of their processes
    "proxy": "ray::ProxyActor",
    "ingress": "ray::ServeReplica:jaxserve:Ingress",
    "controller": "ray::ServeController",
}
DEEDS = ("kill", "stop", "upgrade", *RAY_PARTS)


def sizes(max_rows: int) -> dict[str, Any]:
    """Settings of every server."""
    return {
        "model.max_len": 384, "cache.num_pages": 40 * max_rows, "sched.max_rows": max_rows,
        "sched.max_step_tokens": 64, "runtime.token_buckets": [64], "runtime.row_buckets": [max_rows],
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class Stream:
    """One stream as its client saw it: when it had how many tokens, and the messages."""

    which: int
    replies: list[pb.GenerateResponse] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    error: str = ""
    cancelled: bool = False  # its client left before the end

    @property
    def counts(self) -> list[int]:
        """Tokens of all sequences after each message."""
        found, total = [], 0
        for reply in self.replies:
            total += len(reply.token_ids)
            found.append(total)
        return found


def result_of(completion: Completion) -> list[tuple[Any, ...]]:
    """What no death may change. Log-probabilities to three digits: a prompt rounds otherwise than single tokens."""
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, [round(e.logprob, 3) for e in one.logprobs])
        for one in completion.outputs
    ]


class Load:
    """Clients on threads, each with the next stream as soon as its last one has ended.

    Streams go on until `finish`, and there are `least` of them at least.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        kinds: Sequence[tuple[str, SamplingParams]],
        least: int,
        threads: int,
        cancels: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`cancels`: the share of the streams that their clients leave, after a random number of messages."""
        self._cancels = cancels
        self._seed = seed
        self.streams: list[Stream] = []
        self.least = least
        self.num_ended = 0
        self._kinds = kinds
        self._lock = threading.Lock()
        self._finishing = False
        retries = Retries(attempts=40, longest_wait_s=2.0)
        self._clients = [Client(address, retries=retries) for address in addresses]
        self._threads = [threading.Thread(target=self._work, args=(k,), daemon=True) for k in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def finish(self) -> None:
        """Starts no further streams than the least number."""
        with self._lock:
            self._finishing = True

    def _next(self) -> tuple[int, Stream] | None:
        """The next stream and its number, or None: the thread ends."""
        with self._lock:
            number = len(self.streams)
            if self._finishing and number >= self.least:
                return None
            self.streams.append(Stream(number % len(self._kinds)))
            return number, self.streams[-1]

    def _work(self, thread: int) -> None:
        client = self._clients[thread % len(self._clients)]
        while (entry := self._next()) is not None:
            number, stream = entry
            prompt, sampling = self._kinds[stream.which]
            rng = random.Random(f"{self._seed} {number}")
            leaves_after = rng.randrange(sampling.max_tokens or 1) if rng.random() < self._cancels else None
            replies = client.generate(prompt, sampling, CallOptions(request_id=f"r{number}"))
            try:
                for reply in replies:
                    stream.replies.append(reply)
                    stream.times_s.append(time.monotonic())
                    if leaves_after is not None and len(stream.replies) > leaves_after and not reply.HasField("usage"):
                        stream.cancelled = True
                        replies.close()
                        break
            except RequestFailed as error:
                stream.error = f"{error.status}: {error}"
            with self._lock:
                self.num_ended += 1


def disturb(
    servers: Sequence[Any], parts: Mapping[str, RayPart], load: Load, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Spreads the kills and halts evenly over the least number of streams, and waits until all servers serve again.

    Returns what was done when. `parts`: of Ray Serve, by the names of the deeds that kill them.
    """
    rng = random.Random(args.seed)
    deeds = ["kill"] * args.kills + ["stop"] * args.stops
    deeds += ["proxy"] * args.proxies + ["ingress"] * args.ingresses + ["controller"] * args.controllers
    rng.shuffle(deeds)
    deeds += ["upgrade"] * args.upgrades * len(servers)
    done: list[dict[str, Any]] = []
    begun_s = time.monotonic()
    end_s = begun_s + args.at_most_s

    def going() -> bool:
        return load.running and time.monotonic() < end_s

    for number, deed in enumerate(deeds, start=1):
        share = _FIRST_UPGRADE if deed == "upgrade" else number / (len(deeds) + 1)
        due = int(load.least * share)
        while load.num_ended < due and going():
            time.sleep(0.05)
        well = [server for server in servers if server.serves]
        while len(well) < 2 and going():  # else all three could be starting at once, and the test be of patience
            time.sleep(0.2)
            well = [server for server in servers if server.serves]
        if not going():
            break
        if deed in parts:
            server = parts[deed]
        else:
            server = servers[(number - 1) % len(servers)] if deed == "upgrade" else rng.choice(well)
        done.append({"deed": deed, "server": server.name, "at_s": round(time.monotonic() - begun_s, 3)})
        print(f"{done[-1]}, {load.num_ended} streams have ended", flush=True)
        if deed == "upgrade":
            server.upgrade()
            done[-1]["seconds"] = round(time.monotonic() - begun_s - done[-1]["at_s"], 3)
        elif deed == "stop":
            server.halt(args.halt_s)
        else:
            server.kill_and_start()
    while going() and not all(server.serves for server in servers):
        time.sleep(0.2)
    return done


@contextlib.contextmanager
def routing(servers: Sequence[Server], log_path: Path) -> Iterator[str]:
    """A router before them, and its address."""
    port = free_port()
    command = [sys.executable, "-m", "jaxserve", "route", "--port", str(port), "--policy", "least_load"]
    for server in servers:
        command += ["--to", server.address]
    command += ["--set", "route.health_interval_s=0.2", "--set", "route.health_timeout_s=2", "--set", "route.retries=5"]
    with log_path.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with Client(f"127.0.0.1:{port}") as client:
                while not client.is_serving(timeout_s=2.0):
                    time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


@contextlib.contextmanager
def on_ray(args: argparse.Namespace, log_path: Path) -> Iterator["Fleet"]:
    """A fleet of as many replicas."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/fleet"))  # where a cluster for tests is
    from ray_fleet import environment, run_fleet

    overrides = {**sizes(args.rows), "cache.memory_bytes": None, "route.policy": "least_load", "route.retries": 5}
    numbers = {"min_replicas": args.servers, "max_replicas": args.servers}
    numbers |= {"health_check_period_s": 1.0, "health_check_timeout_s": 3.0}
    with run_fleet({"overrides": overrides, **numbers}, environment(), log_path) as fleet:
        replicas = [RayReplica(number, fleet) for number in range(args.servers)]
        while not all(replica.serves for replica in replicas):  # the fleet serves when one does
            time.sleep(0.5)
        yield fleet


def recoveries(
    streams: Sequence[Stream], log: str, deeds: Sequence[dict[str, Any]], begun_s: float
) -> dict[str, list[float]]:
    """Of each kind of deed, the seconds between the last token before each move and the first one after, sorted."""
    found: dict[str, list[float]] = {deed: [] for deed in DEEDS}
    for name, num_tokens in _LEAVES.findall(log):
        stream = streams[int(name.removeprefix("r"))]
        counts = stream.counts
        after = next((k for k, count in enumerate(counts) if count > int(num_tokens)), None)
        if not after:
            continue  # the stream had no token before it moved, or none was left
        last_s, next_s = stream.times_s[after - 1], stream.times_s[after]
        cause = [deed["deed"] for deed in deeds if begun_s + deed["at_s"] < next_s]
        if cause:
            found[cause[-1]].append(next_s - last_s)
    return {deed: sorted(times_s) for deed, times_s in found.items()}


def judge(streams: Sequence[Stream], expected: Sequence[list[tuple[Any, ...]]]) -> dict[str, Any]:
    """Counts the streams, and the tokens, that are not as they must be."""
    left = [stream for stream in streams if stream.cancelled]
    failed = [stream.error or "no message came" for stream in streams if stream.error or not stream.replies]
    lost = repeated = changed = wrong = 0
    for stream in streams:
        if stream.error or not stream.replies or stream.cancelled:
            continue
        found = result_of(collect_replies(stream.replies))
        wrong += found != expected[stream.which]
        for mine, right in zip(found, expected[stream.which], strict=True):
            lost += max(0, len(right[0]) - len(mine[0]))
            repeated += max(0, len(mine[0]) - len(right[0]))
            changed += sum(a != b for a, b in zip(mine[0], right[0], strict=False))
    return {
        "streams": len(streams),
        "streams_cancelled": len(left),
        "streams_failed": len(failed),
        "errors": failed[:5],
        "streams_wrong": wrong,
        "tokens": sum(stream.counts[-1] for stream in streams if stream.replies),
        "tokens_lost": lost,
        "tokens_repeated": repeated,
        "tokens_changed": changed,
    }


def quantile(values: Sequence[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(share * len(values)))], 3) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=("router", "client", "ray"), default="router")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1000, help="At least.")
    parser.add_argument("--at-most-s", type=float, default=3600.0, help="Nothing more is disturbed then.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--upgrades", type=int, default=0, help="Of every server.")
    parser.add_argument("--proxies", type=int, default=0, help="Kills of Ray Serve's proxy.")
    parser.add_argument("--ingresses", type=int, default=0, help="Kills of the ingress on Ray.")
    parser.add_argument("--controllers", type=int, default=0, help="Kills of Ray Serve's controller.")
    parser.add_argument("--cancels", type=float, default=0.0, help="Share of the streams that their clients leave.")
    parser.add_argument("--drain-s", type=float, default=2.0, help="serve.drain_s: seconds of streams in an upgrade.")
    parser.add_argument("--halt-s", type=float, default=20.0, help="Seconds of a SIGSTOP.")
    parser.add_argument("--threads", type=int, default=48, help="Streams at once.")
    parser.add_argument("--tokens", type=int, default=96, help="Of a stream at most.")
    parser.add_argument("--rows", type=int, default=16, help="Of each server.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.door == "ray" and args.upgrades:
        parser.error("--door ray has no --upgrades: it is Ray that replaces its replicas")
    if args.door != "ray" and (args.proxies or args.ingresses or args.controllers):
        parser.error("--proxies, --ingresses and --controllers are of Ray Serve: give --door ray")
    own_log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: own_log.append(record.getMessage())
    logging.getLogger("jaxserve.client").addHandler(handler)
    logging.getLogger("jaxserve.client").setLevel(logging.INFO)
    kinds = [(prompt, sampling) for prompt in PROMPTS for sampling in samplings(args.tokens)]
    with tempfile.TemporaryDirectory(prefix="jaxserve-chaos-") as name, contextlib.ExitStack() as stack:
        log_dir = Path(name)
        servers: list[Any] = []
        fleet = None
        upgrade: dict[str, Any] = {}
        if args.upgrades:  # what a server has of its streams is found by those that go on with them
            (log_dir / "pages").mkdir(mode=0o700)
            store = {"kind": "file", "location": str(log_dir / "pages"), "max_bytes": 2**30}
            upgrade = {"serve.drain_s": args.drain_s, "cache.host_bytes": 2**26}
            upgrade |= {f"store.{name}": value for name, value in store.items()}
        if args.door == "ray":
            fleet = stack.enter_context(on_ray(args, log_dir / "ray.log"))
            servers += [RayReplica(number, fleet) for number in range(args.servers)]
        for number in range(len(servers), args.servers):
            servers.append(Server(number, log_dir, args.rows, upgrade))
            stack.callback(lambda server=servers[-1]: server.kill())
            servers[-1].wait()  # one after the other: the first compiles, the others read what it stored
        with Client(servers[0].address) as direct:
            expected = [result_of(direct.complete(prompt, sampling)) for prompt, sampling in kinds]
        router_log = log_dir / "router.log"
        if fleet is not None:
            addresses = [fleet.address]
        elif args.door == "router":
            addresses = [stack.enter_context(routing(servers, router_log))]
        else:  # gRPC takes the first that answers, so each client has another first
            named = [server.address for server in servers]
            addresses = ["ipv4:" + ",".join([*named[k:], *named[:k]]) for k in range(len(named))]
        print(f"{args.streams} streams at least through {addresses}", flush=True)
        begun_s = time.monotonic()
        load = Load(addresses, kinds, args.streams, args.threads, args.cancels, args.seed)
        parts = {} if fleet is None else {deed: RayPart(title, fleet) for deed, title in RAY_PARTS.items()}
        done = disturb(servers, parts, load, args)
        load.finish()
        while load.running:
            time.sleep(0.1)
        wall_s = time.monotonic() - begun_s
        moved_by_clients = _LEAVES.findall("\n".join(own_log))
        log = "\n".join(own_log) + (router_log.read_text() if router_log.exists() else "")
        log += "" if fleet is None else fleet.log()
    moved = recoveries(load.streams, log, done, begun_s)
    everything = sorted(itertools.chain.from_iterable(moved.values()))
    asked = args.kills + args.stops + args.upgrades * args.servers + args.proxies + args.ingresses + args.controllers
    report = {
        "wall_s": round(wall_s, 1),
        "done": collections.Counter(one["deed"] for one in done),
        **judge(load.streams, expected),
        "moves": len(_LEAVES.findall(log)),
        "moves_by_clients": len(moved_by_clients),
        **({} if fleet is None else {"lost_by_ray_error": collections.Counter(_RAY_ERROR.findall(log))}),
        "longest_pause_s": max(round(b - a, 3) for one in load.streams for a, b in itertools.pairwise(one.times_s)),
        "recovery_p50_s": quantile(everything, 0.5),
        "recovery_p99_s": quantile(everything, 0.99),
        "recovery_max_s": quantile(everything, 1.0),
        **{f"recovery_after_{deed}_p50_s": quantile(times_s, 0.5) for deed, times_s in moved.items() if times_s},
        **{f"recovery_after_{deed}_p99_s": quantile(times_s, 0.99) for deed, times_s in moved.items() if times_s},
        "deeds": done,
    }
    print(json.dumps(report, indent=1))
    if args.json is not None:
        write_record(args.json, report)
    return int(report["streams_failed"] or report["streams_wrong"] or len(done) < asked)


if __name__ == "__main__":
    sys.exit(main())
