"""What speculation gains at a known acceptance, beside what the times of the steps promise.

    python scripts/bench_replay.py --json benchmarks/speculation_replay_cpu.json

The demo model at the cost of 125 million parameters (`inflate_demo`) answers random prompts, and its answers are
recorded. Then drafts come from the recording, of which a share of positions is wrong, so that a draft is right with a
probability a, whatever came before. A step of width w then gives 1 + a + ... + a^(w-1) tokens of a row on average. With
T(R, w), the time of a step of R rows as measured at start, the promised gain is that number times T(R, 1) / T(R, w).
The gain is of tokens a second of all streams, medians over rounds in turns; drafts cost what a lookup in the
recording costs.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from inflate_demo import ensure_inflated
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams
from jaxserve.lab.bench.rates import machine_rates
from jaxserve.sched.plan import Limits

_PROMPT, _OUTPUT = 16, 128


def prompts(streams: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(streams)
    return [rng.integers(16, vocab, _PROMPT).tolist() for _ in range(streams)]


def start(model: Path, streams: int, overrides: dict[str, object]) -> LLM:
    settings = {
        "model.path": str(model),
        "model.max_len": 256,
        "sched.max_rows": streams,
        "cache.prefix_caching": False,  # the same prompts come again
        "runtime.background_buckets": False,
        **overrides,
    }
    return LLM.from_config(None, overrides=settings)


def answer(llm: LLM, asked: list[list[int]]) -> tuple[list[list[int]], float]:
    """Tokens, and tokens a second of all streams, their short prompts included."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True, detokenize=False)
    begin_s = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return found, sum(map(len, found)) / (time.perf_counter() - begin_s)


def step_ms(limits: Limits, streams: int, width: int) -> float:
    bucket = limits.find_bucket(streams * width, streams, True, width, 1)
    assert bucket is not None, (streams, width)
    return limits.step_ms[limits.buckets.index(bucket)]


def measure(
    streams: int, widths: list[int], acceptances: list[float], rounds: int, envs: Path
) -> tuple[list[dict[str, object]], dict[str, dict[str, float]]]:
    """Rows of the record for so many streams, and the rates of the machine afterwards."""
    model, asked = ensure_inflated(envs / "models"), prompts(streams, 1160)
    plain = start(model, streams, {})
    expected, _ = answer(plain, asked)
    recording = envs / f"replay-{streams}.jsonl"
    pairs = zip(asked, expected, strict=True)
    lines = [json.dumps({"prompt_token_ids": prompt, "token_ids": tokens}) for prompt, tokens in pairs]
    recording.write_text("\n".join(lines) + "\n")
    engines = {
        (acceptance, width): start(
            model,
            streams,
            {
                "speculation.method": "replay",
                "speculation.model": str(recording),
                "speculation.replay_errors": 1 - acceptance,
                "speculation.width": width,
                "speculation.adaptive": False,
            },
        )
        for acceptance in acceptances
        for width in widths
    }
    gains: dict[tuple[float, int], list[float]] = {key: [] for key in engines}
    for number in range(rounds + 1):  # the first warms up
        found, base = answer(plain, asked)
        for key, llm in engines.items():
            tokens, rate = answer(llm, asked)
            assert tokens == found, f"replay changes tokens at {key}"
            gains[key] += [rate / base] * bool(number)
        print(f"{streams} streams, round {number} of {rounds}", file=sys.stderr, flush=True)
    results: list[dict[str, object]] = []
    for (acceptance, width), llm in engines.items():
        limits: Limits = llm._engine._runner.limits
        tokens_a_step = sum(acceptance**place for place in range(width))
        times = step_ms(limits, streams, 1), step_ms(limits, streams, width)
        results.append(
            {
                "streams": streams,
                "acceptance": acceptance,
                "width": width,
                "gain": statistics.median(gains[acceptance, width]),
                "promised": tokens_a_step * times[0] / times[1],
                "step_ms": times,
            }
        )
    for llm in (plain, *engines.values()):
        llm.close()
    return results, machine_rates()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--widths", default="2,4,8")
    parser.add_argument("--acceptance", default="0.6,0.8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache/jaxserve/peers", help="of setup_peers.sh")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    widths, acceptances = [int(n) for n in args.widths.split(",")], [float(n) for n in args.acceptance.split(",")]
    ensure_inflated(args.envs / "models")
    rates, results = [machine_rates()], []
    # A process for each, since the programs of some twenty engines are more than one process may map.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for streams in map(int, args.streams.split(",")):
            rows, after = pool.submit(measure, streams, widths, acceptances, args.rounds, args.envs).result()
            results += rows
            rates.append(after)
    table = Table("streams", "acceptance", "width", "gain", "promised by step times", "ms plain, wide")
    for row in results:
        times = ", ".join(f"{ms:.1f}" for ms in row["step_ms"])
        table.add_row(
            *(str(row[name]) for name in ("streams", "acceptance", "width")),
            *(f"{row[name]:.2f}" for name in ("gain", "promised")),
            times,
        )
    Console(width=110).print(table)
    if args.json:
        write_record(args.json, {"rows": results}, rounds=args.rounds, rates_in_turn=rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
