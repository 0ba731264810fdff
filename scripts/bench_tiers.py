"""What the tiers behind the device are worth, measured: the engine itself on a CPU, with the demo model.

    python scripts/bench_tiers.py restart --work DIR
    python scripts/bench_tiers.py chats --work DIR         # again: one round more
    python scripts/bench_tiers.py llamacpp --work DIR      # the same chats
    python scripts/bench_tiers.py throttle --work DIR
    python scripts/bench_tiers.py steps --work DIR --before CHECKOUT
    python scripts/bench_tiers.py show --work DIR --json benchmarks/tiers_cpu.json

Each call of a part measures one round, so that no call takes longer than some minutes, and adds it to those in the
folder. `show` gives medians over the rounds; ratios are medians of the ratios within a round. Every round has tokens
and folders of its own, so nothing that one has stored can be found by another.

restart   An engine answers prompts of 900 tokens on an empty directory and ends; a second one on the same directory
          answers them again, in turn with new ones of the same length. Times to the first token of both, the share of
          full pages that was found, and whether tokens are equal. The system still has files that were just written
          in its memory, here and in the chats: these are no times of a drive.
chats     64 chats of 8 turns, turn by turn, over a device that holds a tenth of their tokens: without a tier, with
          host memory for half of them, and with a directory for all behind that. One request at a time. The same
          requests are then simulated, with costs fitted to the steps and fills of another round.
llamacpp  The chats of a round by llama.cpp, with states of whole chats in host memory, as its server keeps them, of as
          many bytes as the directory has. Its environment is that of `scripts/peers/setup_peers.sh`.
throttle  900-token prompts whose pages only a throttled store has, half and twice as fast as computing: the engine's
          own choice beside the same engine made to load always, and never.
steps     The time of a step of 16 rows without tiers, beside that of a checkout from before there were any, with
          whatever else has changed since.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.api import Request, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import Engine, Update
from jaxserve.lab.bench.rates import machine_rates
from jaxserve.lab.simulation.store import StoreLink
from jaxserve.sched import ContinuousScheduler

PAGE, PAGE_BYTES = 16, 16 * 5 * 2 * 2 * 64 * 4  # of the demo model in float32
BASE: dict[str, object] = {
    "model.path": "demo",
    "model.max_len": 1024,
    "cache.page_size": PAGE,
    "sched.max_rows": 4,
    "sched.max_step_tokens": 256,
    "runtime.token_buckets": [32, 64, 128, 256],
    "runtime.row_buckets": [1, 4],
    "runtime.background_buckets": False,
    "kernels.self_check": False,
}
PROMPT_LEN, NUM_PROMPTS = 900, 12
CHATS, TURNS, SAID, ANSWERED = 64, 8, 40, 16
CHAT_PAGES = CHATS * TURNS * (SAID + ANSWERED) // PAGE
RATIOS = (0.5, 2.0)  # speed of the throttled store over that at which loading and computing take equally long
LATENCY_S = 0.002
STEP_ROWS, STEP_TOKENS, STEP_TURNS = 16, 100, 24


class Asked(NamedTuple):
    """One request: seconds from its submission, on the engine's clock."""

    submitted_s: float
    ttft_s: float
    prompt_len: int
    cached: int
    tokens: list[int]


@contextmanager
def engine_of(settings: dict[str, object]) -> Iterator[Engine]:
    engine = assemble(load_config(None, {**BASE, **settings})).engine
    assert isinstance(engine, Engine)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def ask(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Asked:
    """Waits for the answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    request = engine.prepare(list(prompt), sampling)
    first: list[tuple[float, int]] = []
    tokens: list[int] = []
    done = threading.Event()

    def sink(update: Update) -> None:
        if update.prompt is not None:
            first.append((time.perf_counter(), update.prompt.num_cached_tokens))
        tokens.extend(update.token_ids)
        if update.last:
            done.set()

    begin_s = time.perf_counter()
    engine.submit(request, sink)
    if not done.wait(120):
        sys.exit("a request has had no answer for two minutes")
    ((first_s, cached),) = first
    return Asked(begin_s, first_s - begin_s, len(prompt), cached, tokens)


def prompts_of(seed: str, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(10, 1100) for _ in range(PROMPT_LEN)] for _ in range(count)]


def settle(engine: Engine, seed: str) -> None:
    """Short requests until all full pages are saved and written."""
    scheduler = scheduler_of(engine)
    rng = random.Random(seed)
    for number in range(200):
        ask(engine, [rng.randint(10, 1100) for _ in range(8)], 4)
        tier, loader = scheduler.memory.tier, scheduler._loader
        assert tier is not None and loader is not None
        if number > 2 and not tier._offers and not loader.writing:
            return
        time.sleep(0.02)
    sys.exit("pages are still on their way to the store")


def scheduler_of(engine: Engine) -> ContinuousScheduler:
    scheduler = engine._scheduler
    assert isinstance(scheduler, ContinuousScheduler)
    return scheduler


# ---- restart -------------------------------------------------------------------------------------------------------


def restart(seed: str, folder: Path) -> dict[str, object]:
    settings: dict[str, object] = {
        "cache.num_pages": 2000,
        "cache.host_bytes": 256 << 20,
        "store.kind": "file",
        "store.location": str(make_directory(folder / "pages")),
        "store.max_bytes": 1 << 30,
    }
    stored, new = prompts_of(f"{seed} stored", NUM_PROMPTS), prompts_of(f"{seed} new", NUM_PROMPTS)
    with engine_of(settings) as engine:
        before = [ask(engine, prompt, ANSWERED) for prompt in stored]
        settle(engine, seed)
    with engine_of(settings) as engine:
        ask(engine, prompts_of(f"{seed} warm", 1)[0], ANSWERED)  # not a time of the engine's first step
        pairs = [(ask(engine, one, ANSWERED), ask(engine, two, ANSWERED)) for one, two in zip(stored, new, strict=True)]
    after, others = [one for one, _ in pairs], [two for _, two in pairs]
    full = sum((one.prompt_len - 1) // PAGE * PAGE for one in after)
    found, cold = (statistics.median(one.ttft_s for one in asked) for asked in (after, others))
    return {
        "pages_found": sum(one.cached for one in after) / full,
        "tokens_equal": [one.tokens for one in before] == [one.tokens for one in after],
        "ttft_found_ms": 1e3 * found,
        "ttft_new_ms": 1e3 * cold,
        "ratio": cold / found,
        "found_of_new": sum(one.cached for one in others),
    }


# ---- chats ---------------------------------------------------------------------------------------------------------


def chat_modes(folder: Path) -> dict[str, dict[str, object]]:
    pool: dict[str, object] = {"cache.num_pages": CHAT_PAGES // 10}
    host = {**pool, "cache.host_bytes": CHAT_PAGES // 2 * PAGE_BYTES}
    disk = {
        **host,
        "store.kind": "file",
        "store.location": str(make_directory(folder / "chats")),
        "store.max_bytes": 2 * CHAT_PAGES * PAGE_BYTES,
    }
    return {"off": pool, "host": host, "host, disk": disk}


def chats(seed: str, folder: Path, work: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    answers: list[list[int]] | None = None
    for mode, settings in chat_modes(folder).items():
        log = work / f"steps-{mode.replace(', ', '-')}-{seed}.jsonl"
        fills: list[tuple[int, float]] = []
        with engine_of({**settings, "runtime.step_log": str(log)}) as engine:
            ask(engine, [9] * 40, ANSWERED)
            if scheduler_of(engine)._loader is not None:
                note_fills(engine, fills)
            asked = talk(seed, lambda prompt, engine=engine: ask(engine, prompt, ANSWERED))
        tokens = [one.tokens for one in asked]
        assert answers in (None, tokens), f"{mode} changes tokens"
        answers = tokens
        rows = [[one.submitted_s - asked[0].submitted_s, one.ttft_s, one.prompt_len, one.cached] for one in asked]
        found[mode] = {**figures_of(asked), "fills": fills, "log": log.name, "requests": rows}
        print(mode, {name: round(value, 4) for name, value in figures_of(asked).items()}, file=sys.stderr, flush=True)
    return found


def note_fills(engine: Engine, fills: list[tuple[int, float]]) -> None:
    """Adds the pages that come with each fill from now on, and its seconds."""
    loader: Any = scheduler_of(engine)._loader
    note = loader.costs.note_fill

    def noted(elapsed_s: float, num_filled: int, *, late: bool) -> None:
        fills.append((num_filled, elapsed_s))
        note(elapsed_s, num_filled, late=late)

    loader.costs.note_fill = noted


def link_of(fills: Sequence[tuple[int, float]]) -> StoreLink:
    """The latency is what a fill takes that finds no page; bytes a second are of the others, without it."""
    latency_s = statistics.median(seconds for pages, seconds in fills if not pages)
    per_page = [(seconds - latency_s) / pages for pages, seconds in fills if pages]
    return StoreLink(latency_s, PAGE_BYTES / statistics.median(per_page))


def talk(seed: str, answer: Callable[[list[int]], Asked]) -> list[Asked]:
    """All chats, turn by turn."""
    said: list[list[int]] = [[] for _ in range(CHATS)]
    asked = []
    for chat, tokens in turns_of(seed):
        said[chat] += tokens
        asked.append(answer(said[chat]))
        said[chat] += asked[-1].tokens
    return asked


def turns_of(seed: str) -> Iterator[tuple[int, list[int]]]:
    """The chat of each request and what is said in it, in an order that is drawn anew for each turn."""
    rng = random.Random(f"chats {seed}")
    for _ in range(TURNS):
        for chat in rng.sample(range(CHATS), CHATS):
            yield chat, [rng.randint(10, 1100) for _ in range(SAID)]


def figures_of(asked: Sequence[Asked]) -> dict[str, float]:
    ttfts = [one.ttft_s for one in asked]
    later = [one.ttft_s for one in asked[CHATS:]]  # first turns have nothing to find
    return {
        "hit_rate": sum(one.cached for one in asked) / sum(one.prompt_len for one in asked),
        "ttft_mean_ms": 1e3 * statistics.mean(ttfts),
        "ttft_p50_ms": 1e3 * statistics.median(later),
    }


def most_hits() -> float:
    """The hit rate with room for all: full pages of what was said before."""
    lengths = [SAID + turn * (SAID + ANSWERED) for turn in range(TURNS)]
    before = [0, *(length + ANSWERED - 1 for length in lengths[:-1])]  # the last token of an answer is never fed
    return sum(length // PAGE * PAGE for length in before) / sum(lengths)


def simulate_chats(mode: str, seed: str, row: dict, other: dict, work: Path, folder: Path) -> dict[str, float]:
    """The requests of a round of a mode, simulated with costs that are fitted to the steps and fills of another round.

    Each arrives when the one before it has been answered, as they were sent. At the times at which they were sent they
    would queue wherever a simulated answer takes a little longer than the real one.
    """
    from jaxserve.lab.simulation.arriving import Chains
    from jaxserve.lab.simulation.simulate import SimRequest, simulate
    from jaxserve.lab.simulation.world import world_of_log

    link = link_of(other["fills"]) if other["fills"] else None
    settings = {**BASE, **chat_modes(folder)[mode]}
    world = world_of_log(work / other["log"], load_config(None, settings).config, store_link=link)
    said: list[list[int]] = [[] for _ in range(CHATS)]
    trace = []
    for number, ((chat, tokens), (_, _, prompt_len, _)) in enumerate(zip(turns_of(seed), row["requests"], strict=True)):
        token = 10**6 + number  # what is answered is of no matter, only that no two answers are equal
        said[chat] += tokens
        assert len(said[chat]) == prompt_len
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(said[chat]),
            sampling=SamplingParams(temperature=0.0, max_tokens=ANSWERED, ignore_eos=True, detokenize=False),
            max_tokens=ANSWERED,
            seed=0,
            arrival_s=0.0,
        )
        trace.append(SimRequest(request=request, arrival_s=0.0, output_len=ANSWERED, output_token_id=token))
        said[chat] += [token] * ANSWERED
    turns = Chains(chains=(tuple(trace),))
    done = simulate("fcfs", turns, world.cost_model, world.limits, options=world.options, store=world.store)
    by_id = sorted(done.requests, key=lambda one: int(one.request_id))
    asked = [
        Asked(one.arrival_s, (one.first_token_s or 0.0) - one.arrival_s, one.prompt_tokens, one.cached_tokens, [])
        for one in by_id
    ]
    return figures_of(asked)


# ---- throttle ------------------------------------------------------------------------------------------------------


def throttle(seed: str, folder: Path) -> dict[str, object]:
    secret = folder / "secret"
    secret.write_bytes(os.urandom(32))
    directory = make_directory(folder / "pages")
    common: dict[str, object] = {"cache.num_pages": 2000, "cache.host_bytes": 256 << 20}
    files = {"store.kind": "file", "store.location": str(directory), "store.max_bytes": 1 << 30}
    prompts = prompts_of(seed, NUM_PROMPTS)
    with engine_of({**common, **files, "store.secret_file": str(secret)}) as engine:
        for prompt in prompts:
            ask(engine, prompt, 1)
        settle(engine, seed)
    computed = compute(seed, prompts)
    compute_s = statistics.median(one.ttft_s for one in computed)
    pages = (PROMPT_LEN - 1) // PAGE
    found: dict[str, object] = {}
    for ratio in RATIOS:
        rate = ratio * pages * PAGE_BYTES / compute_s
        store = {
            "store.kind": "throttled_store:ThrottledStore",
            "store.location": f"{directory}?rate={rate:.0f}&latency={LATENCY_S}",
            "store.max_bytes": 1 << 30,
            "store.secret_file": str(secret),
            "store.wait_s": 30.0,
        }
        with engine_of({**common, **store}) as engine:
            costs: Any = scheduler_of(engine).memory.costs
            costs.note_commit = lambda *args: None  # no estimate: it always loads
            loaded = [ask(engine, prompt, 1) for prompt in prompts]
        with engine_of({**common, **store}) as engine:
            # New prompts teach what a token costs, and the first prompt what the store does.
            for prompt in prompts_of(f"{seed} {ratio} warm", 3):
                ask(engine, prompt, 8)
            chosen = [ask(engine, prompt, 1) for prompt in prompts]
        with engine_of({**common, **store}) as engine:
            scheduler_of(engine).use_tiers(store=False)
            ask(engine, prompts_of(f"{seed} {ratio} warm again", 1)[0], 1)
            again = [ask(engine, prompt, 1) for prompt in prompts]
        never_s = statistics.median(one.ttft_s for one in again)
        load_s = statistics.median(one.ttft_s for one in loaded)
        chosen_s = [one.ttft_s for one in chosen]
        best_s = min(load_s, never_s)
        found[f"{ratio:g}"] = {
            "compute_ms": 1e3 * never_s,
            "load_ms": 1e3 * load_s,
            "chosen_ms": 1e3 * statistics.median(chosen_s[1:]),
            "first_ms": 1e3 * chosen_s[0],
            "loads": sum(one.cached > PROMPT_LEN // 2 for one in chosen[1:]) / (len(chosen) - 1),
            "regret": statistics.median(chosen_s[1:]) / best_s - 1,
            "tokens_equal": [o.tokens for o in chosen] == [o.tokens for o in computed] == [o.tokens for o in loaded],
        }
        print(ratio, found[f"{ratio:g}"], file=sys.stderr, flush=True)
    return found


def compute(seed: str, prompts: Sequence[Sequence[int]]) -> list[Asked]:
    """Prompts on an engine without tiers, whose first step is not among them."""
    with engine_of({"cache.num_pages": 2000}) as engine:
        ask(engine, prompts_of(f"{seed} warm", 1)[0], 1)
        return [ask(engine, prompt, 1) for prompt in prompts]


# ---- steps ---------------------------------------------------------------------------------------------------------

# Runs under either checkout, so it names nothing that only one of them has.
_STEPPER = """
import statistics, sys, time
from jaxserve import LLM, SamplingParams
rows, tokens = int(sys.argv[1]), int(sys.argv[2])
settings = {"model.path": "demo", "sched.max_rows": rows, "cache.num_pages": 600, "cache.page_size": 16,
            "sched.max_step_tokens": 64, "runtime.token_buckets": [64], "runtime.row_buckets": [rows],
            "runtime.background_buckets": False, "kernels.self_check": False}
llm = LLM.from_config(None, overrides=settings)
sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
number = 0
for _ in sys.stdin:
    prompts = [[10 + (number * 37 + row * 5 + place) % 1000 for place in range(4)] for row in range(rows)]
    number += 1
    engine = llm._engine
    before = engine.stats[0].totals().steps
    begin_s = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    print((time.perf_counter() - begin_s) / (engine.stats[0].totals().steps - before), flush=True)
"""


def steps(before: Path, rounds: int) -> dict[str, object]:
    trees = {"before": before.resolve(), "now": Path(__file__).resolve().parents[1]}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", _STEPPER, str(STEP_ROWS), str(STEP_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(tree)},
            cwd=tree,
            text=True,
        )
        for name, tree in trees.items()
    }

    def turn(name: str) -> float:
        process = processes[name]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        for name in processes:
            turn(name)
        times = []
        for number in range(rounds):
            order = list(processes) if number % 2 else list(processes)[::-1]
            taken = {name: turn(name) for name in order}
            times.append((taken["before"], taken["now"]))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=before, capture_output=True, text=True, check=True)
    ratios = [now / then for then, now in times]
    return {
        "before_commit": commit.stdout.strip(),
        "before_ms": 1e3 * statistics.median(then for then, _ in times),
        "now_ms": 1e3 * statistics.median(now for _, now in times),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
    }


# ---- all -----------------------------------------------------------------------------------------------------------


def make_directory(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def llamacpp_chats(seed: str, envs: Path) -> dict[str, float]:
    import ml_dtypes  # noqa: F401  # NumPy then knows the numbers of the checkpoint
    from inflate_demo import DEMO
    from peers.process import SCRIPTS, PeerProcess
    from peers.values import Ask, Settings
    from safetensors.numpy import load_file, save_file

    python = str(envs / "llamacpp/bin/python")
    model = envs / "models/demo-f32"  # the writer of the file knows no bfloat16
    gguf = model.with_suffix(".f32.gguf")
    if not gguf.exists():
        shutil.copytree(DEMO, model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("draft", "model.safetensors"))
        wide = {name: array.astype("float32") for name, array in load_file(DEMO / "model.safetensors").items()}
        save_file(wide, model / "model.safetensors")
        subprocess.run([python, "-m", "peers.gguf_file", str(model), str(gguf), "f32"], check=True, cwd=SCRIPTS)
    settings = Settings(
        model=str(model),
        random_weights=False,
        dtype="float32",
        device="cpu",
        threads=2,
        max_len=1024,
        max_requests=1,
        kv_bytes=CHAT_PAGES * 2 * PAGE_BYTES,
        memory_share=0.5,
    )
    peer = PeerProcess(
        "llamacpp-cache", "llamacpp_cache", python, settings, envs / "logs/llamacpp-cache.log", 600.0, {}
    )

    def answer(prompt: list[int]) -> Asked:
        ((found,), _) = peer.run([Ask(prompt=tuple(prompt), num_tokens=ANSWERED)], [])
        cached = found.tokens[0]  # see the engine: ahead of the tokens stands what it did not compute
        return Asked(0.0, found.times_s[1], len(prompt), cached, list(found.tokens[1:]))

    try:
        return figures_of(talk(seed, answer))
    finally:
        peer.close()


def show(work: Path) -> dict[str, object]:
    rounds: dict[str, list[dict]] = {}
    for file in sorted(work.glob("*.json")):
        rounds.setdefault(file.stem.split("-")[0], []).append(json.loads(file.read_text()))
    console, results = Console(width=130), {}
    for part in ("restart", "llamacpp", "steps"):
        if part in rounds:
            names = [name for name, value in rounds[part][0]["found"].items() if isinstance(value, int | float)]
            medians = {name: statistics.median(one["found"][name] for one in rounds[part]) for name in names}
            results[part] = {**medians, "rounds": [one["found"] for one in rounds[part]]}
            table = Table(*names, title=f"{part}, {len(rounds[part])} rounds")
            table.add_row(*(f"{value:.4g}" for value in medians.values()))
            console.print(table)
    if "throttle" in rounds:
        throttled: dict[str, Any] = {"rounds": [one["found"] for one in rounds["throttle"]]}
        table = Table("store / break-even", "compute ms", "load ms", "chosen ms", "first ms", "loads", "regret")
        for ratio in RATIOS:
            mine = [one["found"][f"{ratio:g}"] for one in rounds["throttle"]]
            names = ("compute_ms", "load_ms", "chosen_ms", "first_ms", "loads", "regret")
            row = {name: statistics.median(one[name] for one in mine) for name in names}
            throttled[f"{ratio:g}"] = row
            table.add_row(f"{ratio:g}", *(f"{row[name]:.4g}" for name in names))
        results["throttle"] = throttled
        console.print(table)
    if "chats" in rounds:
        results["chats"] = show_chats(rounds["chats"], work, console)
    return results


def show_chats(rounds: list[dict], work: Path, console: Console) -> dict[str, object]:
    """Each mode beside its simulation, whose costs come from the log of another round."""
    names = ("hit_rate", "ttft_mean_ms", "ttft_p50_ms")
    table = Table(
        "tier", *names, *(f"simulated / real {name}" for name in names), title=f"most hits: {most_hits():.3f}"
    )
    results: dict[str, object] = {"most_hits": most_hits(), "rounds": len(rounds)}
    for mode in rounds[0]["found"]:
        real = [one["found"][mode] for one in rounds]
        row = {name: statistics.median(one[name] for one in real) for name in names}
        ratios: dict[str, float] = {}
        if len(real) > 1:
            with tempfile.TemporaryDirectory() as folder:
                simulated = [
                    simulate_chats(mode, one["seed"], row, other, work, Path(folder))
                    for one, row, other in zip(rounds, real, [*real[1:], real[0]], strict=True)
                ]
            for name in names:
                pairs = [(sim[name], one[name]) for sim, one in zip(simulated, real, strict=True)]
                ratios[name] = statistics.median(sim / one if one else 1.0 for sim, one in pairs)
            row["simulated"] = {name: statistics.median(sim[name] for sim in simulated) for name in names}
            row["simulated_ratio"] = ratios
        table.add_row(mode, *(f"{row[name]:.4g}" for name in names), *(f"{value:.3f}" for value in ratios.values()))
        results[mode] = row
    console.print(table)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("restart", "chats", "llamacpp", "throttle", "steps", "show"))
    parser.add_argument("--work", type=Path, required=True, help="a folder for the rounds that were measured")
    parser.add_argument("--before", type=Path, help="steps: a checkout from before there were tiers")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache/jaxserve/peers", help="of setup_peers.sh")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.part == "show":
        results = show(args.work)
        if args.json:
            rates = [json.loads(file.read_text())["rates"] for file in sorted(args.work.glob("*.json"))]
            write_record(args.json, results, rates_in_turn=rates, settings=BASE)
        return 0
    if args.part == "steps" and args.before is None:
        parser.error("steps needs --before CHECKOUT")
    done = [int(file.stem.split("-")[1]) for file in args.work.glob(f"{args.part}-*.json")]
    number = max(done, default=-1) + 1  # not their count: somebody may have taken a disturbed round away
    seed = f"{number}"
    rates = machine_rates()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.part == "restart":
            found = restart(seed, folder)
        elif args.part == "chats":
            found = chats(seed, folder, args.work)
        elif args.part == "llamacpp":
            found = llamacpp_chats(seed, args.envs)
        elif args.part == "throttle":
            found = throttle(seed, folder)
        else:
            found = steps(args.before, STEP_TURNS)
    row = {"seed": seed, "rates": rates, "found": found}
    (args.work / f"{args.part}-{number}.json").write_text(json.dumps(row))
    if args.part != "chats":
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
