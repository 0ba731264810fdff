"""What rounding costs: the next tokens of the rounded model beside those of the float one, on the same texts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Columns of `streaming.Streams.compare`, for each position.
DIVERGENCE, LOSS, ROUNDED_LOSS, RIGHT, ROUNDED_RIGHT, SAME = range(6)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A sequence of tokens to measure on.

    Attributes:
      ids: its tokens.
      begin: where an answer begins that the model should give; None: it is no question with an answer.
    """

    ids: Sequence[int]
    begin: int | None = None


def cut(texts: Iterable[Text], longest: int) -> list[Text]:
    """Pieces of at most `longest` tokens. An answer that is cut is no answer any more, and its tokens are a text."""
    pieces = []
    for text in texts:
        if len(text.ids) <= longest:
            pieces.append(text)
            continue
        pieces += [Text(ids=text.ids[start : start + longest]) for start in range(0, len(text.ids), longest)]
    return [piece for piece in pieces if len(piece.ids) > 1]


def judged(text: Text) -> np.ndarray:
    """bool [T]: the positions whose next token counts: of the answer, or all but the last."""
    positions = np.arange(len(text.ids))
    return (positions < len(text.ids) - 1) & (positions + 1 >= (text.begin or 0))


def next_tokens(text: Text) -> np.ndarray:
    """int32 [T]: what follows each position; 0 after the last."""
    return np.append(np.asarray(text.ids[1:], np.int32), np.int32(0))


def summary(texts: Sequence[Text], columns: Sequence[np.ndarray]) -> dict[str, Any]:
    """The quality in numbers. `columns`: of each text [T, 6]."""
    masks = [judged(text) for text in texts]
    found = np.concatenate([of[mask] for of, mask in zip(columns, masks, strict=True)]).astype(np.float64)
    answers = [
        of[mask][:, [RIGHT, ROUNDED_RIGHT]].all(axis=0)
        for text, of, mask in zip(texts, columns, masks, strict=True)
        if text.begin is not None
    ]
    divergence = found[:, DIVERGENCE]
    measured = {
        "positions": len(found),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "kl_max": float(divergence.max()),
        "same_top": float(found[:, SAME].mean()),
        "perplexity_float": float(np.exp(found[:, LOSS].mean())),
        "perplexity": float(np.exp(found[:, ROUNDED_LOSS].mean())),
    }
    if answers:
        right_float, right = np.mean(answers, axis=0)
        measured |= {"answers": len(answers), "right_float": float(right_float), "right": float(right)}
    return measured


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The table that the command prints."""
    q = report["quality"]
    where = "held-out text" if report["held_out"] else "the text of the calibration (there is too little to hold out)"
    yield f"{report['scheme']} by {report['method']}: {report['bits_per_weight']:.2f} bits a rounded weight, {where}"
    yield f"  divergence (KL)   mean {q['kl_mean']:.2e}   99 % below {q['kl_p99']:.2e}   largest {q['kl_max']:.2e}"
    yield f"  same likeliest    {100 * q['same_top']:.2f} % of {q['positions']} positions"
    yield f"  perplexity        {q['perplexity']:.5g}, of floats {q['perplexity_float']:.5g}"
    if "answers" in q:
        yield (
            f"  right answers     {100 * q['right']:.1f} %, of floats {100 * q['right_float']:.1f} %, of {q['answers']}"
        )
    yield "  layer   bits   error of its states   largest error of a product"
    for layer in report["layers"]:
        errors = {name: found["error"] for name, found in layer["weights"].items() if found["error"] is not None}
        worst = max(errors, key=lambda name: errors[name], default=None)
        said = "-" if worst is None else f"{errors[worst]:.2e} {worst}"
        yield f"  {layer['layer']:>5}   {layer['bits']:4.2f}   {layer['state_error']:.2e}              {said}"
    for note in report["notes"]:
        yield f"  {note}"
