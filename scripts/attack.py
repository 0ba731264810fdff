"""Attacks the demo server with one key, and measures what another key has of it meanwhile.

    python scripts/attack.py --list                              # the kinds of attack
    python scripts/attack.py --kind stop_strings --kind queue
    python scripts/attack.py --all --seconds 10 --json attacks.json
    python scripts/attack.py --fuzz 2000                         # gRPC messages that reach the handlers

The server is a process of its own on this machine, with two keys, batches and stored answers in a temporary folder;
nothing goes to any other address. For each kind another key sends a chat of four tokens every 0.15 s, and asks
for /health beside it: first alone, then during the attack. The table has the others' median and worst chat without and
with the attack, the worst answer of /health, the memory of the server, when the server was idle again after the
attacker had left, and what the attacker was told. docs/attacks.md says what the figures mean.

Exit code 1: a server ended, wrote a traceback, or was not idle again; or, with `--most-s`, others waited longer.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from attack_caller import HOST, PATIENCE_S, Caller, ask, summary
from attack_kinds import KINDS, Kind, run_kind
from record import write_record

START_S = 600.0
SETTLE_S = 60.0  # in which a server must be idle again
GRACE_S = 20.0  # beyond its seconds, after which an attacker is ended
KEYS = "sk-attacker", "sk-other"
_REFUSED = re.compile(r'^jaxserve:refused_total\{door="(\w+)".*reason="(\w+)".*\} (\S+)$', re.MULTILINE)
_HELD_UP = re.compile(r'^jaxserve:event_loop_slow_callbacks_total\{.*where="([^"]+)".*\} (\S+)$', re.MULTILINE)
_LOAD = re.compile(r"^jaxserve:num_requests_(?:running|waiting|unstarted)\{.*\} (\S+)$", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A demo server for an attack: `text` or `vision`. Ends with the block."""

    def __init__(self, name: str, folder: Path) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self.log = folder / f"{name}.log"
        keys, batches = folder / "keys", folder / f"{name}-batches"
        keys.write_text("\n".join(KEYS) + "\n")
        keys.chmod(0o600)
        batches.mkdir(exist_ok=True)
        settings = {
            "model.path": {"text": "demo", "vision": "demo-vision"}[name],
            "model.name": "demo",
            "serve.host": HOST,
            "serve.grpc.port": self.grpc_port,
            "serve.grpc.tokens_file": str(keys),
            "serve.http.port": self.http_port,
            "serve.http.api_keys_file": str(keys),
            "serve.http.batch_dir": str(batches),
            "serve.tenants.named": {"slow": {"requests_per_s": 0.01}},
        }
        config = Path(__file__).parents[1] / "configs/demo.yaml"
        command = [sys.executable, "-m", "jaxserve", "run", "--config", str(config)]
        for setting, value in settings.items():
            command += ["--set", f"{setting}={json.dumps(value)}"]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        """Waits until it serves and has compiled what it wants to. Raises SystemExit."""
        try:
            end_s = time.monotonic() + START_S
            while ask(self.http_port, "/health", KEYS[1], patience_s=2.0).status != 200:
                if not self.lives or time.monotonic() > end_s:
                    raise SystemExit(f"the server does not start:\n{self.log.read_text()[-2000:]}")
                time.sleep(0.2)
            for _ in range(3):  # its first chats, which compile
                ask(self.http_port, "/v1/chat/completions", KEYS[1], {"messages": [{"role": "user", "content": "a"}]})
            self.settle(START_S)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> float:
        """SIGTERM, and SIGKILL where that does not end it. Returns the seconds that it took."""
        begun_s = time.monotonic()
        if self.lives:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SETTLE_S)
            self._process.kill()
        self._process.wait()
        return time.monotonic() - begun_s

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def tracebacks(self) -> int:
        """In its log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def last_traceback(self) -> str:
        """The end of the log from there on."""
        return "Traceback" + self.log.read_text(errors="replace").rpartition("Traceback")[2][:3000]

    def metrics(self) -> str:
        """What /metrics says, "" while there is no answer."""
        call = urllib.request.Request(
            f"http://{HOST}:{self.http_port}/metrics", headers={"authorization": f"Bearer {KEYS[1]}"}
        )
        try:
            with urllib.request.urlopen(call, timeout=PATIENCE_S) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def refused(self) -> collections.Counter[str]:
        """Refusals since the start, by door and reason."""
        found = _REFUSED.findall(self.metrics())
        return collections.Counter({f"{door} {reason}": int(float(count)) for door, reason, count in found})

    def held_up(self) -> collections.Counter[str]:
        """Times that the event loop was held up since the start, by the function that ran."""
        return collections.Counter({where: int(float(count)) for where, count in _HELD_UP.findall(self.metrics())})

    def settle(self, at_most_s: float) -> float | None:
        """When no request was in the engine and its processes rested, on the monotonic clock; None: never."""
        begun_s = time.monotonic()
        while self.lives and time.monotonic() - begun_s < at_most_s:
            at_s = time.monotonic()
            load = [float(value) for value in _LOAD.findall(self.metrics())]
            before_s = cpu_s(family(self._process.pid))
            time.sleep(0.5)
            if load and not any(load) and cpu_s(family(self._process.pid)) - before_s < 0.1:
                return at_s
        return None

    def memory(self) -> int:
        """Bytes of memory that it and its children hold."""
        return sum(_resident(pid) for pid in family(self._process.pid))

    @property
    def files(self) -> int:
        """Open descriptors."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self._process.pid}/fd"))
        return 0


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Seconds of processor time that they have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def measure(kind: Kind, server: Server, seconds: float) -> dict[str, Any]:
    """What another caller has without and with one attack, and how the server is afterwards."""
    refused, held_up, memory, files = server.refused(), server.held_up(), server.memory(), server.files
    alone = Caller(server.http_port, KEYS[1])
    alone.start()
    time.sleep(min(seconds, 5.0))
    alone.stop()
    caller = Caller(server.http_port, KEYS[1])
    with multiprocessing.get_context("spawn").Pool(1) as attackers:  # of its own: its work does not delay the others'
        attackers.apply(time.monotonic)  # it has started
        caller.start()
        begun_s = time.monotonic()
        attack = attackers.apply_async(run_kind, (kind.name, server.http_port, server.grpc_port, KEYS, seconds))
        most = memory
        while not attack.ready() and time.monotonic() - begun_s < seconds + GRACE_S:
            attack.wait(0.1)
            most = max(most, server.memory())
        came = attack.get() if attack.ready() else {"outcomes": {"the attacker had to be ended": 1}}
    left_s = time.monotonic()
    caller.stop()
    idle_s = server.settle(SETTLE_S)
    memory_mib = {"before": memory, "most": most, "after": server.memory()}
    return {
        "kind": kind.name,
        "shows": kind.shows,
        "server": kind.server,
        "attack_s": round(left_s - begun_s, 1),
        "others_alone": summary(alone.chats),
        "others": summary(caller.chats),
        "health_alone": summary(alone.probes),
        "health": summary(caller.probes),
        "memory_mib": {name: round(size / 2**20) for name, size in memory_mib.items()},
        "files": {"before": files, "after": server.files},
        "refused": dict(server.refused() - refused),
        "held_up": dict(server.held_up() - held_up),
        "attacker": came,
        "idle_again_s": None if idle_s is None else round(max(0.0, idle_s - left_s), 1),
        "server_lives": server.lives,
    }


def fuzz(count: int, server: Server) -> dict[str, Any]:
    """Sends gRPC messages that parse, 32 at a time, and counts what they were told."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/serve"))  # where the fuzzer of the tests is
    from proto_fuzz import Fuzzed, parsing_messages

    async def send_all() -> list[str]:
        gate = asyncio.Semaphore(32)
        async with grpc.aio.insecure_channel(f"{HOST}:{server.grpc_port}") as channel:

            async def send(message: Fuzzed) -> str:
                path, options = f"/jaxserve.v1.Inference/{message.method}", {"timeout": PATIENCE_S * 10}
                options["metadata"] = [("authorization", f"Bearer {KEYS[0]}")]
                async with gate:
                    try:
                        if message.method == "Generate":
                            async for _ in channel.unary_stream(path)(message.body, **options):
                                pass
                        else:
                            await channel.unary_unary(path)(message.body, **options)
                    except grpc.aio.AioRpcError as error:
                        return f"{message.method} {error.code().name}"
                    return f"{message.method} OK"

            return await asyncio.gather(*map(send, parsing_messages(count, seed=count)))

    begun_s = time.monotonic()
    told = collections.Counter(asyncio.run(send_all()))
    took_s = time.monotonic() - begun_s
    idle = server.settle(SETTLE_S) is not None
    return {"messages": count, "seconds": round(took_s, 1), "told": dict(sorted(told.items())), "idle_again": idle}


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    alone, others = found["others_alone"], found["others"]
    lost = others["unanswered"] + sum(others["refused"].values())
    memory = "/".join(str(size) for size in found["memory_mib"].values())
    told = ", ".join(f"{count} x {outcome}" for outcome, count in sorted(found["attacker"]["outcomes"].items())) or "-"
    idle = "never" if found["idle_again_s"] is None else f"{found['idle_again_s']:.1f}"
    return (
        f"{found['kind']:<19} {alone['median_s']:>6} {alone['worst_s']:>6} "
        f"{others['median_s']:>7} {others['worst_s']:>7} "
        f"{lost:>4}/{others['calls']:<4} {found['health']['worst_s']:>7} {memory:>16} {idle:>6}  {told}"
    )


HEAD = (
    f"{'':<19} {'others alone':>13} {'under attack':>15} {'lost':>9} {'health':>7} {'memory, MiB':>16} {'idle':>6}\n"
    f"{'kind':<19} {'median':>6} {'worst':>6} {'median':>7} {'worst':>7} {'/calls':>9} {'worst':>7} "
    f"{'before/most/after':>16} {'again':>6}  what the attacker was told"
)


def attack_all(kinds: Sequence[Kind], args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Each kind in turn, with a server that is started anew after one that did not rest. Returns results and faults."""
    results: list[dict[str, Any]] = []
    faults: list[str] = []
    print(HEAD, flush=True)
    for name in ("text", "vision"):
        todo = [kind for kind in kinds if kind.server == name]
        while todo:
            with Server(name, folder) as server:
                while todo:
                    kind, tracebacks = todo.pop(0), server.tracebacks
                    found = measure(kind, server, args.seconds)
                    results.append(found)
                    print(row(found), flush=True)
                    if (count := server.tracebacks - tracebacks) > 0:
                        faults.append(f"{kind.name}: {count} tracebacks in the log\n{server.last_traceback()}")
                    worst_s = max(found["others"]["worst_s"] or 0.0, found["health"]["worst_s"] or 0.0)
                    if args.most_s is not None and worst_s > args.most_s:
                        faults.append(f"{kind.name}: another caller waited {worst_s} s")
                    if not found["server_lives"]:
                        faults.append(f"{kind.name}: the server has ended\n{server.log.read_text()[-2000:]}")
                        break
                    if found["idle_again_s"] is None:
                        took_s = server.stop()
                        found["stop_s"] = round(took_s, 1)
                        faults.append(f"{kind.name}: not idle {SETTLE_S:g} s later; its end took {took_s:.1f} s")
                        break
    return results, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="Print the kinds and end.")
    parser.add_argument("--all", action="store_true", help="Every kind.")
    parser.add_argument("--kind", action="append", default=[], choices=sorted(KINDS), help="May be given again.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Of each attack.")
    parser.add_argument("--most-s", type=float, help="Others may wait so long, and not longer.")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="Send so many gRPC messages that parse.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.list:
        for kind in KINDS.values():
            print(f"{kind.name:<19} {kind.server:<7} {kind.shows}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its server ends with it
    kinds = [kind for kind in KINDS.values() if args.all or kind.name in args.kind]
    if not kinds and not args.fuzz:
        parser.error("give --all, --kind, --fuzz or --list")
    report: dict[str, Any] = {"seconds": args.seconds, "load_average": os.getloadavg()}
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="jaxserve-attack-") as name:
        if kinds:
            report["kinds"], faults = attack_all(kinds, args, Path(name))
        if args.fuzz:
            with Server("text", Path(name)) as server:
                tracebacks = server.tracebacks
                report["fuzz"] = fuzz(args.fuzz, server)
                print(json.dumps(report["fuzz"], indent=1))
                if server.tracebacks > tracebacks or not server.lives or not report["fuzz"]["idle_again"]:
                    faults.append(f"fuzz: the server ended, failed or did not rest\n{server.log.read_text()[-2000:]}")
    report["faults"] = faults
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    if args.json is not None:
        write_record(args.json, report)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
