"""`jaxserve quantize`: from a config, options and files of text to a rounded checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.assemble.calibrate import QUANTILE, attention_without_engine
from jaxserve.assemble.devices import find_devices
from jaxserve.assemble.texts import read_texts
from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.files.new_directory import check_new
from jaxserve.models import configured_checkpoint
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.loading import choose_dtype
from jaxserve.progress import Progress, Quiet
from jaxserve.quantise.choice import Options
from jaxserve.quantise.job import Setting, Texts, quantise
from jaxserve.quantise.quality import Text, cut, judged
from jaxserve.quantise.source import Source, open_source
from jaxserve.quantise.work import digest_of
from jaxserve.runtime.calibration import STEP_TOKENS
from jaxserve.text import load_tokenizer

TOKENS = 131_072  # of the calibration, where nothing else is said
_EVERY = 8  # pieces, one of which is held out where no other text is given


def quantise_checkpoint(
    config: Config,
    options: Options,
    data: Path,
    target: Path,
    *,
    judge: Path | None = None,
    max_tokens: int = TOKENS,
    progress: Progress = Quiet(),  # noqa: B008 (stateless)
) -> dict[str, Any]:
    """Writes `target`, the checkpoint of `model.path` rounded, and returns its report (`quantise.job`).

    Args:
      config: `model` says what is rounded and in which dtype it is run, `kernels` what attention runs.
      options: what it becomes.
      data: text to calibrate on; at most `max_tokens` of it are used.
      target: a new directory. A job that was killed goes on in `target`.partial.
      judge: text to measure the quality on; None: an eighth of `data`, which is not calibrated on.

    Raises ConfigError and CheckpointError.
    """
    check_new(target)
    if config.model.quantization not in ("auto", "none") or config.model.quantization_rules:
        raise ConfigError(
            f"model.quantization is {config.model.quantization!r}, with {len(config.model.quantization_rules)} rules, "
            "but quantize reads float weights; leave them out: --scheme and --rule say what is written"
        )
    device = find_devices(config)[0]  # settles the platform, before anything asks JAX for a device
    progress.begin("reading the text")
    source = open_source(configured_checkpoint(config.model))
    texts = _read(config, source.config, data, judge, max_tokens)
    dtype = choose_dtype(config.model.dtype, device.platform, source.checkpoint)
    progress.begin("choosing kernels")
    attention, page_size = attention_without_engine(config, source.config, dtype, device)
    about = {
        "source": _describe(source),
        "data": digest_of(data),
        "judge": None if judge is None else digest_of(judge),
        "tokens": max_tokens,
    }
    setting = Setting(attention=attention, dtype=np.dtype(dtype), page_size=page_size, quantile=QUANTILE)
    return quantise(source, options, texts, target, setting=setting, about=about, progress=progress)


def _read(config: Config, model: DecoderConfig, data: Path, judge: Path | None, max_tokens: int) -> Texts:
    tokenizer = load_tokenizer(resolve_model_path(config.model.tokenizer or config.model.path))
    longest = min(STEP_TOKENS, model.max_position)
    pieces = _up_to(max_tokens, cut(read_texts(tokenizer, data, model.vocab_size), longest))
    if judge is not None:
        judged_on = _up_to(max_tokens, cut(read_texts(tokenizer, judge, model.vocab_size), longest))
        chosen = Texts(calibration=pieces, judged=judged_on, held_out=True)
    elif len(pieces) < 2:
        chosen = Texts(calibration=pieces, judged=pieces, held_out=False)
    else:
        every = min(_EVERY, len(pieces))
        held = set(range(every - 1, len(pieces), every))
        chosen = Texts(
            calibration=[piece for i, piece in enumerate(pieces) if i not in held],
            judged=[piece for i, piece in enumerate(pieces) if i in held],
            held_out=True,
        )
    for file, part in ((data, chosen.calibration), (judge or data, chosen.judged)):
        if not any(judged(text).any() for text in part):
            raise ConfigError(f"{file} has no text of two tokens or more; give some thousand words")
    return chosen


def _up_to(max_tokens: int, pieces: list[Text]) -> list[Text]:
    """The first pieces, as many as have so many tokens together; one at least."""
    ends = np.cumsum([len(piece.ids) for piece in pieces])
    return pieces[: max(1, int(np.searchsorted(ends, max_tokens, side="right")))]


def _describe(source: Source) -> dict[str, Any]:
    """What must be equal for a job to go on: the config, and the files of weights by name, size and time."""
    files = sorted(source.checkpoint.path.glob("*.safetensors"))
    return {
        "config": source.checkpoint.config,
        "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }
