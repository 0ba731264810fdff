"""Training of draft heads: the guesses of a training step are those of drafting, and a run can be stopped anywhere."""

import dataclasses
import functools
import itertools
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import draft_files
import draft_oracle
from test_draft_heads import batch_of, loaded, mesh_of, target

from jaxserve import cli
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.lab.training.answers import Example, count_answers, read_questions, split_examples
from jaxserve.lab.training.batches import batches, fitting, pack_rows
from jaxserve.lab.training.evaluate import walk
from jaxserve.lab.training.heads import HeadOptions, default_taps, new_config, new_head
from jaxserve.lab.training.losses import LossOptions, first_matches, make_guesses, starts_of
from jaxserve.lab.training.pipeline import RunOptions, export, plot_log
from jaxserve.lab.training.target import load_target
from jaxserve.lab.training.trainer import Trainer, TrainOptions
from jaxserve.models import decoder_config, load_model, read_checkpoint
from jaxserve.models.decoder import CachePlace
from jaxserve.models.drafts.config import HeadKind
from jaxserve.models.packed_attention import packed_attention, packed_batch
from jaxserve.models.trainable import whole_graphdef
from jaxserve.runtime.heads import find_head

pytestmark = pytest.mark.usefixtures("compiled_once", "compiled_quickly")

FIXTURES = Path(__file__).parents[1] / "fixtures"
LOSS = LossOptions(num_places=3)
TRAINED = LossOptions(num_places=2)  # for whole runs: more places are more of the same to compile


def examples(count: int, seed: int = 0) -> list[Example]:
    """Answers that count on from the last token of the prompt: something that a head can learn."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = rng.integers(3, 128, rng.integers(3, 9)).tolist()
        answer = [(prompt[-1] + 7 * i) % 125 + 3 for i in range(1, int(rng.integers(5, 12)))]
        found.append(Example(prompt=tuple(prompt), answer=tuple(answer), weight=1.0))
    return found


def padded(sequence: Sequence[int], *between: Any) -> tuple[Any, ...]:
    """Tokens of one row, `between`, and their batch: 16 tokens whatever the row has, so that all are one program."""
    pad, batch = 16 - len(sequence), batch_of(0, len(sequence))
    batch = dataclasses.replace(
        batch,
        positions=jnp.pad(batch.positions, (0, pad)),
        token_rows=jnp.pad(batch.token_rows, (0, pad), constant_values=1),
    )
    return jnp.pad(jnp.asarray(sequence), (0, pad)), *between, batch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "bloom", "gpt_oss"])
def test_packed_attention_is_that_of_the_engine(name: str) -> None:
    """Windows, soft caps, sinks and slopes included; sequences that share a row do not see each other."""
    model = load_model(FIXTURES / name)
    config = nnx.merge(model.graphdef, model.state).config
    count, heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
    places = [CachePlace(group=0, slot=layer) for layer in range(count)]
    first, second = [5, 99, 7, 3, 120, 64, 11, 2, 45, 9, 33, 21, 8], [17, 4, 90, 6]
    row_len = 24
    tokens = jnp.asarray([*first, *second, *([0] * 7)])
    segments = jnp.asarray([0] * len(first) + [1] * len(second) + [2] * 7)
    positions = jnp.asarray([*range(len(first)), *range(len(second)), *([0] * 7)])
    batch = packed_batch(segments, positions, 2)

    @functools.partial(jax.jit, static_argnums=4)
    def hidden_states(state, tokens, caches, batch, attention):
        return nnx.merge(model.graphdef, state)(tokens, caches, (batch,), places, attention)[0]

    hidden = hidden_states(model.state, tokens, (None,) * count, batch, packed_attention(row_len))
    for begin, sequence in ((0, first), (len(first), second)):
        caches = [XLA_ATTENTION.init_cache(8, 4, heads, dim, jnp.float32) for _ in range(count)]
        paged = hidden_states(model.state, *padded(sequence, caches), XLA_ATTENTION)[: len(sequence)]
        got = hidden[begin : begin + len(sequence)]
        assert np.abs(np.asarray(got) - np.asarray(paged)).max() < 2e-4


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("eagle3", {"norm_output": True}),
        pytest.param("eagle3", {}, marks=pytest.mark.slow),
        pytest.param("eagle", {}, marks=pytest.mark.slow),
        ("medusa", {}),
    ],
)
def test_guesses_of_a_training_step_are_those_of_a_chain(kind: str, flags: dict, tmp_path: Path) -> None:
    made = {"eagle3": draft_files.eagle3, "eagle": draft_files.eagle, "medusa": draft_files.medusa}[kind](**flags)
    head, model = loaded(draft_files.write(tmp_path, *made)), target()
    sequences = examples(5, seed=3)
    rows, left = pack_rows(sequences, 2, 48)
    assert not left
    module, decoder = nnx.merge(head.graphdef, head.state), nnx.merge(model.graphdef, model.state)
    starts = starts_of(rows, 20)
    guesses = jax.jit(lambda: make_guesses(module, decoder, rows, starts, LOSS, None))()
    tensors = made[1]
    table = np.asarray(decoder.embedding.get_value().array)
    projection = np.asarray(decoder.lm_head.get_value().array)

    @jax.jit
    def read(tokens, batch):
        places = [CachePlace(group=0, slot=layer) for layer in range(2)]
        caches = [XLA_ATTENTION.init_cache(8, 4, 2, 12, jnp.float32) for _ in range(2)]
        hidden, _, taps = decoder.with_taps(tokens, caches, (batch,), places, XLA_ATTENTION, taps=(0, 1, 2))
        return hidden, taps

    checked = 0
    for number, start in enumerate(starts.reshape(-1)):
        segment = rows.segments[start]
        (where,) = np.nonzero(rows.segments == segment)
        known = int(start - where[0])  # tokens that went through the target before the draft
        if segment == rows.num_segments or known + 4 > len(where) or number % 4:
            continue
        tokens = rows.tokens[where]
        hidden, *taps = (np.asarray(states)[:known] for states in jax.tree.leaves(read(*padded(tokens[:known]))))
        if kind == "medusa":
            wanted = draft_oracle.medusa(tensors, hidden[-1:], 3, 2, projection)
            wanted = [one[0] for one in wanted]
        else:
            oracle = draft_oracle.Head(
                kind, tensors, draft_files.SIZES, tensors.get("embed_tokens.weight", table), projection, **flags
            )
            wanted = oracle.chain(
                tokens[: known + 1].tolist(),
                hidden,
                taps,
                tokens[known + 1 : known + 3].tolist(),
            )
        for place, want in enumerate(wanted):
            kept = np.isfinite(want)
            got = np.asarray(guesses.logits[place][number])
            assert np.abs(got - want[kept]).max() < 1e-3, (start, place)
        checked += 1
    assert checked > 3


def test_targets_and_weights_of_guesses() -> None:
    model = target()
    options = HeadOptions(kind=HeadKind.MEDUSA)
    graphdef, state = new_head(options, new_config(options, model.config), model, [], 0)
    rows, _ = pack_rows([Example(prompt=(5, 6, 7), answer=(8, 9, 10, 11), weight=2.0)], 1, 16)
    starts = starts_of(rows, 5)
    # The answer's first token is never drafted: drafts begin behind it.
    assert starts.tolist() == [[3, 4, 5, 15, 15]]
    decoder = nnx.merge(model.graphdef, model.state)
    guesses = jax.jit(lambda: make_guesses(nnx.merge(graphdef, state), decoder, rows, starts, LOSS, None))()
    assert [w.tolist() for w in guesses.weights] == [[2, 2, 2, 0, 0], [2, 2, 0, 0, 0], [2, 0, 0, 0, 0]]
    places = [CachePlace(group=0, slot=layer) for layer in range(2)]
    caches = [XLA_ATTENTION.init_cache(8, 4, 2, 12, jnp.float32) for _ in range(2)]
    tokens = jnp.asarray([5, 6, 7, 8, 9, 10, 11])

    @jax.jit
    def forward():
        hidden, _ = decoder(tokens, caches, (batch_of(0, 7),), places, XLA_ATTENTION)
        return decoder.logits(hidden)

    logits = np.asarray(forward())
    # Place j of the draft behind token 3 guesses token 4 + j, which the target's logits of token 3 + j speak of.
    for place in range(3):
        assert np.abs(np.asarray(guesses.teacher[place][0]) - logits[3 + place]).max() < 1e-3
    # A new Medusa head says for each place what the target says behind the token before the draft's.
    assert np.abs(np.asarray(guesses.logits[2][0]) - logits[2]).max() < 1e-3


def test_steps_over_an_answer() -> None:
    found = walk([3, 0, 0, 0, 1, 0, 2], 3)
    # Token 0 with three guesses and the own token behind them; 4 with one; 6 alone, whose draft could have one guess.
    assert (found.tokens, found.steps) == (7, 3)
    assert found.taken == (3, 2, 1)
    assert found.possible == (3, 2, 2)
    assert walk([0] * 4, 3).tokens_per_step == 1.0
    assert (found + found).tokens_per_step == found.tokens_per_step


def test_matches_are_counted_up_to_the_first_miss() -> None:
    model = target()
    decoder = nnx.merge(model.graphdef, model.state)
    options = HeadOptions(kind=HeadKind.MEDUSA)
    graphdef, state = new_head(options, new_config(options, model.config), model, [], 0)
    head = nnx.merge(graphdef, state)
    rows, _ = pack_rows(examples(3), 1, 64)
    starts = jnp.asarray(starts_of(rows, 20))
    guesses = jax.jit(lambda: make_guesses(head, decoder, rows, starts, LOSS, None))()
    matches = jax.jit(lambda told: first_matches(head, decoder, told, starts, LOSS))
    best = [int(np.argmax(g[4])) for g in guesses.logits]
    at = int(starts[0, 4])
    for right in range(4):
        tokens = rows.tokens.copy()
        for place in range(3):
            tokens[at + 1 + place] = best[place] if place < right else (best[place] + 1) % 128
        told = dataclasses.replace(rows, tokens=tokens)
        # Medusa guesses from the token before, so what follows can be changed without changing its guesses.
        assert int(matches(told)[4]) == right


def new_trainer(work: Path, kind: HeadKind, steps: int = 12, **more) -> tuple[Trainer, RunOptions]:
    model = target()
    options = RunOptions(
        head=HeadOptions(
            kind=kind, num_places=TRAINED.num_places, ffn_size=None if kind is HeadKind.MEDUSA else 32, **more
        ),
        train=TrainOptions(steps=steps, num_rows=1, row_len=64, peak_rate=5e-3, warmup=2, average=0.5),
        loss=TRAINED,
        dtype="float32",
    )
    known = examples(64)
    graphdef, state = new_head(options.head, new_config(options.head, model.config), model, known, 0)
    made = Trainer(
        model=model, graphdef=graphdef, state=state, examples=known, options=options.train, loss=TRAINED, work=work
    )
    return made, options


@pytest.mark.slow
def test_a_stopped_run_ends_like_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict] = []
    # A clock of which each look takes a second: a step is two, whatever the machine is busy with.
    clock = types.SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("jaxserve.lab.training.trainer.time", clock)
    whole, options = new_trainer(tmp_path / "whole", HeadKind.EAGLE3)
    assert whole.train(tell=told.append)
    parts, _ = new_trainer(tmp_path / "parts", HeadKind.EAGLE3)
    assert not parts.train(stop_after_s=0.0, tell=told.append)
    parts, _ = new_trainer(tmp_path / "parts", HeadKind.EAGLE3)
    assert not parts.train(stop_after_s=8.0, tell=told.append)
    assert 0 < parts.step < 12
    parts, _ = new_trainer(tmp_path / "parts", HeadKind.EAGLE3)
    assert parts.train(tell=told.append)
    assert parts.step == whole.step == 12
    for name, left in jax.tree_util.tree_leaves_with_path(whole.averaged):
        right = dict(jax.tree_util.tree_leaves_with_path(parts.averaged))[name]
        np.testing.assert_array_equal(left, right, err_msg=str(name))
    plot_log(tmp_path / "whole" / "log.jsonl", tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 1000
    export(target(), whole, options, "llama", tmp_path / "head")
    head = loaded(tmp_path / "head")
    for name, left in jax.tree_util.tree_leaves_with_path(whole.averaged):
        right = dict(jax.tree_util.tree_leaves_with_path(head.state))[name]
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=str(name))


@pytest.mark.slow
def test_a_head_learns(tmp_path: Path) -> None:
    """The loss falls, and is told all along. How often drafts are right, the demo model's card says."""
    told: list[dict] = []
    trainer, _ = new_trainer(tmp_path, HeadKind.EAGLE3, steps=120, draft_vocab_size=100)
    trainer.train(tell=told.append)
    assert [t["step"] for t in told] == [*range(20, 121, 20)]
    assert told[-1]["loss"] < 0.9 * told[0]["loss"], told


def test_a_run_of_another_recipe_is_not_gone_on_with(tmp_path: Path) -> None:
    trainer, _ = new_trainer(tmp_path, HeadKind.MEDUSA)
    trainer.save()
    with pytest.raises(ConfigError, match="steps was 12 and is 13"):
        new_trainer(tmp_path, HeadKind.MEDUSA, steps=13)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (HeadOptions(kind=HeadKind.EAGLE3, taps=(0, 1, 5)), r"so \[5\] are outside"),
        (HeadOptions(kind=HeadKind.EAGLE3, taps=(1, 1, 2)), "different layers"),
        (HeadOptions(kind=HeadKind.EAGLE3, draft_vocab_size=500), "500 tokens is asked for, but the model has 128"),
        (HeadOptions(kind=HeadKind.MTP), "are read, but not trained"),
    ],
)
def test_heads_that_cannot_be(options: HeadOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        new_config(options, target().config)


def test_taps_of_shallow_and_deep_models() -> None:
    assert default_taps(5) == (1, 3, 5)
    assert default_taps(32) == (2, 16, 29)
    assert all(len(set(default_taps(n))) == len(default_taps(n)) for n in range(1, 100))


def test_batches_are_functions_of_seed_and_step() -> None:
    known = fitting(examples(40), 64)
    first = [next(b) for b in [batches(known, 2, 64, 1, 0)] for _ in range(3)]
    stream = batches(known, 2, 64, 1, 2)
    np.testing.assert_array_equal(next(stream).tokens, first[2].tokens)
    other = next(batches(known, 2, 64, 2, 2))
    assert other.tokens.shape != first[2].tokens.shape or (other.tokens != first[2].tokens).any()


def test_rows_keep_sequences_apart_and_whole() -> None:
    known = examples(30)
    rows, left = pack_rows(known, 3, 40)
    assert len(left) + int(rows.segments[rows.segments < rows.num_segments].max()) + 1 == len(known)
    placed = [e for number, e in enumerate(known) if number not in left]
    for number, example in enumerate(placed):
        (where,) = np.nonzero(rows.segments == number)
        assert rows.tokens[where].tolist() == [*example.prompt, *example.answer]
        assert (np.diff(where) == 1).all() and where[0] // 40 == where[-1] // 40
        assert rows.positions[where].tolist() == [*range(len(where))]


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x"}\n{"messages": [{"role": "assistant", "content": "y"}]}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a.jsonl:2: messages is a list with a message of a user"):
        read_questions(file, max_tokens=5)
    file.write_text('{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a.jsonl:1: a line has exactly one of messages, prompt, prompt_token_ids"):
        read_questions(tmp_path, max_tokens=5)
    file.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_questions(tmp_path, max_tokens=5)
    with pytest.raises(ConfigError, match="cannot read"):
        read_questions(tmp_path / "none.jsonl", max_tokens=5)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": chat}), encoding="utf-8")
    assert read_questions(file, max_tokens=5)[0].given == chat[:1]


def test_answers_to_other_questions_are_refused(tmp_path: Path) -> None:
    file, answers = tmp_path / "a.jsonl", tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "x"}\n', encoding="utf-8")
    questions = read_questions(file, max_tokens=5)
    assert count_answers(answers, questions, 0.8) == 0
    answers.write_text('{"prompt": [1], "answer": [2], "weight": 1.0, "of": "another"}\n{"prom', encoding="utf-8")
    with pytest.raises(ConfigError, match="answers to other questions"):
        count_answers(answers, questions, 0.8)


def test_held_out_answers_are_not_learnt_from() -> None:
    known = examples(100)
    train, held_out = split_examples(known, 10)
    assert (len(train), len(held_out)) == (90, 10)
    assert split_examples(known, 10)[1] == held_out
    with pytest.raises(ConfigError, match="too few"):
        split_examples(known[:15], 10)
    with pytest.raises(ConfigError, match="none of 2 answers"):
        fitting(known[:2], 5)


@pytest.mark.slow
def test_a_target_cut_over_devices_trains_the_same(tmp_path: Path) -> None:
    """The sum over devices has another order: equal but for rounding."""
    found = {}
    for count in (1, 2):
        model = load_model(FIXTURES / "llama", mesh=mesh_of(count))
        options = HeadOptions(kind=HeadKind.EAGLE3, ffn_size=32)
        graphdef, state = new_head(options, new_config(options, model.config), model, [], 0)
        trainer = Trainer(
            model=model,
            graphdef=graphdef,
            state=state,
            examples=examples(64),
            options=TrainOptions(steps=4, num_rows=2, row_len=64, warmup=2),
            loss=TRAINED,
            work=tmp_path / str(count),
        )
        trainer.train(tell=lambda facts: None)
        found[count] = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.averaged)]
    for one, two in zip(*found.values(), strict=True):
        assert np.abs(one - two).max() < 1e-4


def test_a_quantised_target_is_refused() -> None:
    config = load_config(None, {"model.path": str(FIXTURES / "llama"), "model.quantization": "int8"}).config
    with pytest.raises(ConfigError, match=r"model.quantization is 'int8'"):
        load_target(config.model, mesh_of(1))
    assert isinstance(whole_graphdef(target()), nnx.GraphDef)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "spiral"], "--kind is 'spiral'; known: eagle3, medusa"),
        (["--kind", "medusa", "--ffn", "64"], "--draft-vocab, --ffn and --taps are for eagle3"),
        (["--rate", "0"], "--rate is 0.0, but must be a number above 0"),
        ([], "holds no prompts"),
    ],
)
def test_a_command_that_cannot_be_run(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    common = ["train-draft", "demo", str(tmp_path / "out"), "--data", str(tmp_path / "data")]
    assert cli.main([*common, *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_from_prompts_to_a_head_that_drafts(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    words = ("tree", "apple", "kite", "lamp", "ring", "egg")
    asked = [f'Spell "{word}{n}" backwards.' for word in words for n in "abcd"]
    lines: list[dict] = [{"messages": [{"role": "user", "content": text}]} for text in asked]
    lines += [{"prompt": f"<s><|user|>What is {n}+{n}7?<|end|><|assistant|>"} for n in range(1, 9)]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    out = tmp_path / "head"
    common = ["train-draft", "demo", str(out), "--data", str(data), "--kind", "eagle3", "--ffn", "64", "--rows", "1"]
    common += ["--row-len", "128", "--steps", "3", "--held-out", "4", "--max-tokens", "12", "--draft-vocab", "300"]
    assert cli.main([*common, "--stop-after", "0"]) == 4
    assert not out.exists()
    assert cli.main(common) == 0
    config = load_config(None, {"model.path": "demo", "speculation.method": "auto", "speculation.model": str(out)})
    found = find_head(config.config, decoder_config(read_checkpoint("demo"))[1])
    assert found is not None
    assert (found.config.kind, found.config.draft_vocab_size, found.config.taps) == (HeadKind.EAGLE3, 300, (1, 3, 5))
    assert cli.main(common) == 2  # the head is there already
