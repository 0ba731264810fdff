"""Drafts against what plain Python finds in the same tokens; and recordings."""

import dataclasses
import json
import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.assemble import scheduler_options
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.runtime.drafting import (
    DrafterOptions,
    DraftSizes,
    NgramDrafter,
    make_ngram,
    read_history,
    write_history,
)
from jaxserve.runtime.replay_drafts import make_replay
from jaxserve.runtime.row_state import NO_TOKEN
from jaxserve.runtime.suffix_drafts import SuffixDrafter, make_suffix
from jaxserve.sched.plan import Bucket
from jaxserve.sched.speculate import Speculator
from jaxserve.testing import make_limits, with_shapes

ROWS, WINDOW = 3, 24
SIZES = DraftSizes(max_rows=ROWS, max_model_len=64, window=WINDOW)
OPTIONS = DrafterOptions(
    ngram_min=1, ngram_max=3, num_answers=4, answer_len=10, model=None, replay_errors=0.0
)  # fmt: skip


def place_of(known: list[int], last: list[int], min_len: int, max_len: int) -> tuple[int, int]:
    """(length, end) of the latest of the longest places of the end of `last` in `known`; (0, -1) without any."""
    best = (0, -1)
    for end in range(len(known)):
        run = 0
        while run < min(max_len, end + 1, len(last)) and known[end - run] == last[-1 - run]:
            run += 1
        if run >= min_len and (run, end) > best:
            best = (run, end)
    return best


def own_drafts(tokens: list[int], end: int, count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        end += 1
        found.append(found[end])
    return found[len(tokens) :]


def told(drafter, state, row: int, tokens: list[int], first: int = 0):
    """The drafter's state once it was told the tokens of a row, a few at a time."""
    for start in range(0, len(tokens), 5):
        piece = tokens[start : start + 5]
        known = np.arange(5) < len(piece)
        values = np.array(piece + [7] * (5 - len(piece)), np.int32)
        positions = first + start + np.arange(5, dtype=np.int32)
        state = drafter.observe(state, np.full(5, row, np.int32), positions, values, known)
    return state


@pytest.mark.parametrize("seed", range(12))
def test_ngrams_are_those_of_plain_python(seed: int) -> None:
    rng = random.Random(seed)
    drafter = make_ngram(OPTIONS)
    rows = [[rng.randrange(4) for _ in range(rng.randrange(1, 50))] for _ in range(ROWS)]
    state = drafter.init_state(SIZES)
    for row, tokens in enumerate(rows):
        state = told(drafter, state, row, tokens)
    lengths = jnp.array([len(tokens) for tokens in rows])
    found = np.asarray(drafter.propose(state, jnp.arange(ROWS), lengths, 5))
    for tokens, drafts in zip(rows, found, strict=True):
        kept = tokens[-WINDOW:]
        run, end = place_of(kept[:-1], kept, 1, 3)
        assert drafts.tolist() == (own_drafts(kept, end, 5) if run else [NO_TOKEN] * 5), (kept, run, end)


def test_more_tokens_than_the_window_at_once_leave_the_last() -> None:
    history = jnp.full((2, 8), NO_TOKEN)
    order = np.random.default_rng(0).permutation(21)
    history = write_history(history, jnp.zeros(21, jnp.int32), jnp.asarray(order), jnp.asarray(order) * 10, order >= 0)
    assert read_history(history, jnp.zeros(1, jnp.int32), jnp.array([21]))[0].tolist() == [
        p * 10 for p in range(13, 21)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_past_answers_of_the_same_origin_are_found(seed: int) -> None:
    rng = random.Random(seed)
    drafter = make_suffix(OPTIONS)
    assert isinstance(drafter, SuffixDrafter)
    state, past = drafter.init_state(SIZES), []
    for _ in range(7):
        origin, prompt_len = rng.randrange(2), rng.randrange(1, 9)
        tokens = [rng.randrange(4) for _ in range(prompt_len + rng.randrange(12))]
        row = np.array([rng.randrange(ROWS), ROWS], np.int32)  # and one that is padding
        state = drafter.enter(state, row, np.array([[origin, 0], [9, 9]], np.int32))
        state = told(drafter, state, int(row[0]), tokens)
        state = drafter.leave(state, row, np.array([prompt_len, 0]), np.array([len(tokens), 5]))
        if len(tokens) > prompt_len:
            past.append((origin, tokens[max(0, prompt_len - 3) :][:10]))
    table: list[tuple[int, list[int]] | None] = [None] * 4
    for number, answer in enumerate(past):
        table[number % 4] = answer
    for origin in range(2):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
        state = drafter.enter(state, np.array([1], np.int32), np.array([[origin, 0]], np.int32))
        state = told(drafter, state, 1, tokens)
        drafts = np.asarray(drafter.propose(state, jnp.array([1]), jnp.array([len(tokens)]), 4))[0].tolist()
        run, end = place_of(tokens[:-1], tokens, 1, 3)
        wanted = own_drafts(tokens, end, 4) if run else [NO_TOKEN] * 4
        longest_past = 0
        for answer in table:  # of equally long runs the last one counts, and the sequence's own before all
            if answer is not None and answer[0] == origin:
                longer, at = place_of(answer[1], tokens, 1, 3)
                if longer > run and longer >= longest_past:
                    longest_past = longer
                    wanted = (answer[1][at + 1 : at + 5] + [NO_TOKEN] * 4)[:4]
        assert drafts == wanted, (tokens, table)


def test_a_recording_is_proposed_with_a_share_of_errors(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [
        {"prompt_token_ids": [number, 5], "token_ids": [rng.randrange(100, 200) for _ in range(20)]}
        for number in range(6)
    ]
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def share_right(errors: float) -> float:
        drafter = make_replay(dataclasses.replace(OPTIONS, model=str(path), replay_errors=errors))
        right = total = 0
        for line in lines:
            state = told(drafter, drafter.init_state(SIZES), 1, line["prompt_token_ids"])
            for at in range(2, 20):
                drafts = np.asarray(drafter.propose(state, jnp.array([1]), jnp.array([at]), 2))[0].tolist()
                wanted = (line["prompt_token_ids"] + line["token_ids"])[at : at + 2]
                right, total = right + sum(a == b for a, b in zip(drafts, wanted, strict=True)), total + 2
        return right / total

    assert share_right(0.0) == 1.0
    assert 0.65 < share_right(0.25) < 0.85
    drafter = make_replay(dataclasses.replace(OPTIONS, model=str(path)))
    state = told(drafter, drafter.init_state(SIZES), 1, [77, 5])
    assert np.asarray(drafter.propose(state, jnp.array([1]), jnp.array([2]), 2)).tolist() == [[NO_TOKEN] * 2]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "names no recording"),
        ("[1]\n", "no recording"),
        ('{"token_ids": [1]}\n', "no recording"),
        ("", "no recording"),
    ],
)
def test_bad_recordings_are_refused(tmp_path: Path, content: str | None, word: str) -> None:
    path = tmp_path / "recording.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=word):
        make_replay(OPTIONS if content is None else dataclasses.replace(OPTIONS, model=str(path)))


def test_the_scheduler_is_told_of_the_widest_step_that_a_config_may_ask_for() -> None:
    config = load_config(None, {"speculation.method": "ngram", "speculation.width": 16}).config
    options, bucket = scheduler_options(config).speculation, Bucket(16, 1, True, 16, 1)
    limits = with_shapes(make_limits(max_rows=1), (16, 1))
    assert bucket in limits.buckets and (16, 1) in Speculator(options, limits, lambda: 0.0).shapes


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="ngram_min is 3"):
        NgramDrafter(min_len=3, max_len=2)
    with pytest.raises(ConfigError, match="answer_len is 3"):
        make_suffix(dataclasses.replace(OPTIONS, answer_len=3))
