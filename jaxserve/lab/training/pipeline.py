"""From a model and prompts to a directory with a draft head: answers, training, a plot, the export.

`jaxserve train-draft` and `scripts/train_draft.py` are this with prompts of the user's own and with the demo model's.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import ResolvedConfig
from jaxserve.errors import ConfigError
from jaxserve.files.new_directory import new_directory
from jaxserve.lab.training.answers import (
    Example,
    Question,
    answer_questions,
    count_answers,
    read_examples,
    split_examples,
)
from jaxserve.lab.training.evaluate import Accepted, measure
from jaxserve.lab.training.heads import HeadOptions, new_config, new_head
from jaxserve.lab.training.losses import LossOptions
from jaxserve.lab.training.target import load_target
from jaxserve.lab.training.trainer import LOG_NAME, Trainer, TrainOptions
from jaxserve.models.drafts.saving import save_head
from jaxserve.models.loading import LoadedModel
from jaxserve.models.sharding import arrays_of
from jaxserve.offline.llm import LLM
from jaxserve.progress import Progress, Quiet

ANSWERS_NAME = "answers.jsonl"
TEMPERATURE = 0.8  # of every other answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything of a run but the model and the prompts.

    Attributes:
      head, train, loss: see there.
      held_out: answers that are not learnt from, and on which the head is judged.
      stop_after_s: seconds of training after which the run stops, to be gone on with later; None: none.
      dtype: of the exported weights.
    """

    head: HeadOptions
    train: TrainOptions
    loss: LossOptions
    held_out: int = 128
    stop_after_s: float | None = None
    dtype: str = "bfloat16"


def make_answers(
    open_llm: Callable[[], LLM], questions: Sequence[Question], work: Path, seed: int, progress: Progress
) -> Path:
    """The file of answers in `work`, made by an engine where it is not whole yet."""
    out = work / ANSWERS_NAME
    if count_answers(out, questions, TEMPERATURE) >= len(questions):
        return out
    progress.begin("answering the prompts")
    with open_llm() as llm:
        answer_questions(llm, questions, out, temperature=TEMPERATURE, seed=seed, count=progress.count)
    return out


def begin_run(
    resolved: ResolvedConfig, examples: Sequence[Example], options: RunOptions, work: Path
) -> tuple[LoadedModel, Trainer]:
    """The target on its devices, and a head that is new or where its run was stopped. Raises CheckpointError,
    ConfigError."""
    from jaxserve.assemble.devices import find_devices
    from jaxserve.runtime.mesh import make_meshes

    config = resolved.config
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline is {config.parallel.pipeline}, but a head is trained beside all layers; set it to 1 "
            "and use parallel.tensor"
        )
    mesh = make_meshes(config.parallel, find_devices(config))[0][0]
    model = load_target(config.model, mesh)
    head = new_config(options.head, model.config)
    graphdef, state = new_head(options.head, head, model, examples, options.train.seed)
    trainer = Trainer(
        model=model,
        graphdef=graphdef,
        state=state,
        examples=examples,
        options=options.train,
        loss=options.loss,
        work=work,
    )
    return model, trainer


def export(model: LoadedModel, trainer: Trainer, options: RunOptions, target_name: str, out: Path) -> None:
    """Writes the averaged head into the new directory `out`."""
    config = new_config(options.head, model.config)
    arrays = {path: np.asarray(array) for path, array in arrays_of(trainer.averaged).items()}
    verifier = {"name_or_path": target_name, "architectures": model.checkpoint.config.get("architectures", [])}
    with new_directory(out) as directory:
        save_head(
            directory,
            config,
            arrays,
            model.partition,
            verifier=verifier,
            places=options.loss.num_places,
            dtype=options.dtype,
        )


def train_draft(
    resolved: ResolvedConfig,
    open_llm: Callable[[], LLM],
    questions: Sequence[Question],
    out: Path,
    work: Path,
    options: RunOptions,
    *,
    progress: Progress = Quiet(),  # noqa: B008 (stateless)
    say: Callable[[str], None] = print,
) -> Accepted | None:
    """All of a run. None where it was stopped before its last step; begun again, it goes on.

    `open_llm` starts an engine of the same model, which answers the questions.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; give a new or empty directory")
    answers = make_answers(open_llm, questions, work, options.train.seed, progress)
    examples, held_out = split_examples(read_examples(answers), options.held_out)
    progress.begin("loading the target")
    model, trainer = begin_run(resolved, examples, options, work)
    progress.begin("training")

    def tell(facts: dict[str, float]) -> None:
        taken = ", ".join(f"{100 * facts[name]:.0f} %" for name in sorted(facts) if name.startswith("taken_"))
        progress.count(int(facts["step"]), options.train.steps, f"loss {facts['loss']:.3f}, taken {taken}")

    finished = trainer.train(stop_after_s=options.stop_after_s, tell=tell)
    plot_log(work / LOG_NAME, work / "training.png")
    if not finished:
        say(f"stopped at step {trainer.step} of {options.train.steps}; the same command goes on")
        return None
    progress.begin("judging the head")
    accepted = measure(model, trainer.graphdef, trainer.averaged, held_out, options.loss, options.train.row_len)
    export(model, trainer, options, resolved.config.model.name or model.checkpoint.path.name, out)
    say(f"wrote {out}: {accepted.describe()}, on {len(held_out)} held-out answers")
    return accepted


def plot_log(log: Path, out: Path) -> None:
    """Loss and shares of taken guesses over the steps, where matplotlib is installed; without it nothing is drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    facts: list[dict[str, Any]] = (
        [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    )
    if not facts:
        return
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [f["step"] for f in facts]
    left.plot(steps, [f["loss"] for f in facts])
    left.set(xlabel="step", ylabel="loss")
    for name in sorted(name for name in facts[0] if name.startswith("taken_")):
        right.plot(steps, [100 * f[name] for f in facts], label=f"place {name.removeprefix('taken_')}")
    right.set(xlabel="step", ylabel="drafts taken up to the place, %", ylim=(0, 100))
    right.legend()
    figure.savefig(out, dpi=150)
