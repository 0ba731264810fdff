"""Times of the TPU kernels by count (`jaxserve.lab.ledger`), ours and those of others, on chips that are not here.

    python scripts/kernel_ledger.py                      all cases and chips: writes the record and the table
    python scripts/kernel_ledger.py --only decode --chips v5e v6e
    python scripts/kernel_ledger.py --table              writes the table of the record into docs/kernels.md
    python scripts/kernel_ledger.py --loops --only 8b-tp8/decode --chips v5e     prints every loop of the kernels

The record is benchmarks/kernel_ledger.json. Nothing in it is measured: a cycle is a bundle of libtpu's schedule, copies
move at the published bandwidth and without latency.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.chips import Chip, parse_topology
from jaxserve.config import describe_absent_tpu
from jaxserve.lab.ledger.capture import captured_kernels, dump_arguments

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
_LARGE = 2**30  # bytes of a cache that the compiler cannot keep in VMEM, as it does with that of one small layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--chips", nargs="+", choices=tuple(CHIPS), default=list(CHIPS))
    parser.add_argument("--no-peers", action="store_true", help="our kernels alone")
    parser.add_argument("--loops", action="store_true", help="print the loops of each kernel, and keep no record")
    parser.add_argument("--table", action="store_true", help="count nothing")
    parser.add_argument("--worker", choices=tuple(CHIPS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [name for name in CASES if args.only in name]
    if args.worker:
        for found in count(args.worker, cases, peers=not args.no_peers, loops=args.loops):
            print(json.dumps(found), flush=True)
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"about": {}, "results": []}
    if not args.table:
        record = update(record, args, cases)
    if not args.loops:
        write_table(record["results"])


def update(record: dict[str, Any], args: argparse.Namespace, cases: Sequence[str]) -> dict[str, Any]:
    """Counts in one process for each chip, since libtpu reads its arguments once, and keeps the results."""
    from kernel_runs import write_results

    kept = {_key(r): r for r in record["results"]}
    for chip in args.chips:
        command = [sys.executable, __file__, "--worker", chip, "--only", args.only]
        command += ["--no-peers"] * args.no_peers + ["--loops"] * args.loops
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if not line.startswith("{"):
                    continue
                result = json.loads(line)
                kept[_key(result)] = result
                print(describe(result), flush=True)
        if worker.returncode:
            raise SystemExit(f"the process for {chip} ended with {worker.returncode}")
        if not args.loops:
            write_results(RECORD, list(kept.values()), command="python scripts/kernel_ledger.py")
    return {"results": list(kept.values())}


def _key(result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return result["case"], result["chip"], result["by"], result["setting"]


# --- counting, in a process of its own --------------------------------------------------------------------------------


def count(chip_name: str, cases: Sequence[str], *, peers: bool, loops: bool) -> Iterator[dict[str, Any]]:
    """One result for each case and implementation on a chip."""
    topology = CHIPS[chip_name]
    chip = parse_topology(topology).chip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dump"
        describe_absent_tpu(dump_arguments(folder))
        from kernel_runs import find_case

        for case_name in cases:
            case = find_case(case_name)
            yield _result(case, chip, "jaxserve", "", _ours(case, topology, folder), loops)
            if peers:
                from tpu_peers import ragged_paged_attention_peers

                for peer in ragged_paged_attention_peers(case, chip):
                    with contextlib.suppress(_DoesNotCompile):
                        times = _theirs(peer, topology, folder)
                        yield _result(case, chip, "jax ragged_paged_attention", peer.setting, times, loops)


class _DoesNotCompile(Exception):
    """A peer's setting that the compiler refuses, for want of VMEM for one."""


def _ours(case: Any, topology: str, folder: Path) -> list[Any]:
    import jax.numpy as jnp
    from kernel_builds import abstract_inputs, attend_layers, compile_attend

    from jaxserve.kernels.cases import Room
    from jaxserve.kernels.pallas.tpu_implementation import make_attention
    from jaxserve.lab.compiled.topology import device_of_topology
    from jaxserve.lab.ledger import kernel_calls

    implementation = make_attention(device_of_topology(topology))
    page_bytes = case.page_size * case.spec.num_kv_heads * case.spec.head_dim * 2 * jnp.dtype(case.cache_dtype).itemsize
    needed = sum(-(-context // case.page_size) for _, context in case.rows) + 3
    columns = max(-(-context // case.page_size) for _, context in case.rows) + 1
    room = Room(columns=columns, num_pages=max(needed, _LARGE // page_bytes))
    cache, args = abstract_inputs(case, implementation, room)
    calls = kernel_calls(attend_layers(case, implementation), [cache], *args)
    shutil.rmtree(folder, ignore_errors=True)
    compile_attend(case, implementation, topology, room=room)
    return _times(calls, topology, folder)


def _theirs(peer: Any, topology: str, folder: Path) -> list[Any]:
    import jax
    from jax.sharding import SingleDeviceSharding

    from jaxserve.lab.compiled.topology import absent_devices
    from jaxserve.lab.ledger import kernel_calls

    calls = kernel_calls(peer.function, *peer.args)
    sharding = SingleDeviceSharding(absent_devices(topology)[0])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in peer.args]
    shutil.rmtree(folder, ignore_errors=True)
    try:
        jax.jit(peer.function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:  # whatever the compiler finds wrong with one setting of a kernel of others
        print(f"{peer.setting}: {error}"[:300], file=sys.stderr)
        raise _DoesNotCompile from error
    return _times(calls, topology, folder)


def _times(calls: Sequence[Any], topology: str, folder: Path) -> list[Any]:
    """(name, time) of each call, in order."""
    from jaxserve.lab.ledger import time_of_call

    chip = parse_topology(topology).chip
    printed = {captured.name.rpartition(".")[0] or captured.name: captured for captured in captured_kernels(folder)}
    return [(call.name, time_of_call(printed[call.name].program(), call, chip)) for call in calls]


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


# --- what was found ---------------------------------------------------------------------------------------------------


def describe(result: Mapping[str, Any]) -> str:
    """One line, and the loops where they were asked for."""
    line = (
        f"{result['chip']:4} {result['case']:38} {result['by']} {result['setting']}: {result['us']} us, "
        f"{result['bandwidth_share']:.2f} of the bandwidth, {result['peak_share']:.2f} of the peak"
    )
    return "\n  ".join([line, *result.get("loops", [])])


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: ours beside the best setting of the peer; decode as a share of bandwidth, prompts of the peak."""
    yield "| case | chip | jaxserve: us | share of what bounds it | JAX's kernel: us | share |"
    yield "|---" * 6 + "|"
    for case in dict.fromkeys(r["case"] for r in results):
        share = "peak_share" if "prefill" in case else "bandwidth_share"
        for chip in CHIPS:
            same = [r for r in results if (r["case"], r["chip"]) == (case, chip)]
            ours = next((r for r in same if r["by"] == "jaxserve"), None)
            theirs = min((r for r in same if r["by"] != "jaxserve"), key=lambda r: r["us"], default=None)
            if ours is None:
                continue
            peer = f"{theirs['us']:.0f} | {theirs[share]:.2f}" if theirs else "- | -"
            yield f"| {case.removesuffix('/64/bfloat16')} | {chip} | {ours['us']:.0f} | {ours[share]:.2f} | {peer} |"


def write_table(results: Sequence[Mapping[str, Any]]) -> None:
    """Replaces the table in docs/kernels.md."""
    path = ROOT / "docs/kernels.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{path} lacks the markers of the table"
    path.write_text(f"{before}{BEGIN}\n" + "\n".join(table(results)) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
