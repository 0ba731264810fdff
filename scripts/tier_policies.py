"""Compares the policies of a tier of pages on a trace of requests: hits of each, beside those of the best possible.

    python scripts/tier_policies.py --dataset mooncake --dataset-path conversation_trace.jsonl
    python scripts/tier_policies.py --requests 5000        # conversations of agents, which need no file

The first table is of a tier alone that takes every page in; Belady's policy, which knows the future, is the ceiling at
each capacity. The second is of a tier behind a device that keeps the pages used last and offers those that it gives up,
with and without admission on second sight. A hit is a block that follows hits from its prompt's beginning on, since no
other is of use; the rate is of all blocks of prompts. The trace of the figures in docs/kv-stores.md is public:
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

import argparse
import hashlib
import heapq
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.lab.workloads.datasets import DATASET_NAMES, DatasetOptions, iter_shapes
from jaxserve.lab.workloads.samples import Shape
from jaxserve.sched.tier_policy import ADMISSIONS, TIER_POLICIES, TierOptions, TierPolicy, create_tier_policy

Chain = Sequence[bytes]


class Outcome(NamedTuple):
    """Blocks of a run: asked for, found in the tier, and written into it."""

    asked: int
    hits: int
    written: int

    @property
    def rate(self) -> float:
        return self.hits / self.asked

    @property
    def writes_per_hit(self) -> float:
        return self.written / self.hits if self.hits else float("inf")


def main() -> int:
    args = _parse()
    options = DatasetOptions(
        name=args.dataset,
        path=args.dataset_path,
        num_prompts=args.requests,
        session_rate=1.0,
        think_s=60.0,
        input_len=2048,
        prefix_len=2048,
        output_len=512,
    )
    chains = [chain_of(shape, args.block) for shape in iter_shapes(options)]
    blocks = [block for chain in chains for block in chain]
    print(
        f"{len(chains)} requests, {len(blocks)} blocks of {args.block} tokens; with room for all, "
        f"{1 - len(set(blocks)) / len(blocks):.3f} would be found"
    )
    results: list[dict[str, object]] = []
    names = TIER_POLICIES.names()
    table = Table("tokens", *names, "Belady", title="share of blocks found, tier alone, all admitted")
    for capacity in [tokens // args.block for tokens in args.tokens]:
        rates = [run_alone(_policy(name, "always"), chains, capacity).rate for name in names]
        rates.append(belady(chains, capacity).rate)
        table.add_row(f"{capacity * args.block:,}", *(f"{rate:.3f}" for rate in rates))
        results.append(
            {"table": "alone", "blocks": capacity, "rates": dict(zip([*names, "belady"], rates, strict=True))}
        )
    Console().print(table)
    title = f"behind a device of {args.device_tokens:,} tokens, lru: share found in the tier (blocks written for a hit)"
    table = Table("tokens", *ADMISSIONS, title=title)
    for capacity in [tokens // args.block for tokens in args.tokens]:
        outcomes = [
            run_behind(_policy("lru", admission), chains, capacity, args.device_tokens // args.block)
            for admission in ADMISSIONS
        ]
        table.add_row(f"{capacity * args.block:,}", *(f"{o.rate:.3f} ({o.writes_per_hit:.1f})" for o in outcomes))
        for admission, outcome in zip(ADMISSIONS, outcomes, strict=True):
            results.append({"table": "behind", "blocks": capacity, "admission": admission, **outcome._asdict()})
    Console().print(table)
    if args.json:
        write_record(args.json, results, dataset=args.dataset, block=args.block, device_tokens=args.device_tokens)
    return 0


def chain_of(shape: Shape, block: int) -> Chain:
    """Keys of the full blocks of a prompt, each of the content up to its end."""
    keys: list[bytes] = []
    pieces = hashlib.blake2b(digest_size=16)
    left = block
    for part in shape.parts:
        start = 0
        while start < part.length:
            taken = min(left, part.length - start)
            pieces.update(f"{part.key} {start} {taken};".encode())
            start += taken
            left -= taken
            if not left:
                keys.append(pieces.copy().digest())
                left = block
    return keys


class Tier:
    """A tier of `capacity` blocks whose pages nothing holds. `written`: blocks that it took in anew."""

    def __init__(self, policy: TierPolicy, capacity: int) -> None:
        self.keys: set[bytes] = set()
        self.written = 0
        self._policy = policy
        self._capacity = capacity

    def offer(self, key: bytes) -> None:
        """A block that the tier may have already."""
        if key in self.keys:
            self._policy.touch(key)
        elif self._policy.admit(key):
            while len(self.keys) >= self._capacity:
                gone = self._policy.victim(key)
                assert gone is not None, "nothing is held here"
                self.keys.remove(gone)
            self._policy.insert(key)
            self.keys.add(key)
            self.written += 1


def run_alone(policy: TierPolicy, chains: Sequence[Chain], capacity: int) -> Outcome:
    """A tier of `capacity` blocks that is offered every block of every prompt."""
    tier = Tier(policy, capacity)
    asked = hits = 0
    for chain in chains:
        asked += len(chain)
        hits += _found(chain, tier.keys.__contains__)
        there = [key in tier.keys for key in chain]
        for key, is_there in reversed(list(zip(chain, there, strict=True))):
            if is_there:  # before anything is taken in, or the chain's end would drive out its beginning
                policy.touch(key)
        for key, is_there in reversed(list(zip(chain, there, strict=True))):
            if not is_there:
                tier.offer(key)
    return Outcome(asked, hits, tier.written)


def run_behind(policy: TierPolicy, chains: Sequence[Chain], capacity: int, device_blocks: int) -> Outcome:
    """A tier that is offered what a device of `device_blocks` gives up, least recently used first."""
    device: OrderedDict[bytes, None] = OrderedDict()
    tier = Tier(policy, capacity)
    asked = hits = 0
    for chain in chains:
        asked += len(chain)
        usable = _found(chain, lambda key: key in device or key in tier.keys)
        from_tier = [key for key in chain[:usable] if key not in device]
        hits += len(from_tier)
        for key in reversed(from_tier):
            policy.touch(key)
        for key in reversed(chain):
            device[key] = None
            device.move_to_end(key)
        while len(device) > device_blocks:
            key, _ = device.popitem(last=False)
            tier.offer(key)
    return Outcome(asked, hits, tier.written)


def belady(chains: Sequence[Chain], capacity: int) -> Outcome:
    """Keeps the blocks that are asked for soonest, an incoming one not excepted."""
    never = len(chains)
    uses: dict[bytes, list[int]] = {}
    for time, chain in enumerate(chains):
        for key in chain:
            uses.setdefault(key, []).append(time)
    for times in uses.values():
        times.reverse()
    kept: dict[bytes, int] = {}  # -> when it is asked for next
    latest: list[tuple[int, int, bytes]] = []  # (-next use, -place in its chain, key), some out of date
    asked = hits = written = 0
    for chain in chains:
        asked += len(chain)
        hits += _found(chain, kept.__contains__)
        for place, key in enumerate(chain):
            uses[key].pop()
            following = uses[key][-1] if uses[key] else never
            written += key not in kept
            kept[key] = following
            heapq.heappush(latest, (-following, -place, key))
        while len(kept) > capacity:
            following, _, key = heapq.heappop(latest)
            if kept.get(key) == -following:
                del kept[key]
    return Outcome(asked, hits, written)


def _found(chain: Chain, is_kept: Callable[[bytes], bool]) -> int:
    return next((place for place, key in enumerate(chain) if not is_kept(key)), len(chain))


def _policy(name: str, admission: str) -> TierPolicy:
    return create_tier_policy(name, TierOptions(admission=admission))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares policies of a tier of pages on a trace.")
    parser.add_argument("--dataset", default="agent", choices=[name for name in DATASET_NAMES if name != "custom"])
    parser.add_argument("--dataset-path", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--block", type=int, default=512, help="tokens of a block; the Mooncake trace has 512")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_500_000, 5_100_000, 15_400_000, 30_700_000])
    parser.add_argument("--device-tokens", type=int, default=307_200)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if not 0 < args.block <= min(*args.tokens, args.device_tokens):
        parser.error(f"--block is {args.block}; it must be above 0, and --tokens and --device-tokens hold one at least")
    if args.dataset_path is None and args.requests is None:
        args.requests = 5000
    return args


if __name__ == "__main__":
    sys.exit(main())
