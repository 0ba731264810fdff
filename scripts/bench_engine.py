"""The whole engine against plain dense JAX, on the same machine in the same run.

    python scripts/bench_engine.py [--json benchmarks/engine_cpu.json] [--repeats 5]

A random-weight Llama (hidden 768, 12 layers, 12/4 heads, ffn 2048, vocabulary 32000, float32) runs three loads: one
stream, 16 streams, and a prefill of 512 tokens. `dense` is a jitted unrolled transformer over a contiguous cache that
feeds its own argmax, with no scheduler, no paging and no sampling options: what the hardware gives to JAX. `engine` is
`Engine.step` with everything on. Each repeat runs both, one after the other; medians and their ratio are printed, and
the share of wall time in which the loop was not waiting for the device (host share).
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.api import SamplingParams
from jaxserve.assemble import build_devices
from jaxserve.config import load_config
from jaxserve.engine import Engine, ModelInfo
from jaxserve.progress import Quiet
from jaxserve.sched import create_scheduler
from jaxserve.sched.plan import StepPlan, StepResult

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
N, K, H, D, F, L, V = 12, 4, 64, 768, 2048, 12, 32000
DECODE_PROMPT = 64
DECODE_TOKENS = {1: 64, 16: 32}
PREFILL = 512


# ---- plain dense JAX -------------------------------------------------------------------------------------------------


def dense_weights() -> dict:
    rng = np.random.default_rng(0)

    def make(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * 0.02)

    return {
        "embedding": make(V, D),
        "head": make(D, V),
        "layers": [
            {
                "qkv": make(D, (N + 2 * K) * H),
                "out": make(N * H, D),
                "gate_up": make(D, 2 * F),
                "down": make(F, D),
                "norms": jnp.ones((2, D)),
            }
            for _ in range(L)
        ],
        "norm": jnp.ones(D),
    }


def _norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def _rope(x, positions):
    angles = positions[..., None] * 10000.0 ** (-jnp.arange(0, H, 2) / H)  # [B, T, H / 2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def dense_forward(weights, tokens, start, caches):
    """tokens [B, T] at positions start.. -> next token [B], caches (k, v [B, K, S, H] per layer)."""
    rows, num_tokens = tokens.shape
    positions = start + jnp.arange(num_tokens)[None] + jnp.zeros((rows, 1), jnp.int32)
    x = weights["embedding"][tokens]
    out_caches = []
    for layer, (keys, values) in zip(weights["layers"], caches, strict=True):
        qkv = (_norm(x, layer["norms"][0]) @ layer["qkv"]).reshape(rows, num_tokens, N + 2 * K, H)
        q, k, v = _rope(qkv[:, :, :N], positions), _rope(qkv[:, :, N : N + K], positions), qkv[:, :, N + K :]
        keys = jax.lax.dynamic_update_slice(keys, k.transpose(0, 2, 1, 3), (0, 0, start, 0))
        values = jax.lax.dynamic_update_slice(values, v.transpose(0, 2, 1, 3), (0, 0, start, 0))
        q = q.reshape(rows, num_tokens, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(rows, K, -1, H) * H**-0.5
        scores = jnp.einsum("bkqh,bksh->bkqs", q, keys).reshape(rows, K, N // K, num_tokens, -1)
        seen = jnp.arange(keys.shape[2])[None] <= positions[0][:, None]
        weight = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).reshape(rows, K, -1, keys.shape[2])
        mixed = jnp.einsum("bkqs,bksh->bkqh", weight, values).reshape(rows, K, N // K, num_tokens, H)
        x = x + mixed.transpose(0, 3, 1, 2, 4).reshape(rows, num_tokens, N * H) @ layer["out"]
        gate, up = jnp.split(_norm(x, layer["norms"][1]) @ layer["gate_up"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        out_caches.append((keys, values))
    logits = _norm(x[:, -1], weights["norm"]) @ weights["head"]
    return jnp.argmax(logits, -1).astype(jnp.int32), out_caches


class Dense:
    """The baseline. Cache lengths are what each load needs, so masked work is small."""

    def __init__(self) -> None:
        self.weights = dense_weights()
        self.step = jax.jit(dense_forward, donate_argnums=3)

    def _caches(self, rows: int, length: int):
        return [(jnp.zeros((rows, K, length, H)), jnp.zeros((rows, K, length, H))) for _ in range(L)]

    def decode(self, rows: int) -> float:
        count = DECODE_TOKENS[rows]
        caches = self._caches(rows, DECODE_PROMPT + count)
        tokens, caches = self.step(self.weights, jnp.ones((rows, DECODE_PROMPT), jnp.int32), 0, caches)
        jax.block_until_ready(tokens)
        start = time.perf_counter()
        for i in range(count - 1):
            tokens, caches = self.step(self.weights, tokens[:, None], DECODE_PROMPT + i, caches)
        jax.block_until_ready(tokens)
        return rows * (count - 1) / (time.perf_counter() - start)

    def prefill(self) -> float:
        caches = self._caches(1, PREFILL)
        start = time.perf_counter()
        tokens, _ = self.step(self.weights, jnp.ones((1, PREFILL), jnp.int32), 0, caches)
        jax.block_until_ready(tokens)
        return PREFILL / (time.perf_counter() - start)


# ---- the engine ------------------------------------------------------------------------------------------------------


class WaitTimer:
    """A runner that adds up how long its caller waits for results."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.limits = runner.limits
        self.waited_s = 0.0

    def dispatch(self, plan: StepPlan):
        return _TimedFlight(self, self._runner.dispatch(plan))


class _TimedFlight:
    def __init__(self, timer: WaitTimer, flight) -> None:
        self._timer, self._flight = timer, flight

    def result(self) -> StepResult:
        start = time.perf_counter()
        result = self._flight.result()
        self._timer.waited_s += time.perf_counter() - start
        return result


def run_engine(engine: Engine, timer: WaitTimer, rows: int, prompt_len: int, num_tokens: int) -> tuple[float, float]:
    """Tokens a second of the phase that counts, and its host share."""
    rng = np.random.default_rng(int(time.time_ns()) % 2**32)  # new prompts each time, so that no prefix hits
    seen: dict[str, list[float]] = {}

    def sink(update) -> None:
        seen.setdefault(update.request_id, []).append(time.perf_counter())

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for _ in range(rows):
        engine.submit(engine.prepare(rng.integers(0, V, prompt_len).tolist(), sampling), sink)
    if num_tokens == 1:
        timer.waited_s = 0.0
        engine.run_until_idle()
        wall = time.perf_counter() - start
        return rows * prompt_len / wall, 1 - timer.waited_s / wall
    while len(seen) < rows:
        engine.step()
    timer.waited_s = 0.0
    begin = time.perf_counter()
    before = sum(map(len, seen.values()))
    engine.run_until_idle()
    wall = time.perf_counter() - begin
    return (sum(map(len, seen.values())) - before) / wall, 1 - timer.waited_s / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        overrides = {
            "model.path": directory,
            "model.random_weights": True,
            "model.skip_tokenizer": True,
            "model.dtype": "float32",
            "cache.num_pages": 512,
            "sched.max_rows": 16,
            "sched.max_step_tokens": 512,
            "runtime.row_buckets": [1, 16],
            "runtime.token_buckets": [64, 512],
            "runtime.background_buckets": False,
        }
        timer = WaitTimer(build_devices(load_config(None, overrides).config, Quiet())[0].runner)
    engine = Engine(
        runner=timer,
        scheduler=create_scheduler("fcfs", timer.limits),
        tokenizer=None,
        model=ModelInfo(name="bench", vocab_size=V, max_model_len=timer.limits.max_model_len, eos_token_ids=()),
    )
    dense = Dense()
    loads = {
        "decode, 1 stream": (lambda: dense.decode(1), partial(run_engine, engine, timer, 1, DECODE_PROMPT, 64)),
        "decode, 16 streams": (lambda: dense.decode(16), partial(run_engine, engine, timer, 16, DECODE_PROMPT, 32)),
        "prefill, 512 tokens": (dense.prefill, partial(run_engine, engine, timer, 1, PREFILL, 1)),
    }
    results = {}
    table = Table(title="tokens a second, float32")
    for heading in ("load", "dense JAX", "engine", "engine / dense", "host share"):
        table.add_column(heading, justify="left" if heading == "load" else "right")
    for name, (run_dense, run_load) in loads.items():
        run_dense(), run_load()  # compile the baseline, touch the pages
        pairs = [(run_dense(), *run_load()) for _ in range(args.repeats)]
        dense_rate, rate, host = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(p[1] / p[0] for p in pairs)
        results[name] = {"dense": dense_rate, "engine": rate, "ratio": ratio, "host_share": host, "pairs": pairs}
        table.add_row(name, f"{dense_rate:.1f}", f"{rate:.1f}", f"{ratio:.2f}", f"{host:.1%}")
    console.print(table)
    if args.json:
        write_record(args.json, results, repeats=args.repeats)


if __name__ == "__main__":
    main()
