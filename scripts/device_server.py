"""Does a server answer on this card, and how fast: what `device_check.py --server` runs, one part after the other.

    python scripts/device_check.py --server --json device_server_h100.json                 on a GPU
    python scripts/device_check.py --server --backend tpu --json device_server_v6e.json    on a TPU

Each part is a process of its own with a limit of seconds. A part that fails, hangs or crashes is a line of the result,
and the next one runs; with `--resume` the parts that have a result are not run again. The parts:

    demo        64 greedy tokens of the demo model in float32, for four prompts, equal to those of this machine's CPU
    cold, warm  the engine with random weights of `--shape` in three shapes of rows and three of tokens, started twice:
                seconds to ready, milliseconds a token of one stream, a step of 64 streams, a prompt of 8,192 tokens
    tensor2     the same over two devices, where there are two
    plan        what `jaxserve plan` expects of the same steps
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from record import write_record

from jaxserve import LLM, SamplingParams

SHAPES = Path(__file__).parents[1] / "configs" / "shapes"
LIMITS_S = {"demo": 180, "cold": 420, "warm": 240, "tensor2": 420, "plan": 120}
_PROMPTS = ("Once upon a time", "What is 683+784?", 'Reverse "wagon".', "Hello! What can you do?")
_STREAMS, _STREAM_TOKENS, _STREAM_CONTEXT = 64, 64, 512
_PROMPT_TOKENS = 8192
_MAX_LEN = 8448

Part = dict[str, Any]


def check(json_path: Path, backend: str, shape: str, *, resume: bool, budget_s: float | None = None) -> int:
    """Runs the parts, writes the record after each, and prints what came. The exit status: 1 if a part failed."""
    lines = json_path.with_suffix(".jsonl")
    found: dict[str, Part] = {}
    if resume and lines.exists():
        found = {part["part"]: part for part in map(json.loads, lines.read_text().splitlines())}
    deadline = None if budget_s is None else time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="jaxserve-device-server-") as cache:
        for part, limit_s in LIMITS_S.items():
            if part in found and not found[part].get("failure"):
                continue
            if deadline is not None and time.monotonic() > deadline:
                found[part] = {"part": part, "failure": "the budget was used up"}
            else:
                print(f"{part}: at most {limit_s} s", flush=True)
                found[part] = _run(part, backend, shape, cache, limit_s)
            with lines.open("a") as file:
                file.write(json.dumps(found[part]) + "\n")
            print(f"{part}: {_words(found[part])}", flush=True)
    device = next((one["device"] for one in found.values() if "device" in one), "unknown")
    write_record(json_path, [*found.values()], device=device, shape=shape, backend=backend, rates=None)
    return int(any(part.get("failure") for part in found.values()))


def _run(part: str, backend: str, shape: str, cache: str, limit_s: float) -> Part:
    command = [sys.executable, __file__, "--inside", part, "--backend", backend, "--shape", shape, "--cache", cache]
    begin_s = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        return {"part": part, "failure": f"no answer in {limit_s:.0f} s", "log": _tail(error.stderr)}
    said = done.stdout.splitlines()
    if done.returncode or not said:
        return {"part": part, "failure": f"exit status {done.returncode}", "log": _tail(done.stderr)}
    return {"part": part, "seconds": round(time.monotonic() - begin_s, 1), **json.loads(said[-1])}


def _tail(text: str | bytes | None) -> list[str]:
    return (text.decode(errors="replace") if isinstance(text, bytes) else text or "").splitlines()[-12:]


def _words(part: Part) -> str:
    return ", ".join(f"{name} {value}" for name, value in part.items() if name not in ("part", "tokens"))


# --- the parts, each in a process of its own --------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> Part:
    """Tokens of the device beside those of the CPU, which another process computes."""
    here = _demo_tokens()
    cpu = _child_tokens("cpu")
    equal = sum(one == other for one, other in zip(here, cpu, strict=True))
    failure = {} if equal == len(here) else {"failure": "tokens differ from those of the CPU", "tokens": [here, cpu]}
    return {"equal": f"{equal} of {len(here)}", **_device(), **failure}


def _child_tokens(platform: str) -> list[list[int]]:
    command = [sys.executable, __file__, "--inside", "tokens"]
    environment = os.environ | {"JAX_PLATFORMS": platform}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the process for {platform} ended with {done.returncode}: {_tail(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])["tokens"]


def _demo_tokens() -> list[list[int]]:
    with LLM("demo", dtype="float32", progress=False) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in llm.generate([*_PROMPTS], greedy)]


def _model(args: argparse.Namespace, tensor: int = 1) -> Part:
    """The engine with random weights: start, one stream, many streams, a long prompt."""
    begin_s = time.monotonic()
    settings = {**_config(args.shape, tensor, args.backend), "runtime.compile_cache": args.cache}
    with LLM.from_config(None, settings, progress=False) as llm:
        ready_s = time.monotonic() - begin_s
        one = _step_ms(llm, 1, 16)
        many = _step_ms(llm, _STREAMS, _STREAM_CONTEXT)
        prompt_s = _seconds(llm, [_ids(_PROMPT_TOKENS, 0)], 1)
    return {
        "ready_s": round(ready_s, 1),
        "one_stream_ms": round(one, 2),
        f"{_STREAMS}_streams_step_ms": round(many, 2),
        f"prompt_{_PROMPT_TOKENS}_s": round(prompt_s, 3),
        **_device(),
    }


def _tensor2(args: argparse.Namespace) -> Part:
    import jax

    if len(jax.devices()) < 2:
        return {"left_out": "there is one device", **_device()}
    return _model(args, tensor=2)


def _plan(args: argparse.Namespace) -> Part:
    """Milliseconds of the same steps as a plan has them, by arithmetic alone."""
    import jax

    from jaxserve.config import load_config
    from jaxserve.lab.planner.make import PlanOptions, make_plan
    from jaxserve.values.chips import chip_of_kind

    chip = chip_of_kind(jax.devices()[0].device_kind)
    if chip is None:
        return {"left_out": f"no chip of the plans is called {jax.devices()[0].device_kind!r}", **_device()}
    topology = chip.topology((1, 1) if chip.backend == "tpu" else (1,))
    config = load_config(None, _config(args.shape, 1, args.backend), environ={}).config
    plan = make_plan(config, topology.name, PlanOptions(compile=False, context=_STREAM_CONTEXT))
    steps = {
        f"{'decode' if p.decode else 'mixed'} {p.tokens}x{p.rows}": round(p.seconds * 1000, 2) for p in plan.predictions
    }
    return {"topology": topology.name, "fits": plan.fits, "predicted_ms": steps, **_device()}


def _config(shape: str, tensor: int, backend: str) -> dict[str, Any]:
    on_card = backend != "cpu"
    return {
        "model.path": str(SHAPES / shape) if (SHAPES / shape).is_dir() else shape,
        "model.random_weights": True,
        "model.skip_tokenizer": True,
        "model.max_len": _MAX_LEN,
        "parallel.tensor": tensor,
        "sched.max_rows": _STREAMS,
        "sched.max_step_tokens": 2048,
        "runtime.row_buckets": [1, 16, _STREAMS],
        "runtime.token_buckets": [128, 1024, 2048],
        "runtime.background_buckets": False,
        "cache.page_size": {"gpu": 64, "tpu": 128, "cpu": 16}[backend],
        **({} if on_card else {"cache.num_pages": 2 * _MAX_LEN // 16 + _STREAMS * 40}),
    }


def _step_ms(llm: LLM, rows: int, context: int) -> float:
    """Of a decode step: the time of many tokens without that of one, so that prompts are in neither."""
    prompts = [_ids(context, seed) for seed in range(rows)]
    _seconds(llm, prompts, 4)  # caches the prompts
    few, many = _seconds(llm, prompts, 1), _seconds(llm, prompts, 1 + _STREAM_TOKENS)
    return 1000 * (many - few) / _STREAM_TOKENS


def _seconds(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> float:
    begin_s = time.monotonic()
    llm.generate([*prompts], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False))
    return time.monotonic() - begin_s


def _ids(count: int, seed: int) -> list[int]:
    """Tokens of a prompt that no other seed begins like."""
    return [(seed * 7919 + at * 31) % 997 + 3 for at in range(count)]


def _device() -> Part:
    import jax

    first = jax.devices()[0]
    statistics = first.memory_stats() or {}
    most = {"peak_gib": round(statistics["peak_bytes_in_use"] / 2**30, 2)} if "peak_bytes_in_use" in statistics else {}
    return {"device": f"{len(jax.devices())} x {first.device_kind}", **most}


_PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "demo": _demo,
    "tokens": lambda args: {"tokens": _demo_tokens()},
    "cold": _model,
    "warm": _model,
    "tensor2": _tensor2,
    "plan": _plan,
}


def _inside() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", choices=tuple(_PARTS), required=True)
    parser.add_argument("--backend", default="gpu")
    parser.add_argument("--shape", default="llama3.1-8b")
    parser.add_argument("--cache")
    args = parser.parse_args()
    print(json.dumps(_PARTS[args.inside](args)), flush=True)


if __name__ == "__main__":
    _inside()
