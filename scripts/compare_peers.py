"""jaxserve beside other engines: the same weights, the same requests, rounds taken in turns, one machine.

    python scripts/compare_peers.py --envs DIR --json benchmarks/peers_cpu.json --plot benchmarks/peers_cpu.png
    python scripts/compare_peers.py --envs DIR --dtype best --json benchmarks/peers_cpu_best.json
    python scripts/compare_peers.py --envs DIR --model experts --json benchmarks/peers_experts_cpu.json
    python scripts/compare_peers.py --envs DIR --model gemma3-270m --json benchmarks/peers_gemma3-270m_cpu.json
    python scripts/compare_peers.py --envs DIR --device gpu --shape llama3-8b --json benchmarks/peers_gpu_llama3-8b.json

`scripts/peers/setup_peers.sh DIR` makes the other engines' environments. Each engine loads the model in a process of
its own; of all these only the one whose turn it is runs. A round runs every engine once, on the same requests (a model
of which memory holds only one: each engine all rounds, then the next). Greedy, lengths forced, from token ids to token
ids. Values are medians over the rounds; ratios are medians over the rounds of
jaxserve to the other in the same round, more than 1 where jaxserve is the better one.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from fetch_real_models import FetchError, ensure_model
from peers.checkpoint import ensure_checkpoint
from peers.compare import OURS, Comparison, Plan
from peers.limits import Limit, best_rates, find_file_limits, find_limits, shares
from peers.models import DENSE, MODELS, PeerModel
from peers.process import SCRIPTS, PeerError, PeerProcess
from peers.report import agreement_table, limit_table, plot_rows, ratio_table
from peers.values import AS_PUBLISHED, Settings
from peers.workloads import WORKLOADS, Sizes, describe
from record import write_record

from jaxserve.lab.bench.rates import machine_rates
from jaxserve.lab.workloads.tables import make_console, make_title
from jaxserve.models.checkpoint import read_checkpoint

_MIN_AGREEMENT = (
    0.98  # of choices in float32; llama.cpp's flash attention rounds, and random weights leave logits close
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An engine by name.

    Attributes:
      env: folder of its environment.
      best: the fastest precision in which it works, by device.
      dtype: the only one, for an entry that is there for this precision.
      weights: what they are rounded to when they are loaded, where that is not the dtype; a name of `limits`.
      for_experts: only beside an expert model.
      dense: runs the dense model that belongs to it, with weights of its own.
    """

    module: str
    env: str
    best: dict[str, str]
    dtype: str | None = None
    weights: str | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    for_experts: bool = False
    dense: bool = False


_BFLOAT16 = {"cpu": "bfloat16", "gpu": "bfloat16"}


def _rounded(scheme: str, dtype: str) -> Kind:
    """jaxserve with weights of fewer bits on a CPU; `dtype`: of all else."""
    overrides = {"model.quantization": scheme}
    return Kind(
        module="jaxserve", env="jaxserve", best={"cpu": dtype}, dtype=dtype, weights=scheme, overrides=overrides
    )


KINDS = {
    OURS: Kind(module="jaxserve", env="jaxserve", best={"cpu": "float32", "gpu": "bfloat16"}),
    "jaxserve-bf16": Kind(module="jaxserve", env="jaxserve", best={"cpu": "bfloat16"}, dtype="bfloat16"),
    "jaxserve-int8": _rounded("int8-a8", "float32"),
    "jaxserve-int4": _rounded("int4-a8", "float32"),
    "jaxserve-dense": Kind(module="jaxserve", env="jaxserve", best={"cpu": "float32"}, for_experts=True, dense=True),
    "hf": Kind(module="hf", env="hf", best=_BFLOAT16),
    "hf-grouped": Kind(
        module="hf", env="hf", best={"cpu": "bfloat16"}, overrides={"experts": "grouped_mm"}, for_experts=True
    ),
    "hf-compile": Kind(module="hf", env="hf", best={"gpu": "bfloat16"}, overrides={"compile": True}),
    "hf-cb": Kind(module="hf_continuous", env="hf", best=_BFLOAT16),
    "hf-cb-compile": Kind(module="hf_continuous", env="hf", best={"gpu": "bfloat16"}, overrides={"compile": 1}),
    "llamacpp": Kind(module="llamacpp", env="llamacpp", best={"cpu": "bfloat16"}),
    "llamacpp-q8": Kind(module="llamacpp", env="llamacpp", best={"cpu": "q8_0"}, dtype="q8_0"),
    "vllm": Kind(module="vllm", env="vllm", best=_BFLOAT16),
    "vllm-eager": Kind(module="vllm", env="vllm", best=_BFLOAT16, overrides={"eager": True}),
}
DEFAULT_ENGINES = {
    ("cpu", "float32"): "jaxserve,hf,hf-cb,llamacpp,vllm",
    ("cpu", "best"): "jaxserve,jaxserve-bf16,jaxserve-int8,hf,llamacpp,llamacpp-q8,vllm",
    ("gpu", "float32"): "jaxserve,hf-cb,hf-compile",
    ("gpu", "best"): "jaxserve,hf-cb,hf-cb-compile,hf-compile",
}
SHAPES = {"llama3-8b": "llama3.1-8b", "qwen3-0.6b": "qwen3-0.6b"}


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="jaxserve beside other engines, in turns on one machine")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache/jaxserve/peers", help="of setup_peers.sh")
    parser.add_argument("--python", action="append", default=[], metavar="ENV=PATH", help="another interpreter")
    parser.add_argument("--engines", help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--workloads", help=f"comma-separated, of {', '.join(WORKLOADS)}; default: those of the model")
    parser.add_argument("--dtype", choices=("float32", "best"), help="default: float32 on a CPU, best on a GPU")
    parser.add_argument("--rounds", type=int, help="default: those of the model")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--model", choices=tuple(MODELS), default=DENSE, help="of a CPU run: random weights, or a published file"
    )
    parser.add_argument("--prepare", action="store_true", help="only write the files of weights, and end")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-0.6b", help="random weights of a GPU run")
    parser.add_argument("--requests", type=int, help="of the loads with many; default: of the model")
    parser.add_argument("--load", type=float, default=0.7, help="poisson: share of jaxserve's requests/s in mixed")
    parser.add_argument("--rate", type=float, help="poisson: requests/s, in place of --load")
    parser.add_argument("--max-noise", type=float, default=0.1, help="do a run again if others used more of the cores")
    parser.add_argument("--kv-gib", type=float, default=2.0, help="for keys and values, of each engine on a CPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of jaxserve's config")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a start, and for a run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    model = model_of(args)
    if is_published(model) and args.dtype:
        parser.error(f"--dtype: {args.model} has the codes of its file")
    args.dtype = args.dtype or (AS_PUBLISHED if is_published(model) else "float32" if args.device == "cpu" else "best")
    args.engines = (args.engines or model.engines or DEFAULT_ENGINES[args.device, args.dtype]).split(",")
    args.workloads = (args.workloads or model.workloads).split(",")
    args.rounds = model.rounds if args.rounds is None else args.rounds
    for name, known in (("engines", KINDS), ("workloads", WORKLOADS)):
        if unknown := [value for value in getattr(args, name) if value not in known]:
            parser.error(f"--{name}: no {unknown[0]!r}; there are {', '.join(known)}")
    if far := [name for name in args.engines if KINDS[name].for_experts and not model.dense]:
        parser.error(f"--engines: {far[0]} is for a model with experts, and {args.model} has none")
    if "poisson" in args.workloads and model.one_at_a_time:
        parser.error(f"--workloads: poisson has no place for {args.model}, whose engines are loaded one at a time")
    if "poisson" in args.workloads and args.rate is None and not {"mixed", OURS} <= {*args.workloads, *args.engines}:
        parser.error("--workloads: poisson needs the load of jaxserve in mixed, or --rate")
    return args


def model_of(args: argparse.Namespace) -> PeerModel:
    """The model of a CPU run; the shapes of a GPU run are asked as the dense one is."""
    return MODELS[args.model if args.device == "cpu" else DENSE]


def is_published(model: PeerModel) -> bool:
    return model.config is None


def _config_of(model: PeerModel) -> dict[str, Any]:
    assert model.config is not None, "a published file"
    return model.config


def dtype_of(kind: Kind, args: argparse.Namespace) -> str:
    if args.dtype == AS_PUBLISHED:
        return AS_PUBLISHED
    return kind.dtype or ("float32" if args.dtype == "float32" else kind.best[args.device])


def find_files(name: str, args: argparse.Namespace) -> Path:
    """The directory of the model that an engine loads; on a CPU made first if it is not there. Raises PeerError."""
    if args.device != "cpu":
        return SCRIPTS.parent / "configs/shapes" / SHAPES[args.shape]
    kind = KINDS[name]
    name = model_of(args).dense if kind.dense else args.model
    assert name is not None, "an engine for a dense model beside experts is refused where there is none"
    if is_published(MODELS[name]):
        try:
            return ensure_model(name, say=lambda line: print(line, file=sys.stderr, flush=True))
        except FetchError as error:
            raise PeerError(str(error)) from error
    model = ensure_checkpoint(name, args.envs / "models")
    if kind.module == "llamacpp":
        dtype = dtype_of(kind, args)
        ensure_gguf(model, {"float32": "f32", "bfloat16": "bf16"}.get(dtype, dtype), python_of(kind, args))
    return model


def python_of(kind: Kind, args: argparse.Namespace) -> str:
    chosen = dict(pair.split("=", 1) for pair in args.python)
    here = sys.executable if kind.env == OURS else str(args.envs / kind.env / "bin/python")
    return chosen.get(kind.env, here)


def start_engine(name: str, args: argparse.Namespace, sizes: Sizes) -> PeerProcess:
    """Loads an engine in its environment. Raises PeerError."""
    kind = KINDS[name]
    if args.device not in kind.best:
        raise PeerError(f"{name} is not for --device {args.device}; there: {', '.join(kind.best)}")
    model = find_files(name, args)
    ours = model_of(args).overrides | {
        key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in args.set)
    }
    settings = Settings(
        model=str(model),
        random_weights=args.device == "gpu",
        dtype=dtype_of(kind, args),
        device=args.device,
        threads=args.threads,
        max_len=-(-sizes.max_len // 128) * 128,
        max_requests=sizes.max_requests,
        kv_bytes=int(args.kv_gib * 2**30),
        memory_share=0.85 / len(args.engines),
        overrides=kind.overrides | (ours if kind.module == OURS else {}),
    )
    env = {} if args.device == "gpu" else {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    log = args.envs / "logs" / f"{name}.log"
    return PeerProcess(name, kind.module, python_of(kind, args), settings, log, args.timeout, env)


def ensure_gguf(model: Path, precision: str, python: str) -> None:
    out = model.with_suffix(f".{precision}.gguf")
    if not out.exists():
        command = [python, "-m", "peers.gguf_file", str(model), str(out), precision]
        try:
            subprocess.run(command, check=True, cwd=SCRIPTS)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"llamacpp: cannot make {out.name}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What goes to the tables, the record and the picture.

    Attributes:
      titles: of the workloads.
      what: model, device, precision.
      sizes: of the requests.
      rates: of the machine, as measured before the engines were loaded, and after each workload.
    """

    comparison: Comparison
    args: argparse.Namespace
    titles: dict[str, str]
    what: str
    sizes: Sizes
    rates: list[dict[str, dict[str, float]] | None]

    def limits(self) -> dict[str, dict[str, Limit]]:
        """Engine -> workload -> limit. Empty on a GPU, whose rates are not measured here."""
        if self.args.device != "cpu":
            return {}
        best = best_rates(self.rates, self.args.threads)
        model = model_of(self.args)
        if is_published(model):
            found = find_file_limits(find_files(OURS, self.args), self.sizes, best)
            return dict.fromkeys(self.args.engines, found)
        return {
            name: find_limits(
                _config_of(MODELS[model.dense] if KINDS[name].dense and model.dense else model),
                self.sizes,
                KINDS[name].weights or dtype_of(KINDS[name], self.args),
                best,
            )
            for name in self.args.engines
        }

    def write(self) -> None:
        """All that is known so far, as a file and a picture, where they are asked for."""
        args, comparison, limits = self.args, self.comparison, self.limits()
        if args.json:
            settings = {
                "rounds": args.rounds,
                "dtype": args.dtype,
                "set": args.set,
                "load": args.load,
                "threads": args.threads,
                "what": self.what,
                "sizes": dataclasses.asdict(self.sizes),
            }
            results = comparison.as_json()
            for row in comparison.rows():
                found = results["workloads"][row.workload]
                found["figures"][row.figure.name]["shares"] = shares(row, limits)
                found["limits"] = {
                    name: dataclasses.asdict(of[row.workload]) for name, of in limits.items() if row.workload in of
                }
            write_record(
                args.json,
                results,
                engines=comparison.abouts,
                settings=settings,
                workloads=self.titles,
                rates=self.rates[-1],
                rates_in_turn=self.rates,
            )
        if args.plot:
            plot_rows(comparison.rows(), args.engines, self.titles, self.what, args.plot)

    def show(self) -> None:
        args, comparison = self.args, self.comparison
        console = make_console()
        console.width = max(console.width, 50 + 20 * len(args.engines))
        console.print(make_title(self.what), ratio_table(comparison.rows(), OURS, args.engines, self.titles))
        if any(self.limits().values()):
            console.print(limit_table(comparison.rows(), self.limits(), args.engines, self.titles))
        of_engines = (
            f"{name} {found / 2**20:,.0f} MiB" for name, found in comparison.memory.items() if found is not None
        )
        if memory := ", ".join(of_engines):
            console.print(f"in memory at most, loading included: {memory}")
        for workload, notes in comparison.notes.items():
            console.print(f"{workload}: " + "; ".join(f"{name}: {note}" for name, note in notes.items()))
        if any(found.choices for found in comparison.agreements.values()):
            console.print(agreement_table(comparison.agreements, comparison.reference))


def run(report: Report) -> None:
    """All engines together, or one after the other where memory has no room for two. Raises PeerError."""
    args, comparison = report.args, report.comparison
    groups = [[name] for name in args.engines] if model_of(args).one_at_a_time else [args.engines]
    for group in groups:
        with contextlib.ExitStack() as stack:
            for name in group:
                print(f"loading {name}", file=sys.stderr, flush=True)
                peer = start_engine(name, args, report.sizes)
                stack.callback(peer.close)
                comparison.add(name, peer, same_weights=not KINDS[name].dense and KINDS[name].weights is None)
            for name in args.workloads:
                comparison.measure(name)
                report.rates.append(machine_rates())
                report.write()
        for name in group:
            comparison.remove(name)


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    model = model_of(args)
    sizes = model.sizes if args.requests is None else dataclasses.replace(model.sizes, requests=args.requests)
    what = f"{args.model if args.device == 'cpu' else args.shape}, {args.device}, {args.dtype}"
    try:
        files = [find_files(name, args) for name in args.engines]
        if args.prepare:
            return 0
        plan = Plan(
            rounds=args.rounds,
            sizes=sizes,
            vocab=read_checkpoint(files[0]).config["vocab_size"],
            load=args.load,
            rate=args.rate,
            max_noise=args.max_noise,
            compare_tokens=args.device == "cpu",
        )
        comparison = Comparison(plan, say=lambda line: print(line, file=sys.stderr, flush=True))
        report = Report(
            comparison=comparison,
            args=args,
            titles={name: describe(name, sizes) for name in args.workloads},
            what=what,
            sizes=sizes,
            rates=[machine_rates()],
        )
        run(report)
        report.show()
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    far = [name for name, found in comparison.agreements.items() if found.choices and found.share_same < _MIN_AGREEMENT]
    if args.dtype == "float32" and far:
        print(f"error: in float32 {', '.join(far)} chose other tokens than {comparison.reference}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that processes are ended first
    sys.exit(main())
