"""Heads of every kind and draft models change no token, and are told the truth about the pages: drafts of a drafter
that knows the model are taken."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from test_speculation import Counting
from whole import DEMO, FIXTURES, POOL, Result, build, run, scheduler

from jaxserve.api import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import draft_files

PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 9], [3] * 20, [17, 4, 90] * 12, [60], [3] * 20 + [7, 8]]
PLAIN = SamplingParams(max_tokens=40, detokenize=False, ignore_eos=True, temperature=0.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.7, "seed": 5},
    "cut": {"temperature": 1.0, "seed": 6, "top_k": 12, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "log-probabilities": {"logprobs": 5, "temperature": 0.4, "seed": 2},
    "three of each": {"n": 3, "temperature": 0.6, "seed": 4},
}
ASKED = [(prompt, dataclasses.replace(PLAIN, **more)) for more in OPTIONS.values() for prompt in PROMPTS]
HEADS = {
    "eagle3": ("eagle", draft_files.eagle3()),
    "eagle": ("eagle", draft_files.eagle()),
    "mtp": ("mtp", draft_files.mtp()),
    "medusa": ("medusa", draft_files.medusa()),
}


def placed(name: str, directory: Path) -> dict[str, str]:
    """Settings for the head of this name, written to `directory`, or for the fixture of this name as a draft model."""
    method, files = HEADS.get(name, ("draft", None))
    path = FIXTURES / name if files is None else draft_files.write(directory / "head", *files)
    return {"speculation__method": method, "speculation__model": str(path)}


def answers(found: list[list[Result]]) -> list[list[tuple]]:
    """Tokens, and log-probabilities to five digits: a head reads hidden states that XLA otherwise fuses away, and the
    last bits of what is computed from them may be others."""
    return [
        [
            (r.token_ids, r.finish_reason, [(p.token_id, pytest.approx(p.logprob, abs=1e-5)) for p in r.logprobs])
            for r in results
        ]
        for results in found
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[tuple]]:
    return answers(run(build(FIXTURES / "llama", **POOL), ASKED, stagger=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("eagle", {"speculation__rounds": 3}, id="eagle"),
        pytest.param("mtp", {}, id="mtp"),
        pytest.param("medusa", {}, id="medusa"),
        pytest.param("medusa", {"speculation__rounds": 3}, id="medusa, rounds"),
        pytest.param("eagle3", {"speculation__rounds": 3}, id="eagle3"),
        pytest.param("eagle3", {"parallel__tensor": 2, "speculation__rounds": 3}, id="eagle3, devices"),
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"parallel__tensor": 2, "speculation__rounds": 3}, id="llama, devices"),
        pytest.param("gpt2", {"speculation__width": 8}, id="gpt2"),
    ],
)
def test_tokens_are_those_of_one_token_a_step(
    name: str, more: dict[str, Any], expected: list[list[tuple]], tmp_path: Path
) -> None:
    # So few pages, and none kept back, that rows are taken away in the middle of an answer.
    few = {**POOL, "cache__num_pages": 22, "sched__watermark": 0.0, "sched__growth": 0.0}
    engine = build(
        FIXTURES / "llama",
        **few,
        **placed(name, tmp_path),
        speculation__adaptive=False,
        runtime__background_buckets=False,
        **more,
    )
    counting = engine._runner = Counting(engine._runner)
    found = [
        [(r.token_ids, r.finish_reason, [(p.token_id, p.logprob) for p in r.logprobs]) for r in results]
        for results in run(engine, ASKED, stagger=1)
    ]
    named = [n for n in OPTIONS for _ in PROMPTS]
    for option, got, wanted in zip(named, found, expected, strict=True):
        assert got == wanted, option
    assert scheduler(engine).num_preemptions > 0, "the pool is too large to test rows that are computed again"
    # A model that drafts for itself draws what it will draw: also at a temperature and under penalties, for rows that
    # were taken away, behind pages that were found, and behind drafts that were rejected.
    if name == "llama":
        assert counting.accepted >= 0.95 * counting.drafted, (counting.accepted, counting.drafted)
    assert counting.drafted > 500, counting.drafted


CHATS = [
    'Spell "window" backwards.',
    "Add 683 and 784 step by step.",
    "Tell me a story about a fox.",
    "Put these words in order: tree, apple, kite.",
]


@pytest.mark.slow
def test_the_demo_models_own_head_drafts_well() -> None:
    """A Medusa head, which `auto` finds. The floor is far below what it reaches (the model card has that by task)."""
    asked = [
        (f"<s><|user|>{text}<|end|><|assistant|>", SamplingParams(max_tokens=60, temperature=t, seed=3))
        for text in CHATS
        for t in (0.0, 0.8)
    ]
    plain = [r[0].token_ids for r in run(build("demo", **DEMO), asked)]
    auto = {"speculation__method": "auto", "speculation__adaptive": False, "runtime__background_buckets": False}
    engine = build("demo", **DEMO, **auto)
    counting = engine._runner = Counting(engine._runner)
    assert [r[0].token_ids for r in run(engine, asked)] == plain
    assert counting.accepted > 0.2 * counting.drafted > 20, (counting.accepted, counting.drafted)
