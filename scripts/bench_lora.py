"""What LoRA adapters cost a decode step.

    python scripts/bench_lora.py [--rounds 25] [--vllm PYTHON] [--json benchmarks/lora_cpu.json]

A random-weight Llama of 125 M parameters (that of bench_engine.py), float32, 16 streams that generate; adapters of rank
16 in all modules, with random weights. Four engines in one process: one without slots; one with 8 slots and no adapter
in use; one whose streams all have one adapter; and one with eight adapters, two streams each. They take turns of a few
steps each, so that what else the machine does is shared by all. A cost is the median over the rounds of the seconds of
a token beside those of the engine without slots in the same round.

`--vllm` is the Python of an environment that scripts/peers/setup_peers.sh makes: vLLM is measured after this package,
one engine without LoRA and one with eight slots, which take turns in the same way (scripts/peers/lora_vllm.py).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_engine import MODEL
from record import write_record
from safetensors.numpy import save_file

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import Engine
from jaxserve.lab.bench.rates import machine_rates
from jaxserve.lab.workloads.tables import make_console

STREAMS, SLOTS, RANK = 16, 8, 16
MAX_LEN, STEPS = 512, 8  # tokens of a stream, and steps of a turn
BASE = "without slots"


def write_adapter(directory: Path, seed: int) -> Path:
    """Of all modules of MODEL."""
    hidden, ffn = MODEL["hidden_size"], MODEL["intermediate_size"]
    kv = hidden // MODEL["num_attention_heads"] * MODEL["num_key_value_heads"]
    modules = {f"self_attn.{name}_proj": (size, hidden) for name, size in zip("qkvo", (hidden, kv, kv, hidden))}  # noqa: B905
    modules |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(MODEL["num_hidden_layers"]):
        for module, (num_out, num_in) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((RANK, num_in), np.float32) * 0.02
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((num_out, RANK), np.float32) * 0.02
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


class Streams:
    """An engine that generates for all its rows, some steps at a time."""

    def __init__(self, overrides: dict[str, Any], adapters: list[Path], names: list[str | None]) -> None:
        """`adapters`: what is loaded; `names`: of each stream its adapter."""
        engine = assemble(load_config(None, overrides)).engine
        assert isinstance(engine, Engine), "one replica"
        self.engine = engine
        self.tokens = 0
        for path in adapters:
            self.load(path.name, path)
        rng = np.random.default_rng(0)
        for name in names:
            self.submit(rng.integers(1, 30000, 16).tolist(), name, max_tokens=MAX_LEN - 16)

    def load(self, name: str, path: Path) -> None:
        loaded = self.engine.model.adapters
        assert loaded is not None, "the engine has slots"
        loaded.load(name, path, self.engine.model.name)

    def submit(self, prompt: list[int], adapter: str | None, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        request = self.engine.prepare({"prompt_token_ids": prompt}, sampling, RequestOptions(adapter=adapter))

        def sink(update: Any) -> None:
            assert update.error is None, update.error
            self.tokens += len(update.token_ids)

        self.engine.submit(request, sink)

    def turn(self) -> float:
        """Seconds of a token of all streams, over STEPS steps, after which nothing is in flight."""
        begin_s, before = time.perf_counter(), self.tokens
        for _ in range(STEPS):
            self.engine.step()
        while self.engine.step(launch=False):
            pass
        taken_s = time.perf_counter() - begin_s
        return taken_s * STREAMS / (self.tokens - before)


def measure(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(MODEL))
    plain = {
        "model.path": str(root / "model"),
        "model.random_weights": True,
        "model.skip_tokenizer": True,
        "model.dtype": "float32",
        "model.max_len": MAX_LEN,
        "sched.max_rows": STREAMS,
        "sched.max_step_tokens": 256,
        "cache.num_pages": 512,
        "cache.prefix_caching": False,
        "runtime.row_buckets": [STREAMS],
        "runtime.background_buckets": False,
    }
    tuned = {**plain, "adapters.slots": SLOTS, "adapters.max_rank": RANK}
    paths = [write_adapter(root / f"adapter-{number}", number) for number in range(SLOTS)]
    names = [path.name for path in paths]
    cases = {
        BASE: Streams(plain, [], [None] * STREAMS),
        "unused": Streams(tuned, paths, [None] * STREAMS),
        "one adapter": Streams(tuned, paths, [names[0]] * STREAMS),
        "eight adapters": Streams(tuned, paths, [names[row % SLOTS] for row in range(STREAMS)]),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(2 + args.rounds):
        order = list(cases.items())
        for name, streams in order[number % 4 :] + order[: number % 4]:
            found = streams.turn()
            if number >= 2:  # the first have prompts in them
                times[name].append(found)
    return summary(times)


def measure_vllm(python: str, rounds: int, root: Path) -> dict[str, Any]:
    """The same of vLLM, after `measure`, which has written model and adapters."""
    adapters = [str(root / f"adapter-{number}") for number in range(SLOTS)]
    script = Path(__file__).parent / "peers" / "lora_vllm.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    rows: dict[str, list[int | None]] = {
        BASE: [None] * STREAMS,
        "unused": [None] * STREAMS,
        "one adapter": [0] * STREAMS,
        "eight adapters": [row % SLOTS for row in range(STREAMS)],
    }
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for paths in ([], adapters):
            command = [python, str(script), str(root / "model"), str(STREAMS), str(4 * STEPS), str(RANK), *paths]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
            processes.append(stack.enter_context(subprocess.Popen(command, **pipes)))
            stack.callback(processes[-1].kill)
            ask(processes[-1], None)
        times: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(2 + rounds):
            order = list(rows.items())
            for name, adapter_of in order[number % 4 :] + order[: number % 4]:
                found = float(ask(processes[name != BASE], adapter_of))
                if number >= 2:  # as above
                    times[name].append(found)
    return summary(times)


def ask(process: "subprocess.Popen[str]", adapter_of: list[int | None] | None) -> str:
    """The line with which vLLM's process answers; None: its first one. Raises SystemExit when it has died."""
    assert process.stdin is not None and process.stdout is not None
    if adapter_of is not None:
        process.stdin.write(json.dumps(adapter_of) + "\n")
        process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise SystemExit(f"vLLM's process ended with {process.wait()}")
    return line


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of seconds of a token, by case, and of the costs beside the engine without slots in the same round."""
    costs = {name: [a / b - 1 for a, b in zip(found, times[BASE], strict=True)] for name, found in times.items()}
    return {
        "token_ms": {name: 1000 * statistics.median(found) for name, found in times.items()},
        "cost": {name: statistics.median(found) for name, found in costs.items()},
        "quartiles": {name: statistics.quantiles(found)[::2] for name, found in costs.items() if name != BASE},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="at most 55, after which streams would end")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure vLLM in this environment, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = measure(args, Path(root))
        if args.vllm is not None:
            result["vllm"] = measure_vllm(args.vllm, args.rounds, Path(root))
    make_console().print(result)
    if args.json is not None:
        write_record(args.json, result, rates=machine_rates(), rounds=args.rounds)


if __name__ == "__main__":
    main()
