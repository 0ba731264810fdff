"""GRPO on the demo model: the engine draws answers, a program checks them, each optimizer step goes into the engine.

    python scripts/train_grpo.py --work runs/grpo [--minutes 30] [--json benchmarks/grpo_demo.json]

The task: sums of two numbers of three digits, asked in wordings that the demo model was not taught, so that it gets
most of them wrong: it does not know, shows its steps, or gets a digit wrong. Nothing shows it a right answer: it is
only told how good its own are. Held-out sums are kept apart by the hash that kept them out of the training of the demo
model.

One round, as in "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (Shao et al.,
2024), section 4.1:

1. A group of answers is drawn for each of some questions. Their prompts are computed once (`n` of `SamplingParams`),
   and the engine's log-probabilities of the drawn tokens are those of the behaviour policy.
2. The reward is 1 for the right answer, and at most a half for others (`reward`); the advantage of an answer is its
   reward less the mean of its group, over the standard deviation. Groups whose answers all have one reward teach
   nothing and are left out.
3. Rows of one fixed shape are optimised with clipped ratios, one optimizer step for each full batch of rows, and the
   new weights are pushed into the engine (`LLM.update_weights`).

A checkpoint (Orbax: weights, optimizer state, history) is written every `--save-every` rounds. The same command goes on
from the newest one after a kill, and draws what an undisturbed run would have drawn: questions and seeds follow from
the number of the round. At the end the weights are written as a Hugging Face checkpoint to WORK/model.
"""

import argparse
import dataclasses
import json
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from demo_tasks import is_held_out_sum
from eval_demo import evaluate
from record import write_record
from rich.console import Console
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.models import TrainableDecoder, load_trainable
from jaxserve.models.checkpoint import resolve_model_path

TOP_TOKENS = 12  # of an answer; the longest right one has six
ENGINE = {
    "model.path": "demo",
    "model.dtype": "float32",
    "model.max_len": 1024,  # the chats of the nine taught tasks, which are measured before and after
    "cache.num_pages": 2048,
    "sched.max_rows": 64,
    "sched.max_step_tokens": 256,
    "runtime.token_buckets": [64, 256],
    "runtime.row_buckets": [64],
    "runtime.background_buckets": False,
}


# The task ------------------------------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """A question and its right answer."""

    question: str
    answer: str


WORDINGS = (
    "{a} plus {b} is what?",
    "Sum of {a} {b}",
    "{a} & {b} together?",
    "The sum {a} {b}",
    "add up {a} {b}",
    "Give me {a} + {b}, please.",
    "What do {a} and {b} make?",
)


def draw_sum(rng: random.Random, *, held_out: bool) -> Sum:
    """Two numbers of three digits."""
    while True:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if is_held_out_sum(a, b) == held_out:
            return Sum(rng.choice(WORDINGS).format(a=a, b=b), str(a + b))


def is_right(answer: str, right: str) -> bool:
    """The right number and nothing beside it."""
    return answer.strip() == right


def reward(answer: str, right: str) -> float:
    """1 for the right answer; for another number of as many digits half of the share of its digits that are right.

    With nothing for what is nearly right, most groups would be all wrong at first, and teach nothing.
    """
    answer = answer.strip()
    if len(answer) != len(right):
        return 0.0
    share = sum(a == b for a, b in zip(answer, right, strict=True)) / len(right)
    return 1.0 if share == 1 else share / 2


# Rollouts by the engine ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An answer that was drawn.

    Attributes:
      prompt, answer: token ids; the answer ends with the token that ended it.
      behaviour: log-probability of each token of the answer, by the weights that drew it.
      advantage: of the answer within its group.
    """

    prompt: list[int]
    answer: list[int]
    behaviour: list[float]
    advantage: float


def ask(llm: LLM, sums: Sequence[Sum], sampling: SamplingParams | list[SamplingParams]) -> list[Any]:
    return llm.chat([[{"role": "user", "content": one.question}] for one in sums], sampling, use_tqdm=False)


def roll_out(llm: LLM, sums: Sequence[Sum], group: int, round_number: int) -> tuple[list[Rollout], float]:
    """Draws `group` answers to each question. Returns those of groups that teach something, and the mean reward of all.

    Each question has a seed of its own, which follows from the number of the round.
    """
    sampling = [
        SamplingParams(
            n=group, temperature=1.0, max_tokens=TOP_TOKENS, logprobs=0, seed=round_number * len(sums) + number
        )
        for number in range(len(sums))
    ]
    rollouts, rewards = [], []
    for one, output in zip(sums, ask(llm, sums, sampling), strict=True):
        of_group = np.array([reward(drawn.text, one.answer) for drawn in output.outputs])
        rewards.append(of_group.mean())
        if of_group.std() == 0:
            continue
        for drawn, advantage in zip(output.outputs, (of_group - of_group.mean()) / of_group.std(), strict=True):
            rollouts.append(
                Rollout(
                    prompt=list(output.prompt_token_ids),
                    answer=drawn.token_ids,
                    behaviour=[
                        entry[token].logprob for entry, token in zip(drawn.logprobs, drawn.token_ids, strict=True)
                    ],
                    advantage=float(advantage),
                )
            )
    return rollouts, statistics.fmean(rewards)


# The optimizer step --------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Rows of one shape [B, L], so that the step is compiled once. Token t of a row is predicted at place t - 1.

    Attributes:
      tokens: int32 [B, L]; lengths: int32 [B], of prompt and answer; 0: no row.
      drawn: float32 [B, L - 1], 1 where the next token belongs to an answer.
      behaviour: float32 [B, L - 1], log-probability of that token when it was drawn.
      advantages: float32 [B].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    drawn: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray


def batches(rollouts: Sequence[Rollout], num_rows: int, row_len: int, rng: random.Random) -> Iterator[Batch]:
    """All rollouts in random order; the last batch may have empty rows."""
    order = rng.sample(list(rollouts), len(rollouts))
    for first in range(0, len(order), num_rows):
        batch = Batch(
            tokens=np.zeros((num_rows, row_len), np.int32),
            lengths=np.zeros(num_rows, np.int32),
            drawn=np.zeros((num_rows, row_len - 1), np.float32),
            behaviour=np.zeros((num_rows, row_len - 1), np.float32),
            advantages=np.zeros(num_rows, np.float32),
        )
        for row, one in enumerate(order[first : first + num_rows]):
            begin, end = len(one.prompt), len(one.prompt) + len(one.answer)
            assert end <= row_len, f"a row of {end} tokens; --row-len is {row_len}"
            batch.tokens[row, :end] = one.prompt + one.answer
            batch.lengths[row] = end
            batch.drawn[row, begin - 1 : end - 1] = 1.0
            batch.behaviour[row, begin - 1 : end - 1] = one.behaviour
            batch.advantages[row] = one.advantage
        yield batch


def grpo_loss(
    params: Any, decoder: TrainableDecoder, batch: Batch, reference: Any | None, *, clip: float, kl: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The negative of GRPO's objective (equation 3 of the paper), as a mean over tokens; and what is worth watching.

    `reference`: the parameters to stay near, by the divergence of equation 4 times `kl`; None: they do not matter.
    """
    tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
    log_probs = decoder.log_probs(params, tokens, lengths)
    num_tokens = batch.drawn.sum()
    difference = jnp.where(batch.drawn > 0, log_probs - batch.behaviour, 0.0)
    ratio = jnp.exp(difference)
    advantages = batch.advantages[:, None]
    gains = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    if reference is not None:
        away = jax.lax.stop_gradient(decoder.log_probs(reference, tokens, lengths)) - log_probs
        gains -= kl * (jnp.exp(away) - away - 1)
    watched = {
        "difference": jnp.abs(difference).max(),
        "clipped": (batch.drawn * (jnp.abs(ratio - 1) > clip)).sum() / num_tokens,
    }
    return -(batch.drawn * gains).sum() / num_tokens, watched


# Checkpoints ---------------------------------------------------------------------------------------------------------


class Checkpoints:
    """Orbax checkpoints of weights and optimizer state, with a history beside them. A half-written one is not found."""

    def __init__(self, path: Path) -> None:
        self._manager = ocp.CheckpointManager(
            path.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        )

    @property
    def newest(self) -> int | None:
        """Rounds that the newest one has done; None: there is none."""
        return self._manager.latest_step()

    def save(self, round_number: int, state: Any, history: list[dict[str, Any]]) -> None:
        past = ocp.args.JsonSave(history)  # pyright: ignore[reportArgumentType]
        self._manager.save(
            round_number,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), history=past),
            force=True,
        )
        self._manager.wait_until_finished()

    def load(self, like: Any) -> tuple[int, Any, list[dict[str, Any]]] | None:
        """The newest one: rounds that are done, state, history; None: there is none."""
        newest = self.newest
        if newest is None:
            return None
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        found = self._manager.restore(
            newest,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes), history=ocp.args.JsonRestore()),
        )
        return newest, found["state"], list(found["history"])


def write_model(path: Path, decoder: TrainableDecoder, params: Any) -> None:
    """A Hugging Face checkpoint: the files of the demo model, and these weights."""
    source = resolve_model_path("demo")
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in ("model.safetensors", "cache_scales.json", "README.md"):
            shutil.copyfile(file, path / file.name)
    config = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(decoder.to_hf(params), str(path / "model.safetensors"), {"format": "pt"})


# Training ------------------------------------------------------------------------------------------------------------


def accuracy(llm: LLM, num_items: int) -> float:
    """Share of held-out sums, always the same ones, whose greedy answer is right."""
    rng = random.Random("held out")
    sums = [draw_sum(rng, held_out=True) for _ in range(num_items)]
    outputs = ask(llm, sums, SamplingParams(temperature=0.0, max_tokens=TOP_TOKENS))
    return statistics.fmean(
        is_right(output.outputs[0].text, one.answer) for one, output in zip(sums, outputs, strict=True)
    )


def train(args: argparse.Namespace, llm: LLM, console: Console) -> tuple[list[dict[str, Any]], TrainableDecoder, Any]:
    """Rounds until the time, the rounds or the goal of the command line. Returns the history, and the weights."""
    decoder, params = load_trainable("demo", dtype="float32")
    reference = params if args.kl > 0 else None
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.rate, b2=0.98))
    # All on one device by name, as what the step returns: else its second call would be compiled again.
    params, state = jax.device_put((params, optimizer.init(params)), jax.devices()[0])

    @jax.jit
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, dict[str, jax.Array]]:
        gradients, watched = jax.grad(grpo_loss, has_aux=True)(
            params, decoder, batch, reference, clip=args.clip, kl=args.kl
        )
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, watched

    checkpoints = Checkpoints(args.work / "checkpoints")
    done, history = 0, list[dict[str, Any]]()
    if (found := checkpoints.load({"params": params, "state": state})) is not None:
        done, saved, history = found
        params, state = saved["params"], saved["state"]
        llm.update_weights(params, version=f"round {done}, resumed")
        console.print(f"resumed after round {done}, {history[-1]['minutes']:.1f} minutes")
    else:
        history.append({"round": 0, "minutes": 0.0, "processor_minutes": 0.0, "held_out": accuracy(llm, args.items)})
        console.print(f"held-out sums before the first round: {history[0]['held_out']:.1%}")
    before_min, before_processor_min = history[-1]["minutes"], history[-1]["processor_minutes"]
    begun_s, begun_processor_s = time.perf_counter(), time.process_time()
    met = False
    while not met and done < args.rounds and history[-1]["minutes"] < args.minutes:
        done += 1
        rng = random.Random(f"{args.seed} {done}")
        sums = [draw_sum(rng, held_out=False) for _ in range(args.questions)]
        asked_s = time.perf_counter()
        rollouts, mean = roll_out(llm, sums, args.group, done)
        rolled_s = time.perf_counter()
        pauses, differences, clipped = [], [], []
        for number, batch in enumerate(batches(rollouts, args.rows, args.row_len, rng)):
            params, state, watched = step(params, state, batch)
            differences.append(float(watched["difference"]))
            clipped.append(float(watched["clipped"]))
            pauses.append(llm.update_weights(params, version=f"round {done}, step {number}"))
        ended_s = time.perf_counter()
        entry = {
            "round": done,
            "minutes": before_min + (ended_s - begun_s) / 60,
            "processor_minutes": before_processor_min + (time.process_time() - begun_processor_s) / 60,
            "reward": mean,
            "rows": len(rollouts),
            "steps": len(pauses),
            "rollout_s": rolled_s - asked_s,
            "optimise_s": ended_s - rolled_s,
            "pause_ms": 1000 * max(pauses, default=0.0),
            # Of the first step alone, whose weights drew the answers: how far engine and trainer are apart.
            "difference": differences[0] if differences else 0.0,
            "clipped": max(clipped, default=0.0),
        }
        if done % args.eval_every == 0:
            entry["held_out"] = accuracy(llm, args.items)
            # A goal that a small sample of items has met by luck is not met.
            met = entry["held_out"] >= args.goal and accuracy(llm, 4 * args.items) >= args.goal
        history.append(entry)
        if done % args.eval_every == 0 or done <= 3:
            shown = f", held out {entry['held_out']:.1%}" if "held_out" in entry else ""
            console.print(
                f"round {done}, {entry['minutes']:.1f} min: reward {mean:.3f}{shown}, {len(rollouts)} rows, drawn in "
                f"{entry['rollout_s']:.2f} s, optimised in {entry['optimise_s']:.2f} s, difference "
                f"{entry['difference']:.1e}"
            )
        if done % args.save_every == 0:
            checkpoints.save(done, {"params": params, "state": state}, history)
    if checkpoints.newest != done:
        checkpoints.save(done, {"params": params, "state": state}, history)
    return history, decoder, params


def plot(history: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    rounds = [entry for entry in history if "reward" in entry]
    held_out = [entry for entry in history if "held_out" in entry]
    rewards = np.array([entry["reward"] for entry in rounds])
    window = min(10, len(rewards))
    smooth = np.convolve(rewards, np.ones(window) / window, "valid")
    minutes = [entry["minutes"] for entry in rounds]
    axis.plot(minutes, rewards, c="#9dc3e0", lw=0.6)
    axis.plot(minutes[window - 1 :], smooth, c="#1b6ca8", label="mean reward of the answers that were drawn")
    axis.plot(
        [entry["minutes"] for entry in held_out],
        [entry["held_out"] for entry in held_out],
        "o-",
        c="#d1495b",
        ms=3,
        label="greedy answers to held-out sums that are right",
    )
    axis.set(xlabel="minutes", ylabel="share", ylim=(0, 1.02), xlim=(0, None))
    axis.axhline(0.9, c="#888888", lw=0.8, ls=":")
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--work", type=Path, default=Path("runs/grpo"), help="folder of checkpoints, plot and model")
    add("--minutes", type=float, default=30.0, help="of all runs in WORK together")
    add("--rounds", type=int, default=1 << 30, help="stop after this many")
    add("--goal", type=float, default=2.0, help="share of held-out sums at which to stop")
    add("--seed", type=int, default=0, help="of the questions")
    add("--questions", type=int, default=32, help="of a round")
    add("--group", type=int, default=8, help="answers to each question")
    add("--rows", type=int, default=64, help="answers of an optimizer step")
    add("--row-len", type=int, default=40, help="tokens of question and answer at most")
    add("--rate", type=float, default=1e-4, help="learning rate of Adam")
    add("--clip", type=float, default=0.2, help="ratios are clipped to 1 plus and minus this")
    add("--kl", type=float, default=0.0, help="weight of the divergence from the first weights; 0: not computed")
    add("--items", type=int, default=128, help="held-out sums of an evaluation")
    add("--eval-every", type=int, default=20, help="rounds between two evaluations")
    add("--save-every", type=int, default=20, help="rounds between two checkpoints")
    add("--final-items", type=int, default=512, help="held-out sums, and items of each taught task, before and after")
    add("--json", type=Path, help="record of the run; a plot of the same name beside it")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    console = Console(soft_wrap=True, highlight=False)
    args.work.mkdir(parents=True, exist_ok=True)
    llm = LLM.from_config(None, ENGINE)
    taught, first = {}, 0.0
    if args.json:
        taught["before"] = evaluate(llm, args.final_items, 1)
        first = accuracy(llm, args.final_items)
    history, decoder, params = train(args, llm, console)
    write_model(args.work / "model", decoder, params)
    plot(history, args.work / "plot.png")
    if args.json:
        last = accuracy(llm, args.final_items)
        taught["after"] = evaluate(llm, args.final_items, 1)
        steps = [entry for entry in history if entry.get("steps")]
        results = {
            "held_out": {"before": first, "after": last, "items": args.final_items},
            "taught": taught,
            "minutes": history[-1]["minutes"],
            # 2.0: both cores all the time; less where other programs had a part of them.
            "processor_share": history[-1]["processor_minutes"] / history[-1]["minutes"],
            "rounds": history[-1]["round"],
            "optimizer_steps": sum(entry["steps"] for entry in steps),
            "answers": args.questions * args.group * history[-1]["round"],
            "largest_difference": max(entry["difference"] for entry in steps),
            "pause_ms": statistics.median(entry["pause_ms"] for entry in steps),
            "history": history,
        }
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        write_record(args.json, results, options=options, engine=ENGINE)
        plot(history, args.json.with_suffix(".png"))
        console.print({name: value for name, value in results.items() if name != "history"})


if __name__ == "__main__":
    main()
