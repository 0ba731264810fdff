"""`scripts/train_grpo.py`: a run that is killed goes on as if it had not been, and what it writes is a model."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from train_grpo import Batch, Rollout, batches, draw_sum, grpo_loss, is_right, reward

from jaxserve.models import load_trainable

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROOT = Path(__file__).resolve().parents[2]


def start(work: Path, rounds: int) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "scripts" / "train_grpo.py"), "--work", str(work), "--rounds", str(rounds)]
    command += ["--questions", "4", "--group", "8", "--rows", "8", "--items", "16"]
    command += ["--eval-every", "1", "--save-every", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def history(work: Path) -> list[dict[str, Any]]:
    """What each round drew and learnt, without its times."""
    with ocp.CheckpointManager((work / "checkpoints").resolve()) as manager:
        found = manager.restore(manager.latest_step(), args=ocp.args.Composite(history=ocp.args.JsonRestore()))
    names = ("round", "reward", "rows", "steps", "held_out", "difference")
    return [{name: entry[name] for name in names if name in entry} for entry in found["history"]]


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with start(whole, 3) as process:
        text = process.communicate(timeout=3600)[0]
    assert process.returncode == 0, text
    with start(killed, 3) as process:
        assert process.stdout is not None
        for line in process.stdout:  # round 1 has been saved by then
            if line.startswith("round 2,"):
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert history(killed)[-1]["round"] in (1, 2)
    with start(killed, 3) as process:
        text = process.communicate(timeout=3600)[0]
    assert process.returncode == 0 and "resumed after round" in text, text
    wanted = history(whole)
    assert len(wanted) == 4 and sum(entry.get("steps", 0) for entry in wanted) > 2
    assert history(killed) == wanted
    # The model of the end, as a checkpoint that anything reads: not the demo model's weights.
    models = [load_trainable(path, dtype="float32")[1] for path in (whole / "model", killed / "model")]
    before = load_trainable("demo", dtype="float32")[1]
    for name in before:
        assert np.array_equal(models[0][name], models[1][name])
    assert any(not np.array_equal(models[0][name], array) for name, array in before.items())
    assert json.loads((whole / "model" / "config.json").read_text())["torch_dtype"] == "float32"


def test_rewards_and_questions() -> None:
    assert [reward(answer, "783") for answer in ("783", " 783", "773", "338", "83", "7830", "I do not know")] == (
        pytest.approx([1.0, 1.0, 1 / 3, 0.0, 0.0, 0.0, 0.0])
    )
    assert is_right("783", "783") and not is_right("783.", "783")
    seen = {draw_sum(random.Random(seed), held_out=True) for seed in range(20)}
    assert len(seen) == 20 and not seen & {draw_sum(random.Random(seed), held_out=False) for seed in range(200)}


def test_the_loss_is_that_of_the_paper() -> None:
    """Against a loop over tokens in NumPy, on log-probabilities that are given."""
    rollouts = [
        Rollout(prompt=[5, 6], answer=[7, 8], behaviour=[-1.0, -2.0], advantage=1.5),
        Rollout(prompt=[5, 6, 9], answer=[8], behaviour=[-0.5], advantage=-0.5),
    ]
    [batch] = batches(rollouts, 3, 6, random.Random(0))
    assert isinstance(batch, Batch) and batch.drawn.sum() == 3
    rng = np.random.default_rng(1)
    now, first = (batch.behaviour + rng.normal(size=batch.behaviour.shape).astype(np.float32) * 0.5 for _ in range(2))

    class Given:
        def log_probs(self, params: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            return params

    clip, kl, total, clipped = 0.2, 0.1, 0.0, 0
    for row in range(3):
        for place in range(5):
            if batch.drawn[row, place]:
                ratio = np.exp(now[row, place] - batch.behaviour[row, place])
                advantage = batch.advantages[row]
                limited = min(max(ratio, 1 - clip), 1 + clip)
                away = first[row, place] - now[row, place]
                total += min(ratio * advantage, limited * advantage) - kl * (np.exp(away) - away - 1)
                clipped += limited != ratio
    loss, watched = grpo_loss(now, Given(), batch, first, clip=clip, kl=kl)  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(-total / 3, rel=1e-5)
    assert float(watched["clipped"]) == pytest.approx(clipped / 3)
