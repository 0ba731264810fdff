"""Simulated requests of a recorded trace's shape: without tiers, with them, and policies beside the best one.

    python scripts/simulate_tiers.py TRACE --work DIR --minutes 5   # again, until all are done
    python scripts/simulate_tiers.py TRACE --work DIR --first 0 --json benchmarks/tiers_simulated.json

The second call simulates nothing, and sums up the parts that are done. Parts of one number have the same requests, so
tiers of which not equally many parts are done are best compared by `hit_rate_of_parts`, which is in order of number.

The trace is Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces), whose conversations are drawn
again and again (`workloads.conversations`): each part is a server of its own with a seed of its own. Lengths are an
eighth of the recorded ones, and so are the blocks that requests share: 64 tokens, a page. The device has as many of
these pages as one with all its memory would have pages of the recorded blocks; host memory and the store have as many
as their bytes hold of the small ones, which is eight times as many. Scheduler and tiers are the objects that an engine
runs; times are those of a roofline, of a link to host memory, and of a store's link.

"off" has no tier, "host" host memory, "host, disk" a store of files behind it. The other policies stand in the place of
"host". A hit is a block of a prompt that was found when its sequence was first placed; Belady's policy, which knows the
future, has one tier of the blocks of device and host together, and is the ceiling of all with the tier "host".
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from record import write_record
from rich.console import Console
from rich.table import Table
from tier_policies import belady, chain_of

from jaxserve.config import load_config
from jaxserve.lab.simulation.requests import ClientOptions, sim_requests
from jaxserve.lab.simulation.simulate import simulate
from jaxserve.lab.simulation.world import World, world_of_device
from jaxserve.lab.workloads.conversations import conversations_of, drawn_again
from jaxserve.lab.workloads.samples import Shape
from jaxserve.lab.workloads.traces import read_mooncake

SCALE, BLOCK = 0.125, 64
SETTINGS = {
    "model.path": "configs/shapes/llama3.1-8b",
    "model.max_len": 16384,
    "cache.page_size": BLOCK,
    "cache.num_pages": 1705,  # of 512 tokens so many fit beside the weights
    "sched.max_rows": 64,
    "sched.max_step_tokens": 8192,
}
HOST = {"cache.host_bytes": 512 << 30}
DISK = {**HOST, "store.kind": "file", "store.location": "pages", "store.max_bytes": 4096 << 30}
TIERS: dict[str, dict[str, object]] = {
    "off": {},
    "host": HOST,
    "host, disk": DISK,
    **{f"host {name}": {**HOST, "cache.host_policy": name} for name in ("lfu", "arc", "s3-fifo")},
    "host, always": {**HOST, "cache.host_admission": "always"},
}
BELADY = "Belady"
GOAL_S = 1.0  # to the first token, for goodput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is to be done, in a process of its own."""

    trace: Path
    tier: str
    seed: int
    requests: int
    rate: float
    file: Path


def main() -> int:
    args = _parse()
    args.work.mkdir(parents=True, exist_ok=True)
    size = args.requests // args.parts
    parts = [
        Part(
            trace=args.trace,
            tier=tier,
            seed=seed,
            requests=size,
            rate=args.rate,
            file=args.work / f"{tier.replace(', ', '-').replace(' ', '-')}-{size}-{args.rate:g}-{seed}.json",
        )
        for seed, tier in itertools.product(range(args.parts), args.tiers.split("/"))
    ]
    missing = [part for part in parts if part.seed < args.first and not part.file.exists()]
    end_s = time.monotonic() + 60 * args.minutes
    with concurrent.futures.ProcessPoolExecutor(args.processes) as pool:
        for number, seconds in enumerate(pool.map(_run_in_time, missing, itertools.repeat(end_s))):
            if seconds is not None:
                print(f"{missing[number].file.name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    found = {tier: [_read(part.file) for part in parts if part.tier == tier and part.file.exists()] for tier in TIERS}
    found[BELADY] = [_read(part.file) for part in parts if part.tier == BELADY and part.file.exists()]
    results = {tier: summarise(rows) for tier, rows in found.items() if rows}
    show(results)
    if args.json:
        about = {"settings": SETTINGS, "tiers": TIERS, "scale": SCALE, "rate": args.rate, "goal_s": GOAL_S}
        write_record(args.json, results, trace=args.trace.name, part_requests=size, **about)
    return 0


def world_of(tier: str) -> World:
    return world_of_device(load_config(None, {**SETTINGS, **TIERS[tier]}).config, "h200:1")


def shapes_of(part: Part) -> Iterator[Shape]:
    conversations = conversations_of(read_mooncake(part.trace, None, SCALE))
    return itertools.islice(drawn_again(conversations, part.rate, part.seed), part.requests)


def run(part: Part) -> dict[str, object]:
    """Simulates a part. Counts, sums, and the times to the first token in ascending order."""
    if part.tier == BELADY:
        limits = world_of("host").limits
        outcome = belady(
            [chain_of(shape, BLOCK) for shape in shapes_of(part)], limits.num_pages + limits.slots.num_slots
        )
        room = belady([chain_of(shape, BLOCK) for shape in shapes_of(part)], 2**62)
        return {"requests": part.requests, "blocks": outcome.asked, "hits": outcome.hits, "room_for_all": room.hits}
    world = world_of(part.tier)
    trace = sim_requests(shapes_of(part), ClientOptions())
    done = simulate("fcfs", trace, world.cost_model, world.limits, options=world.options, store=world.store)
    requests = done.requests
    assert len(requests) == part.requests and not any(one.error for one in requests)
    ttfts = sorted(one.first_token_s - one.arrival_s for one in requests if one.first_token_s is not None)
    return {
        "requests": len(requests),
        "blocks": sum(one.prompt_tokens // BLOCK for one in requests),
        "hits": sum(one.cached_tokens // BLOCK for one in requests),
        "saved": done.saved_pages,
        "loaded": done.loaded_pages,
        "simulated_s": done.duration_s,
        "device_s": done.device_s,
        "steps": done.num_steps,
        "output_tokens": sum(one.output_tokens for one in requests),
        "end_s": sum(one.last_token_s - one.arrival_s for one in requests if one.last_token_s is not None),
        "ttft_s": [round(value, 4) for value in ttfts],
    }


def summarise(rows: list[dict]) -> dict[str, object]:
    """The parts of a tier together."""
    total = {name: sum(row[name] for row in rows) for name in rows[0] if name != "ttft_s"}
    result: dict[str, object] = {
        "requests": total["requests"],
        "hit_rate": total["hits"] / total["blocks"],
        "hit_rate_of_parts": [row["hits"] / row["blocks"] for row in rows],
        "cpu_s": total["cpu_s"],
    }
    if "room_for_all" in total:
        return result | {"hit_rate_with_room_for_all": total["room_for_all"] / total["blocks"]}
    ttfts = np.concatenate([np.array(row["ttft_s"]) for row in rows])
    percentiles = {f"ttft_p{p}_s": float(np.percentile(ttfts, p)) for p in (50, 90, 99)}
    return {
        **result,
        **percentiles,
        "ttft_mean_s": float(ttfts.mean()),
        "good_share": float((ttfts <= GOAL_S).mean()),
        "busy": total["device_s"] / total["simulated_s"],
        "device_ms_a_request": 1e3 * total["device_s"] / total["requests"],
        "simulated_s": total["simulated_s"],
        "steps": total["steps"],
        "saved_a_hit": total["saved"] / max(1, total["hits"]),
        "loaded_pages": total["loaded"],
    }


def show(results: dict[str, dict]) -> None:
    columns = ("requests", "hit_rate", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "good_share", "busy", "cpu_s")
    table = Table("tier", *columns)
    for tier, row in results.items():
        table.add_row(tier, *(f"{row[name]:,.3f}".removesuffix(".000") if name in row else "" for name in columns))
    Console(width=140).print(table)


def _run_in_time(part: Part, end_s: float) -> float | None:
    if time.monotonic() > end_s:
        return None
    begin_s = time.process_time()
    result = run(part)
    result["cpu_s"] = time.process_time() - begin_s
    unfinished = part.file.with_suffix(".partial")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(part.file)
    return float(str(result["cpu_s"]))


def _read(path: Path) -> dict:
    return json.loads(path.read_text())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=20, help="servers that the requests are divided among")
    parser.add_argument("--first", type=int, default=10**9, help="so many parts of each tier are simulated now")
    parser.add_argument("--rate", type=float, default=10.0, help="conversations that begin at a server in a second")
    parser.add_argument("--tiers", default="/".join((*TIERS, BELADY)), help="names with / between them")
    parser.add_argument("--work", type=Path, required=True, help="a folder for parts that are done")
    parser.add_argument("--minutes", type=float, default=1e6, help="after so many no part is begun")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not 0 < args.parts <= args.requests:
        parser.error(f"--parts is {args.parts} of {args.requests} requests; each part needs one at least")
    if unknown := [tier for tier in args.tiers.split("/") if tier not in (*TIERS, BELADY)]:
        parser.error(f"--tiers has {unknown[0]!r}; there are {', '.join((*TIERS, BELADY))}")
    return args


if __name__ == "__main__":
    sys.exit(main())
