"""`jaxserve train-draft`: a draft head for a model of the user's own, from prompts of the user's own."""

import math
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.options import ConfigOption, SetOption, with_model
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.offline.console import complain, set_up_logging
from jaxserve.progress import show_progress

_KINDS = ("eagle3", "medusa")


def train_draft_command(
    model: Annotated[Path, typer.Argument(help="Directory of the model, or demo.")],
    out: Annotated[Path, typer.Argument(help="New directory of the head, for speculation.model.")],
    data: Annotated[Path, typer.Option(help="JSONL with prompt or messages in each line, or a directory of such.")],
    kind: Annotated[str, typer.Option(help="eagle3 or medusa.")] = "eagle3",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole training.")] = 2000,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 4,
    row_len: Annotated[int, typer.Option(min=16, help="Tokens of a row; longer prompts are left out.")] = 1024,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    places: Annotated[int, typer.Option(min=1, max=15, help="Guesses of a draft.")] = 3,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="eagle3: most frequent tokens to choose from; default: all.")
    ] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="eagle3: columns of its layer; default: the model's.")] = None,
    taps: Annotated[list[int] | None, typer.Option(help="eagle3: layers whose inputs it reads. Repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(min=3, help="Most tokens of an answer.")] = 512,
    held_out: Annotated[int, typer.Option(min=1, help="Answers that the head is judged on, and not trained.")] = 128,
    stop_after: Annotated[
        float | None, typer.Option(min=0, help="Seconds of training; the same command goes on.")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Directory of the run; default: OUT with .run behind it.")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Train a draft head on the model's own answers. Exit code 4: it was stopped, and the same command goes on."""
    if kind not in _KINDS:
        raise ConfigError(f"--kind is {kind!r}; known: {', '.join(_KINDS)}")
    if kind == "medusa" and (draft_vocab, ffn, taps) != (None, None, None):
        raise ConfigError("--draft-vocab, --ffn and --taps are for eagle3; a Medusa head has none of them")
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate is {rate}, but must be a number above 0")
    overrides = with_model(set_, model, "MODEL")
    resolved = load_config(config, overrides)
    set_up_logging(resolved.config.runtime)
    with show_progress(write=complain) as progress:
        progress.begin("importing JAX")
        from jaxserve.lab.training.answers import read_questions  # JAX takes seconds to import
        from jaxserve.lab.training.heads import HeadOptions
        from jaxserve.lab.training.losses import LossOptions
        from jaxserve.lab.training.pipeline import RunOptions, train_draft
        from jaxserve.lab.training.trainer import TrainOptions
        from jaxserve.models.drafts.config import HeadKind
        from jaxserve.offline.llm import LLM

        options = RunOptions(
            head=HeadOptions(
                kind=HeadKind(kind),
                num_places=places,
                draft_vocab_size=draft_vocab,
                ffn_size=ffn,
                taps=None if taps is None else tuple(taps),
            ),
            train=TrainOptions(
                steps=steps, num_rows=rows, row_len=row_len, peak_rate=rate, seed=resolved.config.model.seed
            ),
            loss=LossOptions(num_places=places),
            held_out=held_out,
            stop_after_s=stop_after,
        )

        def open_llm() -> LLM:
            return LLM.from_config(config, overrides, progress=False)

        accepted = train_draft(
            resolved,
            open_llm,
            read_questions(data, max_tokens=max_tokens),
            out.expanduser(),
            (out.parent / f"{out.name}.run" if work is None else work).expanduser(),
            options,
            progress=progress,
            say=complain,
        )
    return 0 if accepted is not None else 4
