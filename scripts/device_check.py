"""Checks every kernel on the accelerator at hand, then times it against the card and against other kernels.

    PYTHONPATH=. python scripts/device_check.py --json benchmarks/device_check_h200.json                 on a GPU
    PYTHONPATH=. python scripts/device_check.py --backend tpu --json benchmarks/device_check_v5e.json    on a TPU

With `--server` it starts engines instead, and measures what a card does with them: see `device_server.py`.

It also measures the ceilings of the device (copy bandwidth, bf16 matrix rate). A case that fails, crashes or hangs is a
line of the result, and the next one runs. Cases that the budget did not reach are listed. Beside the times of a TPU
stand those that `kernel_ledger` has counted.

Checks and times are one task: the inputs and the compiled program cost far more than either.
"""

import argparse
import dataclasses
import functools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_peers import PEER_TOLERANCE, NoPeerError, time_jax_peer, time_ragged, time_torch
from kernel_pool import Channel, Pool, Result, Task, heed_termination, serve
from kernel_results import MAIN, TARGETS, Results, show, summary
from kernel_runs import (
    LAYERS,
    Attention,
    Turns,
    Write,
    commit,
    device_at_hand,
    find_case,
    find_implementation,
    layers_of,
    mix_of,
    on_host,
    prepare,
    seconds_per_call,
    tolerance,
    worker_environment,
    write_results,
)
from rich.console import Console

from jaxserve.kernels.cases import CASES, CODED_MATMUL_CASES, REAL, Case, Inputs, MatmulCase
from jaxserve.kernels.coded_weight import round_weight
from jaxserve.kernels.matmul import Matmul, MatmulUse
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.oracle import relative_error
from jaxserve.kernels.paged_attention import PagedAttention, stored
from jaxserve.kernels.self_check import matmul_error, matmul_limit
from jaxserve.kernels.storage import array_bytes

IMPLEMENTATIONS = {
    "gpu": ("mosaic_gpu", "xla_batched", "xla"),
    "tpu": ("mosaic_tpu", "xla_batched", "xla"),
    "cpu": ("xla",),
}
# JAX's kernels that are timed beside them. PyTorch's come too, but on TPUs.
JAX_PEERS = {"gpu": ("jax-stock", "jax-cudnn"), "tpu": ("jax-ragged",), "cpu": ("jax-xla",)}
# A TPU belongs to one process, so there nothing compiles beside the checks, and all takes longer. On a GPU each keeps
# the memory that its largest case has taken: ten of them left no room on an H100.
WORKERS = {"gpu": 5, "tpu": 1, "cpu": 8}
BUDGET_S = {"gpu": 450, "tpu": 3600, "cpu": 450}
# Mixes that are timed: of the main model, and of the others.
TIMED = {MAIN: ("decode64", "prefill8k", "row128k", "busy")}
TIMED_ELSE = ("decode64", "prefill8k")
# Codes whose products are checked and timed; groups of XLA's are a loop.
PRODUCTS = ("/int4-g128", "/int8", "/int8-a8", "/fp8")
# How long a worker may stay in a stage. A kernel that hangs is in 'run'; in 'wait' others have the device.
LIMITS_S = {"start": 120, "task": 30, "inputs": 90, "compile": 120, "wait": 400, "run": 25, "host": 120}
LEDGER = Path(__file__).parents[1] / "benchmarks/kernel_ledger.json"
MAX_QUERIES = 12  # of a row, that are held against float64
# Short cases that tell at once where an implementation goes wrong.
SMOKE = (
    *(f"{MAIN}/{mix}/64/bfloat16" for mix in ("decode64", "prefill8k", "busy", "ragged", "row128k")),
    *("gemma2-9b/busy/64/bfloat16", "mpt-7b-alibi/busy/64/bfloat16", "phi3-mini/busy/64/bfloat16"),
    *("gpt-oss/busy/128/float8_e4m3fn", "llama3-8b-tp1/busy/16/bfloat16"),
)


# --- which tasks, in which order -------------------------------------------------------------------------------------


def plan(backend: str, implementations: Sequence[str], only: str) -> list[Task]:
    """The most telling first: the card, short cases, the cases of the targets with their peers, then everything."""
    best, *others = implementations
    shorten = (lambda name: f"{name}/small") if backend == "cpu" else (lambda name: name)
    targets = [name for _, name, _ in TARGETS]
    rest = [*REAL, *(name for name in CASES if name.endswith("/bfloat16"))]
    first_of = {_shape(name): name for name in reversed(rest)}
    # A case that differs from an earlier one in its name alone is checked last.
    rest = sorted(rest, key=lambda name: (first_of[_shape(name)] != name, not name.startswith(MAIN)))
    rest = [name for name in rest if name not in targets]
    written = [f"{MAIN}/{mix}/64/bfloat16" for mix in ("decode64", "prefill8k", "busy")]
    tasks: list[Task] = [{"kind": "rates"}, *(_check(f"{name}/small", best) | {"timed": False} for name in SMOKE)]
    for name in targets:
        tasks += [_check(shorten(name), best), *_peers(shorten(name), backend)]
    tasks += [{"kind": "write", "case": shorten(name), "implementation": best} for name in written]
    if backend == "gpu":  # beside XLA's, whose time says what the kernel is worth
        products = [name for name in CODED_MATMUL_CASES if name.endswith(PRODUCTS)]
        tasks += [
            {"kind": "product", "case": name, "implementation": of} for name in products for of in ("mosaic_gpu", "xla")
        ]
    tasks += [_check(shorten(name), best) for name in rest]
    tasks += [
        {"kind": "write", "case": shorten(name), "implementation": implementation}
        for implementation in others
        for name in written
    ]
    tasks += [_check(shorten(name), implementation) for implementation in others for name in targets]
    tasks += [peer for name in rest for peer in _peers(shorten(name), backend)]
    tasks += [_check(shorten(name), implementation) for implementation in others for name in rest]
    for task in tasks:
        task["id"] = "/".join([task["kind"], *(task[k] for k in ("case", "implementation", "peer") if k in task)])
    unique = {task["id"]: task for task in tasks}
    return [task for task in unique.values() if task["kind"] == "rates" or re.search(only, task["id"])]


def _shape(name: str) -> Case:
    return dataclasses.replace(find_case(name), name="")


def _timed_mix(case: str) -> bool:
    return mix_of(case) in TIMED.get(case.split("/")[0], TIMED_ELSE)


def _check(case: str, implementation: str) -> Task:
    timed = _timed_mix(case) and (implementation != "xla" or case.startswith(f"{MAIN}/"))
    return {"kind": "check", "case": case, "implementation": implementation, "timed": timed}


def _peers(case: str, backend: str) -> list[Task]:
    ragged = backend == "tpu"  # the others are dense: rows of a busy step would be other work for them
    if not _timed_mix(case) or (mix_of(case) == "busy" and not ragged):
        return []
    torch: list[Task] = [] if ragged else [{"kind": "peer", "case": case, "peer": "torch", "process": "torch"}]
    return [*({"kind": "peer", "case": case, "peer": name} for name in JAX_PEERS[backend]), *torch]


# --- a worker --------------------------------------------------------------------------------------------------------


class Worker:
    """Runs the tasks of one process."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def handle(self, task: Task, channel: Channel) -> Result:
        kinds: dict[str, Callable[[Task, Channel], Result]] = {
            "rates": self._rates,
            "check": self._check,
            "write": self._write,
            "product": self._product,
            "peer": self._peer,
        }
        return kinds[task["kind"]](task, channel)

    def _rates(self, task: Task, channel: Channel) -> Result:
        del task
        channel.stage("start")
        device = device_at_hand()
        channel.stage("wait")
        with self._turns.alone():
            channel.stage("inputs")  # compiles on the device, and tries several products while it does
            return {"device": dataclasses.asdict(device)} | rates(device.backend)

    def _check(self, task: Task, channel: Channel) -> Result:
        case, implementation, refusal = self._start(task, channel)
        if refusal is not None:
            return {"refused": refusal}
        channel.stage("wait")
        with self._turns.shared():
            channel.stage("inputs")
            inputs = prepare(case, implementation)
            # No kernel of ours: quick answers matter more than telling a race.
            plain = implementation.name in ("xla", "xla_batched")
            caches = layers_of(inputs.cache, LAYERS if task["timed"] else 1 if plain else 2)
            if plain:  # XLA tries matrix products on the device while it compiles
                attention = self._compiled(case, implementation, inputs, caches, channel)
        if not plain:
            attention = self._compiled(case, implementation, inputs, caches, channel)
        channel.stage("wait")
        with self._turns.shared():
            channel.stage("run")
            outs = [np.asarray(out) for out in attention.launch()]
            channel.stage("inputs")  # gigabytes may travel: no sign of a kernel that hangs
            exact_from = on_host(inputs)
        result: Result = {}
        if task["timed"]:
            channel.stage("wait")
            with self._turns.alone():
                channel.stage("run")
                result = _timed(case, seconds_per_call(attention.launch, attention.layers))
        del attention, inputs, caches
        channel.part(result)
        channel.stage("host")
        error = relative_error(case, exact_from, outs[0], MAX_QUERIES)
        same = all(np.array_equal(out, outs[0]) for out in outs[1:])
        passed = error <= tolerance(case)
        return result | {"error": error, "tolerance": tolerance(case), "passed": passed, "repeats_alike": same}

    def _compiled(
        self, case: Case, implementation: PagedAttention, inputs: Inputs, caches: list[Any], channel: Channel
    ) -> Attention:
        channel.stage("compile")
        start = time.monotonic()
        attention = Attention(case, implementation, inputs, caches)
        channel.part({"compile_s": round(time.monotonic() - start, 2)})
        return attention

    def _write(self, task: Task, channel: Channel) -> Result:
        case, implementation, refusal = self._start(task, channel)
        if refusal is not None:
            return {"refused": refusal}
        channel.stage("wait")
        with self._turns.shared():
            channel.stage("inputs")
            inputs = prepare(case, implementation)
            empty = dataclasses.replace(inputs, cache=jax.tree.map(jnp.zeros_like, inputs.cache))
        channel.stage("compile")
        write = Write(implementation, empty)
        channel.stage("wait")
        with self._turns.alone():
            channel.stage("run")
            seconds = seconds_per_call(write.launch, write.times)
        channel.stage("wait")
        with self._turns.shared():
            channel.stage("inputs")
            cache = [np.asarray(leaf) for leaf in jax.tree.leaves(write.launch())]
        channel.stage("host")
        moved = 2 * inputs.k.size * (inputs.k.dtype.itemsize + jnp.dtype(case.cache_dtype).itemsize)
        return {
            "passed": written_right(case, inputs, cache),
            "ms": seconds * 1e3,
            "gb_per_s": moved / seconds / 1e9,
        }

    def _product(self, task: Task, channel: Channel) -> Result:
        """The error of a product with codes against float64, and the time of one of several weights in turn."""
        channel.stage("start")
        case = CODED_MATMUL_CASES[task["case"]]
        device = device_at_hand()
        matmul = MATMUL.make(task["implementation"], device)
        use = MatmulUse(dtype=case.dtype, num_devices=1, storage=case.storage, arithmetic=case.arithmetic)
        if (refusal := matmul.refuses(use)) is not None:
            return {"refused": refusal}
        channel.stage("wait")
        with self._turns.shared():
            channel.stage("inputs")  # compiles, rounds the weight on the host and multiplies in float64
            error, limit = matmul_error(matmul, case), matmul_limit(matmul, use)
            layers = Products(case, matmul)
        channel.stage("wait")
        with self._turns.alone():
            channel.stage("run")
            seconds = seconds_per_call(layers.launch, layers.calls)
        return {
            "error": error,
            "tolerance": limit,
            "passed": error <= limit,
            "ms": seconds * 1e3,
            "gb_per_s": layers.weight_bytes / seconds / 1e9,
            "tflop_per_s": 2 * case.rows * layers.num_codes / seconds / 1e12,
        }

    def _start(self, task: Task, channel: Channel) -> tuple[Case, PagedAttention, str | None]:
        channel.stage("start")
        case = find_case(task["case"])
        implementation = find_implementation(task["implementation"], device_at_hand())
        return case, implementation, implementation.refuses(case.use)

    def _peer(self, task: Task, channel: Channel) -> Result:
        case = find_case(task["case"])
        channel.stage("start")
        try:
            if task["peer"] == "torch":
                found = list(time_torch(case, self._turns.alone, channel.stage))
            elif task["peer"] == "jax-ragged":
                found = list(time_ragged(case, self._turns.alone, channel.stage))
            else:
                found = list(time_jax_peer(task["peer"], case, self._turns.alone, channel.stage))
        except NoPeerError as reason:
            return {"refused": str(reason)}
        usable = [f for f in found if "ms" in f and f["error"] <= PEER_TOLERANCE]
        best = min(usable, key=lambda f: f["ms"], default=None)
        if best is None:
            return {"refused": "no setting of it ran right", "settings": found}
        return _timed(case, best["ms"] / 1e3) | {"setting": best["setting"], "settings": found}


class Products:
    """One program that multiplies rows with each of `LAYERS` weights, which no cache holds together, in several passes.

    Products of a step of decode rows take some 20 microseconds: one pass of them is over before the host has started
    the next, and its times differed by up to 1.6 between two runs.
    """

    PASSES = 8

    def __init__(self, case: MatmulCase, matmul: Matmul) -> None:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.PASSES, case.rows, *case.in_shape), np.float32)
        array = rng.standard_normal((*case.out_shape, *case.in_shape), np.float32)
        assert case.storage is not None
        coded = round_weight(array, len(case.in_shape), case.storage, case.dtype, case.arithmetic)
        self.num_codes = coded.codes.size
        self.weight_bytes = sum(array_bytes(leaf.size, leaf.dtype) for leaf in (coded.codes, coded.scales))
        copies = [jax.tree.map(jnp.copy, coded) for _ in range(LAYERS)]
        weights = [matmul.convert(copy) for copy in copies]
        rows = list(jnp.asarray(x, case.dtype))  # of each pass others, or XLA would compute one pass
        program = jax.jit(lambda weights, rows: [w.multiply(x) for x in rows for w in weights])
        self.launch = functools.partial(program.lower(weights, rows).compile(), weights, rows)
        self.calls = self.PASSES * LAYERS


def _timed(case: Case, seconds: float) -> Result:
    """Decode is limited by bytes, prefill by products; mixes give both."""
    result: Result = {"ms": seconds * 1e3, "gb_per_s": case.kv_bytes / seconds / 1e9}
    return result if case.decode_only else result | {"tflop_per_s": case.flops / seconds / 1e12}


def rates(backend: str) -> Result:
    """The ceilings of this card: bytes copied (read and written both counted), bytes read, bf16 products."""
    size, side = (2**24, 512) if backend == "cpu" else (2**32, 8192)
    x = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    copy, read = jax.jit(lambda x: x ^ 1), jax.jit(lambda x: x.max())
    copied = 2 * size / seconds_per_call(lambda: copy(x), 1)
    was_read = size / seconds_per_call(lambda: read(x), 1)
    x.delete()
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in (1, 2))
    multiply = jax.jit(jnp.matmul)
    product = 2 * side**3 / seconds_per_call(lambda: multiply(a, b), 1)
    return {"copy_gb_per_s": copied / 1e9, "read_gb_per_s": was_read / 1e9, "matmul_tflop_per_s": product / 1e12}


def written_right(case: Case, inputs: Inputs, cache: Sequence[np.ndarray]) -> bool:
    """Whether an empty cache holds the step's keys and values, each number in its page and head and none elsewhere.

    Works for any layout: a page's numbers of one head are compared as a set. Where in the page they lie is seen by
    `attend`. The dummy page may hold anything.
    """
    batch, scales, dtype = inputs.batch, inputs.scales, jnp.dtype(case.cache_dtype)
    rows, positions, tables = (np.asarray(x) for x in (batch.token_rows, batch.positions, batch.block_tables))
    kept = [
        np.asarray(stored(x, scale, dtype)).astype(np.float32)
        for x, scale in ((inputs.k, scales and scales.keys), (inputs.v, scales and scales.values))
    ]
    real = rows < len(batch.context_lens)
    pages = tables[rows[real], positions[real] // case.page_size]
    kept = [x[real] for x in kept]
    for page in range(1, cache[0].shape[0]):
        found = np.concatenate([x[page].astype(np.float32).reshape(x.shape[1], -1) for x in cache], axis=1)
        own = np.concatenate([x[pages == page].swapaxes(0, 1).reshape(found.shape[0], -1) for x in kept], axis=1)
        if not own.size and not found.any():
            continue
        wanted = np.zeros_like(found)
        wanted[:, : own.shape[1]] = own
        if not np.array_equal(np.sort(found, axis=1), np.sort(wanted, axis=1)):
            return False
    return True


# --- the command -----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """All tasks within the budget; the exit status is 1 if a check failed."""
    workers, budget_s = args.workers or WORKERS[args.backend], args.budget_s or BUDGET_S[args.backend]
    deadline = time.monotonic() + budget_s
    tasks = plan(args.backend, args.implementations or IMPLEMENTATIONS[args.backend], args.only)
    results = Results(args.json.with_suffix(".jsonl"), args.resume)
    tasks = [task for task in tasks if task["id"] not in results.found]
    environment = worker_environment(args.backend, workers)
    limits = LIMITS_S | ({} if args.patience_s is None else {"run": args.patience_s})
    unreached = tasks
    with tempfile.TemporaryDirectory() as turns:
        command = [sys.executable, __file__, "--worker", turns]
        processes = dict.fromkeys(task.get("process", "") for task in tasks if task.get("process"))
        pool = Pool(command, [*([""] * workers), *processes], environment, limits)
        try:
            unreached = pool.run(tasks, deadline, results.add, results.skip)
        except KeyboardInterrupt:
            unreached = [task for task in tasks if task["id"] not in results.found]
        finally:
            pool.close()
            found = summary(results, unreached, LEDGER)
            device = found["ceilings"].get("device")
            write_results(args.json, found, device=device, backend=args.backend, budget_s=budget_s, commit=args.commit)
    if results.found.get("rates", {}).get("stage") == "start":
        print(f"no worker could start on {args.backend}:\n{results.found['rates']['failure']}")
        return 2
    show(found, Console(width=130))
    return int(
        any("failure" in c or not c.get("passed", True) for c in found["checks"] + found["writes"] + found["products"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("device_check.json"), help="results; .jsonl beside it grows")
    parser.add_argument(
        "--budget-s", type=float, help="seconds after which nothing more is waited for; tpu: 3600, else 450"
    )
    parser.add_argument("--only", default="", help="regular expression; tasks are named kind/case/implementation")
    parser.add_argument("--implementations", nargs="+", help="names of the registry; the first is checked first")
    parser.add_argument(
        "--backend", choices=tuple(IMPLEMENTATIONS), default="gpu", help="cpu: short cases, to try the script"
    )
    parser.add_argument("--workers", type=int, help="processes that compile and check side by side; gpu: 5, tpu: 1")
    parser.add_argument("--patience-s", type=float, help="seconds a kernel may run before it counts as hung")
    parser.add_argument("--commit", default=commit(), help="for a copy of the tree without git's folder")
    parser.add_argument("--resume", action="store_true", help="keep what the .jsonl already holds")
    parser.add_argument("--server", action="store_true", help="start engines on the card and measure their steps")
    parser.add_argument("--shape", default="llama3.1-8b", help="with --server: of configs/shapes, or a folder")
    parser.add_argument("--worker", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        serve(Worker(Turns(args.worker)).handle)
        return
    if args.server:
        import device_server  # an engine needs libraries that the checks of kernels do without

        sys.exit(device_server.check(args.json, args.backend, args.shape, resume=args.resume, budget_s=args.budget_s))
    heed_termination()
    sys.exit(run(args))


if __name__ == "__main__":
    main()
