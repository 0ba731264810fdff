"""Updates of the weights under load: the pauses of the loop, and whether every token belongs to the version it names.

    python scripts/bench_live_weights.py [--updates 200] [--streams 64] [--json benchmarks/live_weights_cpu.json]

The demo model, random sampling, updates one behind the other with weights near its own, so that answers stay as long as
usual. Each stream asks again when it has been answered. `recompute` and `finish` take turns. Log-probabilities of the
answers are compared with those of the decoder as a function (`jaxserve.models.load_trainable`) on the weights of each
version; "torn" are those that differ by more than 1e-3.
"""

import argparse
import asyncio
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import write_record

from jaxserve import AsyncLLM, SamplingParams
from jaxserve.lab.bench.rates import machine_rates
from jaxserve.lab.workloads.tables import make_console
from jaxserve.models import load_trainable

ROW, BATCH = 128, 16
PROMPTS = ("Tell me a story about a fox.", "What is 683+784?", 'Reverse "wagon".', "Sort 4, 9, 1.")
TORN = 1e-3


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    overrides = {"model.max_len": ROW, "sched.max_rows": 16}
    llm = await asyncio.to_thread(AsyncLLM.from_config, None, {"model.path": "demo", **overrides})
    await asyncio.to_thread(llm.wait_until_built)
    _, params = load_trainable("demo")
    [stats] = llm._engine.stats
    await llm.update_weights(params, version="v0")  # compiles the copies of arrays
    compiles = stats.num_compiles
    weights = {"v0": params}
    answers: list[tuple[list[int], list[int], list[float], list[tuple[int, str]]]] = []
    pauses: dict[str, list[float]] = {"recompute": [], "finish": []}
    done = False

    async def stream(number: int) -> None:
        asked = 0
        while not done:
            sampling = SamplingParams(max_tokens=48, temperature=0.7, logprobs=0, seed=1000 * number + asked)
            prompt = llm.get_tokenizer().encode(PROMPTS[(number + asked) % len(PROMPTS)])
            updates = [u async for u in llm.generate({"prompt_token_ids": prompt}, sampling)]
            assert updates[-1].last and updates[-1].error is None
            token_ids = [token for update in updates for token in update.token_ids]
            drawn = [entry.logprob for update in updates for entry in update.logprobs or ()]
            answers.append((prompt, token_ids, drawn, [*updates[-1].weights]))
            asked += 1

    async def update() -> None:
        nonlocal done
        for number in range(1, args.updates + 1):
            key = jax.random.key(number)
            weights[f"v{number}"] = {
                name: array * (1 + 0.003 * jax.random.normal(jax.random.fold_in(key, at), array.shape))
                for at, (name, array) in enumerate(params.items())
            }
            policy = ("recompute", "finish")[number % 2]
            pauses[policy].append(
                await llm.update_weights(weights[f"v{number}"], version=f"v{number}", policy=policy)  # type: ignore[arg-type]
            )
        done = True

    await asyncio.gather(update(), *(stream(number) for number in range(args.streams)))
    steps = [one.schedule_s + one.dispatch_s + one.wait_s + one.commit_s for one in stats.steps()]
    found = {
        "updates": args.updates,
        "streams": args.streams,
        "answers": len(answers),
        "tokens": sum(len(token_ids) for _, token_ids, _, _ in answers),
        "compiles": stats.num_compiles - compiles,
        "pause_ms": {
            policy: {"median": statistics.median(times) * 1000, "max": max(times) * 1000}
            for policy, times in pauses.items()
        },
        "step_ms": {"median": statistics.median(steps) * 1000, "max": max(steps) * 1000},
    }
    await llm.shutdown(0.0)
    return found | compare(weights, answers)


def compare(weights: dict[str, dict[str, jax.Array]], answers: list[Any]) -> dict[str, Any]:
    """Each part of each answer, by the version that it names for it."""
    decoder, _ = load_trainable("demo")
    log_probs = jax.jit(decoder.log_probs)
    parts: dict[str, list[tuple[list[int], int, int, list[float]]]] = {}
    mixed = 0
    for prompt, token_ids, drawn, versions in answers:
        mixed += len(versions) > 1
        ends = [*(first for first, _ in versions[1:]), len(token_ids)]
        for (first, version), end in zip(versions, ends, strict=True):
            parts.setdefault(version, []).append(
                (prompt + token_ids, len(prompt) + first, len(prompt) + end, drawn[first:end])
            )
    worst, torn, equal, total = 0.0, 0, 0, 0
    for version, rows in parts.items():
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            tokens, lengths = np.zeros((BATCH, ROW), np.int32), np.zeros(BATCH, np.int32)
            for line, (ids, *_) in enumerate(batch):
                tokens[line, : len(ids)], lengths[line] = ids, len(ids)
            right = np.asarray(log_probs(weights[version], jnp.asarray(tokens), jnp.asarray(lengths)))
            for line, (_, first, end, drawn) in enumerate(batch):
                wanted, got = right[line, first - 1 : end - 1], np.asarray(drawn, np.float32)
                gaps = np.abs(wanted - got)
                worst, torn = max(worst, float(gaps.max(initial=0))), torn + int((gaps > TORN).sum())
                equal, total = equal + int((wanted == got).sum()), total + len(got)
    return {"torn": torn, "largest_difference": worst, "equal_bits": equal / total, "answers_of_several": mixed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    results = asyncio.run(measure(args))
    make_console().print(results)
    if args.json:
        write_record(args.json, results, rates=machine_rates())


if __name__ == "__main__":
    main()
