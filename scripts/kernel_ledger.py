"""Times of the TPU kernels by count (`jaxserve.lab.ledger`), ours and those of others, on chips that are not here.

    python scripts/kernel_ledger.py                      all cases and chips: writes the record and the table
    python scripts/kernel_ledger.py --tpu-inference DIR  the kernel of tpu-inference too; DIR holds its source
    python scripts/kernel_ledger.py --only decode --chips v5e v6e
    python scripts/kernel_ledger.py --by 'splash|flash' --only prefill8k
    python scripts/kernel_ledger.py --table              writes the table of the record into docs/kernels.md
    python scripts/kernel_ledger.py --loops --only 8b-tp8/decode --chips v5e     prints every loop of the kernels

The record is benchmarks/kernel_ledger.json. Nothing in it is measured: a cycle is a bundle of libtpu's schedule, copies
move at the published bandwidth and without latency.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.lab.ledger.capture import print_schedules
from jaxserve.values.chips import Chip, parse_topology

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/kernel_ledger.json"
BEGIN, END = "<!-- ledger: written by scripts/kernel_ledger.py -->", "<!-- end of ledger -->"
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "v7x:2x2x1"}
CASES = (
    "llama3-8b-tp1/decode64/64/bfloat16",
    "llama3-8b-tp4/decode64/64/bfloat16",
    "llama3-8b-tp8/decode64/64/bfloat16",
    "llama3-70b-tp8/decode64/64/bfloat16",
    "llama3-8b-tp1/prefill8k/64/bfloat16",
)
OURS = "jaxserve"
COLUMNS = {  # of the table, by the name in the record
    OURS: "jaxserve",
    "jax ragged_paged_attention": "JAX ragged paged",
    "jax splash_attention": "JAX splash",
    "jax flash_attention": "JAX flash",
    "tpu-inference ragged_paged_attention v3": "tpu-inference v3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--chips", nargs="+", choices=tuple(CHIPS), default=list(CHIPS))
    parser.add_argument("--no-peers", action="store_true", help="our kernels alone")
    parser.add_argument("--by", default="", help="regular expression on names of implementations: 'splash|v3'")
    parser.add_argument("--tpu-inference", type=Path, help="folder with that source, to count its kernel")
    parser.add_argument("--loops", action="store_true", help="print the loops of each kernel, and keep no record")
    parser.add_argument("--table", action="store_true", help="count nothing")
    parser.add_argument("--worker", choices=tuple(CHIPS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [name for name in CASES if args.only in name]
    if args.worker:
        for found in count(args.worker, cases, args):
            print(json.dumps(found), flush=True)
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"about": {}, "results": []}
    if not args.table:
        record = update(record, args, cases)
    if not args.loops:
        from kernel_runs import write_between

        write_between(ROOT / "docs/kernels.md", BEGIN, END, table(record["results"]))


def update(record: dict[str, Any], args: argparse.Namespace, cases: Sequence[str]) -> dict[str, Any]:
    """Counts in one process for each chip, since libtpu reads its arguments once, and keeps the results."""
    from kernel_runs import write_results

    kept = {_key(r): r for r in record["results"]}
    for chip in args.chips:
        command = [sys.executable, __file__, "--worker", chip, "--only", args.only]
        command += ["--no-peers"] * args.no_peers + ["--by", args.by] + ["--loops"] * args.loops
        command += ["--tpu-inference", str(args.tpu_inference)] if args.tpu_inference else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if not line.startswith("{"):
                    continue
                result = json.loads(line)
                kept[_key(result)] = result
                print(describe(result), flush=True)
                if not args.loops:  # at once, so that a run that is stopped keeps what it counted
                    write_results(RECORD, list(kept.values()), command="python scripts/kernel_ledger.py")
        if worker.returncode:
            raise SystemExit(f"the process for {chip} ended with {worker.returncode}")
    return {"results": list(kept.values())}


def _key(result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return result["case"], result["chip"], result["by"], result["setting"]


# --- counting, in a process of its own --------------------------------------------------------------------------------


def count(chip_name: str, cases: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result for each case and implementation on a chip."""
    topology = CHIPS[chip_name]
    chip = parse_topology(topology).chip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dump"
        print_schedules(folder)
        from kernel_runs import find_case

        for case_name in cases:
            case = find_case(case_name)
            if re.search(args.by, OURS):
                yield _result(case, chip, OURS, "", _ours(case, topology, folder), args.loops)
            if not args.no_peers:
                from tpu_peers import tpu_peers

                for peer in tpu_peers(case, chip, args.tpu_inference):
                    if not re.search(args.by, peer.by):
                        continue
                    with contextlib.suppress(_CannotBeCounted):
                        times = _theirs(peer, topology, folder)
                        yield _result(case, chip, peer.by, peer.setting, times, args.loops)


class _CannotBeCounted(Exception):
    """A peer's setting that the compiler refuses, for want of VMEM for one, or that the ledger cannot walk."""


def _ours(case: Any, topology: str, folder: Path) -> Sequence[Any]:
    from jaxserve.lab.ledger import count_attention

    return count_attention(case, topology, folder)


def _theirs(peer: Any, topology: str, folder: Path) -> Sequence[Any]:
    import jax
    from jax.sharding import SingleDeviceSharding

    from jaxserve.lab.compiled.topology import absent_devices
    from jaxserve.lab.ledger import kernel_calls, times_of_calls

    sharding = SingleDeviceSharding(absent_devices(topology)[0])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in peer.args]
    shutil.rmtree(folder, ignore_errors=True)
    try:
        calls = kernel_calls(peer.function, *peer.args)
        jax.jit(peer.function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
        return times_of_calls(calls, topology, folder)
    except Exception as error:  # whatever the compiler or the ledger finds wrong with one setting of a kernel of others
        print(f"{peer.by}, {peer.setting}: {error}"[:300], file=sys.stderr)
        raise _CannotBeCounted from error


def _result(case: Any, chip: Chip, by: str, setting: str, times: Sequence[Any], loops: bool) -> dict[str, Any]:
    seconds = sum(t.seconds for _, t in times)
    peak = chip.flops["bfloat16"]
    found = {
        "case": case.name,
        "chip": chip.name,
        "by": by,
        "setting": setting,
        "us": round(seconds * 1e6, 2),
        "bandwidth_share": round(case.kv_bytes / chip.memory_bandwidth / seconds, 3),
        "peak_share": round(case.flops / peak / seconds, 3),
        "head_share": round(case.flops / (peak * filled(chip, case.spec.head_dim)) / seconds, 3),
        "kernels": {
            name: {
                "us": round(t.seconds * 1e6, 2),
                "bundles_us": round(t.bundle_seconds * 1e6, 2),
                "bytes_us": round(t.byte_seconds * 1e6, 2),
                "bundles": t.walk.bundles,
                "stalled_cycles": round(t.walk.stalled_cycles),
                "waited_cycles": round(t.walk.waited_cycles),
                "copied_bytes": t.walk.copied_bytes,
                "spills": sum(loop.spills for loop in t.walk.loops),
                "spills_in_a_turn": round(max((loop.spills_per_turn for loop in t.walk.inner_loops), default=0)),
            }
            for name, t in times
        },
    }
    if loops:
        found["loops"] = [
            f"{name} {'>' * loop.depth} bundle {loop.first}: {loop.turns} turns of {loop.bundles_per_turn:.0f} "
            f"bundles, {loop.copies} copies of {loop.copied_bytes} bytes, waited {loop.waited_cycles:.0f}, "
            f"spills {loop.spills}"
            for name, t in times
            for loop in t.walk.loops
        ]
    return found


def filled(chip: Chip, head_dim: int) -> float:
    """The part of a matrix unit that heads of `head_dim` fill: rows in `q @ k.T`, and columns in `weights @ v`."""
    assert chip.tensor_cores is not None
    size = chip.tensor_cores.size
    return head_dim / (-(-head_dim // size) * size)


# --- what was found ---------------------------------------------------------------------------------------------------


def describe(result: Mapping[str, Any]) -> str:
    """One line, and the loops where they were asked for."""
    line = (
        f"{result['chip']:4} {result['case']:38} {result['by']} {result['setting']}: {result['us']} us, "
        f"{result['bandwidth_share']:.2f} of the bandwidth, {result['peak_share']:.2f} of the peak, "
        f"{result['head_share']:.2f} of the part of it that the head size can fill"
    )
    return "\n  ".join([line, *result.get("loops", [])])


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: us (share) of ours and of each peer's best setting; decode by the bandwidth, prompts by the peak."""
    yield f"| case | chip | {' | '.join(COLUMNS.values())} | jaxserve, of what heads fill |"
    yield "|---" * (3 + len(COLUMNS)) + "|"
    for case in dict.fromkeys(r["case"] for r in results):
        share = "peak_share" if "prefill" in case else "bandwidth_share"
        for chip in CHIPS:
            same = [r for r in results if (r["case"], r["chip"]) == (case, chip)]
            best = [min((r for r in same if r["by"] == by), key=lambda r: r["us"], default=None) for by in COLUMNS]
            if not same:
                continue
            cells = [f"{r['us']:.0f} ({r[share]:.2f})" if r else "-" for r in best]
            head = next((f"{r['head_share']:.2f}" for r in same if "prefill" in case and r["by"] == "jaxserve"), "")
            yield f"| {case.removesuffix('/64/bfloat16')} | {chip} | {' | '.join(cells)} | {head} |"


if __name__ == "__main__":
    main()
