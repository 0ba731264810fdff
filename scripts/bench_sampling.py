"""Times the sampling stage alone, one line per mix of options: what a batch pays for what its rows ask.

    python scripts/bench_sampling.py [--rows 16] [--vocab 32000] [--json FILE]

Prints median and fastest of 15 runs in milliseconds, and the seconds of the one compile that serves all lines.
"""

import argparse
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import write_record

from jaxserve.api import SamplingParams
from jaxserve.runtime.row_state import (
    SamplingState,
    configure_row,
    encode_row,
    encode_row_state,
    init_sampling_state,
    needs_row_state,
)
from jaxserve.runtime.sampling import sample
from jaxserve.sched.plan import RowSetup

PROMPT_LEN, OUTPUT_LEN, REPEATS = 40, 10, 15
HEAVY = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "min_tokens": 100}
MIXES: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "greedy, logprobs": {"temperature": 0.0, "logprobs": 5},
    "greedy, penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "greedy, logit_bias": {"temperature": 0.0, "logit_bias": {5: 1.0}},
    "greedy, allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": range(100)},
    "temperature": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k, top_p": {"top_k": 50, "top_p": 0.9},
    "everything": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "allowed_token_ids": range(100), "logprobs": 5, **HEAVY},
}


def make_rows(num_rows: int, vocab_size: int, options: dict) -> tuple[np.ndarray, SamplingState]:
    """Parameters [R, F] and the state of rows that all use `options`, in the middle of their output."""
    rng = np.random.default_rng(0)
    configure = jax.jit(configure_row, donate_argnums=0)
    state, params = init_sampling_state(num_rows, vocab_size), []
    for row in range(num_rows):
        setup = RowSetup(
            row=row,
            request_id=str(row),
            index=0,
            seed=row,
            prompt_len=PROMPT_LEN,
            num_tokens=PROMPT_LEN + OUTPUT_LEN,
            token_ids=tuple(rng.integers(0, vocab_size, PROMPT_LEN + OUTPUT_LEN).tolist()),
            sampling=SamplingParams(max_tokens=None, **options),
            stop_token_ids=(2,),
            bad_word_ids=((1, 2),) if "min_tokens" in options else (),
        )
        params.append(encode_row(setup))
        if needs_row_state(setup):
            state = configure(state, jnp.int32(row), encode_row_state(setup, vocab_size))
    return np.stack(params), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(args.rows, args.vocab)) * 3, jnp.float32)
    rows = jnp.arange(args.rows, dtype=jnp.int32)
    lens, should_sample = jnp.full_like(rows, PROMPT_LEN + OUTPUT_LEN), jnp.ones(args.rows, bool)
    compiled = None
    figures = {}
    for name, options in MIXES.items():
        params, state = make_rows(args.rows, args.vocab, options)
        arguments = (logits, rows, lens, jnp.asarray(params), should_sample)
        if compiled is None:
            start = time.perf_counter()
            compiled = jax.jit(sample, donate_argnums=5).lower(*arguments, state).compile()
            print(f"compile {time.perf_counter() - start:.1f} s, {jax.devices()[0].device_kind}", flush=True)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            output, state = compiled(*arguments, state)
            jax.block_until_ready((output, state))
            times.append((time.perf_counter() - start) * 1e3)
        figures[name] = {"median_ms": round(statistics.median(times), 3), "best_ms": round(min(times), 3)}
        print(f"{name:28s} median {statistics.median(times):8.2f} ms, best {min(times):8.2f} ms", flush=True)
    if args.json:
        write_record(args.json, figures, rows=args.rows, vocab=args.vocab)


if __name__ == "__main__":
    main()
