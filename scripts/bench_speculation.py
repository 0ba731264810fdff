"""What drafts and rounds gain: the demo's tasks, each setting in turn in one run.

    python scripts/bench_speculation.py --json benchmarks/speculation_cpu.json
    python scripts/bench_speculation.py --model inflated --settings plain,eagle4,ngram8,suffix8 --items 4 \
        --peers llamacpp,llamacpp-lookup,vllm,vllm-ngram
    python scripts/bench_speculation.py --model inflated --streams 4,16 --tasks mixture --settings plain,eagle4,ngram8

Each setting answers the same held-out questions, in as many rows as there are streams: a question that waits takes the
row of an answer that has ended. Questions are new in each round, so that no round meets what another has cached. Times
of one stream are those from an answer's first token to its last; beside them stands the ratio of whole times, prompts
included. Times of several streams are whole. Figures are medians over the rounds, ratios medians of the ratios to
`plain` in the same round. The answers of all settings must be equal.

"inflated" is the demo model at the cost of 125 million parameters (`inflate_demo`), made under `--envs` if it is not
there. `--peers` adds other engines with the same weights, each alone and with its own speculation, which looks the last
tokens up in the sequence: llama.cpp's over the prompt and the answer, vLLM's ngram. One stream alone, and no whole
times, since llama.cpp's computes the logits of all places of a prompt. Their environments are those of
`scripts/peers/setup_peers.sh`.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from demo_tasks import TASKS, held_out_items, story_turn
from inflate_demo import DEMO, HEAD, ensure_inflated
from peers.process import SCRIPTS, PeerProcess
from peers.values import Ask, Settings
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams
from jaxserve.lab.bench.rates import machine_rates

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    **{f"burst{k}": {"speculation.rounds": k, "speculation.adaptive": False} for k in (4, 8, 16)},
    **{
        f"{method}{width}": {"speculation.method": method, "speculation.width": width}
        for method, width in itertools.product(("ngram", "suffix"), (4, 8))
    },
    **{f"{method}4": {"speculation.method": method, "speculation.width": 4} for method in ("medusa", "eagle")},
    **{
        f"{method}4x{rounds}": {"speculation.method": method, "speculation.width": 4, "speculation.rounds": rounds}
        for method, rounds in itertools.product(("suffix", "medusa", "eagle"), (4, 8))
    },
}
_RECORDED = "plain,burst8,burst16,suffix4x4,medusa4x8,eagle4,eagle4x4,eagle4x8"
PEERS = {
    "llamacpp": 0,
    "llamacpp-lookup": 10,
    "vllm": 0,
    "vllm-ngram": 7,
}  # drafts a step; 10: llama-cpp-python's default
_PER_STREAM = 4  # questions at least, so that few rows are empty at the end
MIXTURE = "mixture"  # of all tasks, an equal number of each

Chat = list[dict[str, str]]


class Found(NamedTuple):
    """Of one setting, task and round.

    Attributes:
      prompts, answers: their tokens.
      seconds: for all, prompts included; None: not to be compared.
      decode_s: sum over the answers of the times from the first token to the last; None with several streams.
      steps: None where nobody counts them.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    seconds: float | None
    decode_s: float | None
    steps: int | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def whole_rate(self) -> float | None:
        """Tokens a second, prompts included."""
        return None if self.seconds is None else self.num_tokens / self.seconds

    @property
    def rate(self) -> float:
        """Tokens a second behind the first of each answer; with several streams, of all."""
        if self.decode_s is None:
            assert self.whole_rate is not None, "one of both is there"
            return self.whole_rate
        return (self.num_tokens - len(self.answers)) / self.decode_s


class Questions:
    """Held-out questions of the tasks, none twice."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def draw(self, task: str, items: int, seed: int) -> list[Chat]:
        if task == MIXTURE:
            share = -(-items // (len(TASKS) + 1))
            by_task = [self.draw(one, share, seed) for one in (*TASKS, "story")]
            return [chat for chats in zip(*by_task, strict=True) for chat in chats][:items]
        if task == "story":
            rng = random.Random(seed)
            drawn = ([{"role": "user", "content": story_turn(rng)[0]}] for _ in itertools.count())
        else:
            drawn = (list(item.messages) for item in held_out_items(task, 4 * items, seed))
        found: list[Chat] = []
        for chat in drawn:
            if str(chat) not in self._asked:
                self._asked.add(str(chat))
                found.append(chat)
            if len(found) == items:
                return found
        sys.exit(f"{task} has too few held-out questions for rounds of {items}, none of them twice; ask for fewer")


def answer(llm: LLM, chats: list[Chat], streams: int) -> Found:
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    steps, begin_s = llm._engine.stats[0].totals().steps, time.perf_counter()
    outputs = llm.chat(chats, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin_s
    times = [output.metrics for output in outputs if output.metrics is not None]
    decode_s = sum(one.finished_s - one.first_token_s for one in times if one.first_token_s is not None)
    return Found(
        prompts=[list(output.prompt_token_ids) for output in outputs],
        answers=[list(output.outputs[0].token_ids) for output in outputs],
        seconds=seconds,
        decode_s=decode_s if streams == 1 else None,
        steps=llm._engine.stats[0].totals().steps - steps,
    )


def start_peer(name: str, model: Path, envs: Path) -> PeerProcess:
    """That engine with the weights of `model`; llama.cpp's become a GGUF file beside it. Raises PeerError."""
    family = name.split("-")[0]
    python = str(envs / family / "bin/python")
    gguf = model.with_suffix(".f32.gguf")
    if family == "llamacpp" and not gguf.exists():
        subprocess.run([python, "-m", "peers.gguf_file", str(model), str(gguf), "f32"], check=True, cwd=SCRIPTS)
    settings = Settings(
        model=str(model),
        random_weights=False,
        dtype="float32",
        device="cpu",
        threads=2,
        # llama-cpp-python fails where drafts reach the end of its context; vLLM takes no more than the model says.
        max_len=2048 if family == "llamacpp" else 1024,
        max_requests=1,
        kv_bytes=2**30,
        memory_share=0.5,
        overrides={"draft_tokens": PEERS[name]},
    )
    module = "llamacpp_lookup" if family == "llamacpp" else family
    return PeerProcess(name, module, python, settings, envs / "logs" / f"{name}.log", 600.0, {})


def ask_peer(peer: PeerProcess, expected: Found) -> Found:
    """As many tokens of each answer as the others gave; it is no error if rounding leads to others."""
    answers, decode_s = [], 0.0
    for prompt, tokens in zip(expected.prompts, expected.answers, strict=True):
        ((found,), _) = peer.run([Ask(prompt=tuple(prompt), num_tokens=len(tokens))], [])
        answers.append(list(found.tokens))
        decode_s += found.times_s[-1] - found.times_s[0]
    return Found(prompts=expected.prompts, answers=answers, seconds=None, decode_s=decode_s, steps=None)


def start(model: str, streams: int, overrides: dict[str, object]) -> LLM:
    settings = {"model.path": model, "sched.max_rows": streams, "runtime.background_buckets": False, **overrides}
    return LLM.from_config(None, overrides=settings)


def heads_of(args: argparse.Namespace) -> dict[str, str]:
    """Method -> directory of the head, where it is not the model's own."""
    given = dict(pair.split("=", 1) for pair in args.head)
    return {"eagle": str(HEAD)} | given if args.model == "demo" else given


def run(args: argparse.Namespace, model: Path | str, streams: int, stack: contextlib.ExitStack) -> dict[str, dict]:
    """Task -> setting -> its rounds."""
    names, tasks = args.settings.split(","), args.tasks.split(",")
    engines = {}
    for name in names:
        head = heads_of(args).get(str(SETTINGS[name].get("speculation.method")))
        engines[name] = start(str(model), streams, SETTINGS[name] | ({"speculation.model": head} if head else {}))
    for llm in engines.values():
        stack.callback(llm.close)
    peers: dict[str, PeerProcess] = {}
    for name in args.peers.split(",") if args.peers and streams == 1 else ():
        assert isinstance(model, Path), "peers have the weights of a directory"
        peers[name] = start_peer(name, model, args.envs)
        stack.callback(peers[name].close)

    rounds: dict[str, dict[str, list[Found]]] = {task: {name: [] for name in (*names, *peers)} for task in tasks}
    questions = Questions()
    for number in range(args.rounds + 1):  # the first teaches costs and answers, and does not count
        for task in tasks:
            count = args.items if streams == 1 else max(args.items, _PER_STREAM * streams)
            chats = questions.draw(task, count, 100 + number)
            found = {}
            for name, llm in engines.items():
                found[name] = answer(llm, chats, streams)
                assert found[name].answers == found[names[0]].answers, f"{name} changes tokens of {task}"
            for name, peer in peers.items():
                found[name] = ask_peer(peer, found[names[0]])
            for name, one in found.items() if number else ():
                rounds[task][name].append(one)
        print(f"{streams} streams, round {number} of {args.rounds}", file=sys.stderr, flush=True)
    return rounds


def summarise(rounds: dict[str, dict[str, list[Found]]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Medians; ratios to the first setting, and of a peer's speculation to that peer without."""
    results: dict[str, dict[str, dict[str, float | None]]] = {}
    for task, by_name in rounds.items():
        results[task] = {}
        for name, found in by_name.items():
            base = by_name[name.split("-")[0] if name in PEERS else next(iter(by_name))]
            whole = [
                one.whole_rate / other.whole_rate
                for one, other in zip(found, base, strict=True)
                if one.whole_rate and other.whole_rate
            ]
            counted = [one.num_tokens / one.steps for one in found if one.steps]
            results[task][name] = {
                "tokens_per_s": statistics.median(one.rate for one in found),
                "ratio": statistics.median(one.rate / other.rate for one, other in zip(found, base, strict=True)),
                "whole_ratio": statistics.median(whole) if whole else None,
                "tokens_per_step": statistics.median(counted) if counted else None,
                "tokens_per_answer": statistics.mean(one.num_tokens / len(one.answers) for one in found),
            }
    return results


def show(results: dict[str, dict], streams: int) -> dict[str, float]:
    """A table, and the geometric means of the ratios over the tasks with one right answer, by setting."""
    names = list(next(iter(results.values())))
    title = f"{streams} stream(s): tokens/s (ratio to {names[0]}; of whole times; tokens a step, prompts included)"
    table = Table("task", *names, title=title)
    for task, by_name in results.items():
        cells = []
        for row in by_name.values():
            shown = [row[name] for name in ("ratio", "whole_ratio", "tokens_per_step") if row[name] is not None]
            cells.append(f"{row['tokens_per_s']:.0f} ({'; '.join(f'{value:.2f}' for value in shown)})")
        table.add_row(task, *cells)
    graded = [task for task in results if task in TASKS] or list(results)
    means = {name: statistics.geometric_mean(results[task][name]["ratio"] for task in graded) for name in names}
    table.add_row("graded tasks", *(f"{mean:.2f}" for mean in means.values()))
    Console(width=60 + 24 * len(names)).print(table)
    return means


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help='"demo", "inflated", or a directory with the demo\'s tokens')
    parser.add_argument("--settings", default=_RECORDED, help="the first is the one that others are compared with")
    parser.add_argument("--tasks", default=",".join((*TASKS, "story")), help=f"or {MIXTURE}")
    parser.add_argument("--streams", default="1", help="comma-separated numbers")
    parser.add_argument(
        "--items", type=int, default=10, help="questions of a task in a round; more with several streams"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--head", action="append", default=[], metavar="METHOD=DIR", help="in place of the model's own")
    parser.add_argument("--peers", default="", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache/jaxserve/peers", help="of setup_peers.sh")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model: Path | str = args.model
    if args.model == "inflated":
        model = ensure_inflated(args.envs / "models")
    elif args.model == "demo" and args.peers:
        model = DEMO
    rates, by_streams = [machine_rates()], {}
    for streams in map(int, args.streams.split(",")):
        with contextlib.ExitStack() as stack:
            results = summarise(run(args, model, streams, stack))
        by_streams[streams] = {"tasks": results, "graded": show(results, streams)}
        rates.append(machine_rates())
        if args.json:
            settings = {"model": args.model, "items": args.items, "rounds": args.rounds, "heads": args.head}
            write_record(args.json, {"streams": by_streams}, rates_in_turn=rates, **settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
