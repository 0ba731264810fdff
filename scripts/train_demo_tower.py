"""Trains the vision tower of the demo model, ``jaxserve/demo_model/vision``, and exports it.

The demo model itself stays as it is: the tower learns to put embeddings into its prompt that make it write the answer.
Three stages, each of which keeps its result in ``--work`` and goes on from there:

    see    the tower on generated pictures, with a linear head that names each piece of the answer directly
    write  embeddings for each piece and place, from which the frozen decoder writes any answer; no pictures
    join   the tower towards these embeddings, then through the decoder, by the answer's cross entropy

    XLA_FLAGS=--xla_cpu_enable_fast_math=true python scripts/train_demo_tower.py see write join export --work runs/tower
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_pictures import QUESTION, SIDE, answers, draw, held_out, task_of
from optax.contrib import MuonDimensionNumbers, muon
from safetensors.numpy import load_file, save_file

from jaxserve.models.decoder import PictureInputs
from jaxserve.models.trainable import Params, TrainableDecoder, TrainableTower, load_trainable, load_trainable_tower
from jaxserve.text import load_tokenizer
from jaxserve.vision.clip import LlavaProcessor
from jaxserve.vision.processor import PictureLimits

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "jaxserve" / "demo_model"

# Share of the pictures of each task in training, the harder, the more; and in its last part, through the decoder.
MIX = {"thing": 0.18, "count": 0.28, "number": 0.24, "word": 0.30}
LAST_MIX = {"thing": 0.22, "count": 0.18, "number": 0.18, "word": 0.42}
PATCH = 14
GRID = (1, SIDE // PATCH, SIDE // PATCH)
NUM_TOKENS = GRID[1] * GRID[2]
WIDTH, LAYERS, HEADS, MLP = 128, 4, 4, 384
MEAN, STD = (0.8,) * 3, (0.25,) * 3  # of most pixels, so that a background is near zero
PLACES = 7  # pieces of the longest answer, its end included; the first tokens of a picture stand for them
NOISE = 0.3  # of the embeddings in the stage `write`, so that nearly right ones will do

WRITE_BATCH = 16
CODE_SCALE = 16.0  # divides half of the squared distances of embeddings, so that they are the logits of a soft choice
EXAMPLE_SEED = 3  # of the held-out picture that is packaged

BOS, USER, ASSISTANT, END = 1, 4, 5, 6
FIRST_WORD, PLACEHOLDER = 500, 1154  # pieces between them are words; the second is <spare0>

Batch = dict[str, Any]  # of arrays, made by numpy and traced by JAX


# ---------------------------------------------------------------------------------------------
# Answers as pieces
# ---------------------------------------------------------------------------------------------


class Answers:
    """Every answer as pieces of the vocabulary, and as classes: the pieces that occur, numbered."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(DEMO)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        pieces = {text: [*encode(text), END] for text in answers()}
        assert max(map(len, pieces.values())) == PLACES
        self.vocabulary = np.array(sorted({piece for found in pieces.values() for piece in found}))
        self.prefix, self.suffix = [BOS, USER], [*encode(QUESTION), END, ASSISTANT]
        self.start = len(self.prefix) + NUM_TOKENS + len(self.suffix) - 1  # the place that the first piece follows
        self.row_len = self.start + PLACES
        self._pieces = pieces

    def batch(self, texts: list[str]) -> Batch:
        """`tokens` [B, L] of whole prompts with their answers, `target` and `weight` [B, PLACES] of the answers, and
        `classes` [B, PLACES]: those behind the end are that of the end."""
        tokens = np.zeros((len(texts), self.row_len), np.int32)
        target = np.full((len(texts), PLACES), END, np.int32)
        weight = np.zeros((len(texts), PLACES), np.float32)
        for row, text in enumerate(texts):
            pieces = self._pieces[text]
            prompt = [*self.prefix, *[PLACEHOLDER] * NUM_TOKENS, *self.suffix, *pieces[:-1]]
            tokens[row, : len(prompt)] = prompt
            target[row, : len(pieces)] = pieces
            weight[row, : len(pieces)] = 1.0
        classes = np.searchsorted(self.vocabulary, target).astype(np.int32)
        return {"tokens": tokens, "target": target, "weight": weight, "classes": classes}


# ---------------------------------------------------------------------------------------------
# Pictures, drawn by another process
# ---------------------------------------------------------------------------------------------


def processor() -> LlavaProcessor:
    """What the engine does to pictures."""
    return LlavaProcessor(
        placeholder_id=PLACEHOLDER, limits=PictureLimits(), mean=MEAN, std=STD, size=SIDE, patch_size=PATCH
    )


def drawn(seed: str, size: int, mix: Mapping[str, float] = MIX) -> tuple[np.ndarray, list[str]]:
    """Patches of `size` pictures, uint8 [size, P, V], and their answers; a function of the seed."""
    rng, cut = random.Random(seed), processor().patches
    pictures = [draw(rng, rng.choices(list(mix), list(mix.values()))[0]) for _ in range(size)]
    return np.stack([cut(picture.image)[0] for picture in pictures]), [picture.answer for picture in pictures]


def batches(
    known: Answers, name: str, first: int, size: int, mix: Mapping[str, float] = MIX
) -> Iterator[tuple[Batch, list[str]]]:
    """Endless batches with `pixels`, from number `first` on, and the answers."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        ahead: list[Future] = [pool.submit(drawn, f"{name} {first + i}", size, mix) for i in range(8)]
        step = first
        while True:
            pixels, texts = ahead.pop(0).result()
            ahead.append(pool.submit(drawn, f"{name} {step + 8}", size, mix))
            step += 1
            yield known.batch(texts) | {"pixels": pixels}, texts


# ---------------------------------------------------------------------------------------------
# The tower
# ---------------------------------------------------------------------------------------------


def model_config() -> dict[str, Any]:
    """The config.json of the vision model: the demo model's, with a tower."""
    text = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    ids = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": PLACEHOLDER,
        "image_seq_length": NUM_TOKENS,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
        "text_config": {name: value for name, value in text.items() if name not in ("architectures", *ids)},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": MLP,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
            "image_size": SIDE,
            "patch_size": PATCH,
            "num_channels": 3,
        },
    }


def preprocessor_config() -> dict[str, Any]:
    """The preprocessor_config.json."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": SIDE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }


def first_tensors(out_size: int, seed: int) -> dict[str, np.ndarray]:
    """Random weights under the names of a checkpoint; each matrix keeps the scale of what it multiplies."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float) -> np.ndarray:
        return rng.normal(0.0, std, shape).astype(np.float32)

    def linear(name: str, rows: int, columns: int, share: float = 1.0) -> dict[str, np.ndarray]:
        weight = normal(rows, columns, std=share * columns**-0.5)
        return {f"{name}.weight": weight, f"{name}.bias": np.zeros(rows, np.float32)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}

    clip = "vision_tower.vision_model"
    tensors = {
        f"{clip}.embeddings.class_embedding": normal(WIDTH, std=0.5),
        f"{clip}.embeddings.patch_embedding.weight": normal(WIDTH, 3, PATCH, PATCH, std=(3 * PATCH**2) ** -0.5),
        f"{clip}.embeddings.position_embedding.weight": normal(1 + NUM_TOKENS, WIDTH, std=0.5),
        **norm(f"{clip}.pre_layrnorm"),
        **linear("multi_modal_projector.linear_1", out_size, WIDTH),
        **linear("multi_modal_projector.linear_2", out_size, out_size),
    }
    for layer in range(LAYERS):
        block = f"{clip}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors |= linear(f"{block}.self_attn.{name}", WIDTH, WIDTH)
        tensors |= linear(f"{block}.self_attn.out_proj", WIDTH, WIDTH, (2 * LAYERS) ** -0.5)
        tensors |= linear(f"{block}.mlp.fc1", MLP, WIDTH)
        tensors |= linear(f"{block}.mlp.fc2", WIDTH, MLP, (2 * LAYERS) ** -0.5)
        tensors |= norm(f"{block}.layer_norm1") | norm(f"{block}.layer_norm2")
    return tensors


def load_tower(work: Path, out_size: int) -> tuple[TrainableTower, Params]:
    """The tower with its first weights, by way of a directory that is a checkpoint of it."""
    folder = work / "first"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config()))
    save_file(first_tensors(out_size, seed=0), folder / "model.safetensors")
    return load_trainable_tower(folder, mean=MEAN, std=STD, dtype="float32")


def layer_norm(x: jax.Array, params: Mapping[str, jax.Array], name: str) -> jax.Array:
    """Over the last axis."""
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]


def forward(params: Params, pixels: jax.Array, count: int = NUM_TOKENS) -> jax.Array:
    """Embeddings [B, count, D] of the first tokens of each picture of `pixels` [B, P, V].

    What the engine's tower computes, for a batch at once: its own takes one picture and, under `jax.vmap`, twice the
    time on a CPU. The last block is computed for the tokens that are asked for.
    """
    size, num_states = len(pixels), 1 + NUM_TOKENS

    def linear(name: str, x: jax.Array, outputs: int) -> jax.Array:
        """By one product of all rows; a kernel with several axes counts as a matrix."""
        kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
        flat = x.reshape(-1, x.shape[-1]) @ kernel.reshape(outputs, -1).T + bias.reshape(-1)
        return flat.reshape(*x.shape[:-1], outputs)

    def heads(x: jax.Array) -> jax.Array:
        """[B, S, width] as [B, N, S, H]."""
        return x.reshape(size, x.shape[1], HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)

    values = (pixels.astype(jnp.float32) / 255 - MEAN[0]) / STD[0]
    x = values.reshape(-1, values.shape[-1]) @ params["patches.kernel"].reshape(WIDTH, -1).T
    first = jnp.broadcast_to(params["first"], (size, 1, WIDTH))
    x = jnp.concatenate([first, x.reshape(size, NUM_TOKENS, WIDTH)], axis=1) + params["positions"]
    x = layer_norm(x, params, "norm")
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        asked = slice(1, 1 + count) if layer == LAYERS - 1 else slice(0, num_states)
        inner = layer_norm(x, params, f"{block}.attention_norm")
        qkv = linear(f"{block}.qkv", inner, 3 * WIDTH)
        q, k, v = (heads(part) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bnqh,bnkh->bnqk", q[:, :, asked], k) * (WIDTH // HEADS) ** -0.5
        mixed = jnp.einsum("bnqk,bnkh->bnqh", jax.nn.softmax(scores, axis=-1), v)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(size, -1, WIDTH)
        x = x[:, asked] + linear(f"{block}.out", mixed, WIDTH)
        inner = linear(f"{block}.mlp.up", layer_norm(x, params, f"{block}.mlp_norm"), MLP)
        x = x + linear(f"{block}.mlp.down", inner * jax.nn.sigmoid(1.702 * inner), WIDTH)
    out_size = params["down.bias"].shape[0]
    return linear("down", jax.nn.gelu(linear("up", x, out_size), approximate=False), out_size)


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


def _matrix_axes(name: str) -> MuonDimensionNumbers | None:
    """The axes of a parameter that is a matrix to Muon; None: Adam's."""
    if name.endswith("qkv.kernel"):
        return MuonDimensionNumbers(reduction_axis=3, output_axis=(1, 2))
    if name.endswith("out.kernel"):
        return MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=0)
    if name.endswith(("up.kernel", "down.kernel")):
        return MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return None


def make_optimizer(params: Params, rate: float, steps: int) -> optax.GradientTransformation:
    """Muon for the matrices of the tower, Adam for all else; a short warm-up, then a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(100, steps // 5), steps, rate / 100)
    axes: Any = {name: _matrix_axes(name) for name in params}
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(schedule, muon_weight_dimension_numbers=axes, consistent_rms=0.2, adam_b2=0.99),
    )


@dataclass
class Fit:
    """What a stage has trained: parameters, their moving average, the optimizer's state, and the next step."""

    params: Params
    average: Params
    state: Any
    step: int = 0


Loss = Callable[[Params, Batch, jax.Array], tuple[jax.Array, jax.Array]]


def fit(
    params: Params,
    loss: Loss,
    data: Callable[[int], Iterator[tuple[Batch, list[str]]]],
    *,
    file: Path,
    steps: int,
    rate: float,
    smooth: float = 0.99,
    part: int = 16,
) -> Params:
    """The moving average of the parameters after `steps`. `loss` returns its value and which rows are all right: since
    no picture comes twice, their share is that of pictures that were never seen. Slopes are those of `part` rows at a
    time, whose activations a processor's cache holds. Goes on from `file`."""
    optimizer = make_optimizer(params, rate, steps)
    now = Fit(params, params, optimizer.init(params))
    if file.is_file():
        now = _restore(file, now)

    @jax.jit
    def update(params: Params, average: Params, state: Any, batch: Batch, key: jax.Array) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(-1, part, *x.shape[1:]), batch)

        def add(total: Params, one: tuple[Batch, jax.Array]) -> tuple[Params, tuple[jax.Array, jax.Array]]:
            found, slopes = jax.value_and_grad(loss, has_aux=True)(params, *one)
            return jax.tree.map(jnp.add, total, slopes), found

        nothing = jax.tree.map(jnp.zeros_like, params)
        keys = jax.random.split(key, len(batch["tokens"]) // part)
        slopes, (value, right) = jax.lax.scan(add, nothing, (parts, keys))
        slopes = jax.tree.map(lambda x: x / len(keys), slopes)
        changes, state = optimizer.update(slopes, state, params)
        moved: Any = optax.apply_updates(params, changes)
        average = jax.tree.map(lambda a, p: smooth * a + (1 - smooth) * p, average, moved)
        return moved, average, state, value.mean(), right.reshape(-1)

    began, values, hits = time.time(), [], {task: [] for task in MIX}
    source = data(now.step)
    while now.step < steps:
        batch, texts = next(source)
        key = jax.random.key(now.step)
        now.params, now.average, now.state, value, right = update(now.params, now.average, now.state, batch, key)
        now.step += 1
        values.append(float(value))
        for text, hit in zip(texts, np.asarray(right), strict=True):
            hits[task_of(text)].append(hit)
        if now.step % 50 == 0 or now.step == steps:
            shares = "  ".join(f"{task} {100 * np.mean(found):5.1f}" for task, found in hits.items() if found)
            took = time.time() - began
            print(f"{file.stem} {now.step}/{steps}  loss {np.mean(values):.4f}  {shares}  {took:.0f} s", flush=True)
            values, hits = [], {task: [] for task in MIX}
        if now.step % 100 == 0 or now.step == steps:
            _save(file, now)
    return now.average


def _save(file: Path, now: Fit) -> None:
    arrays: dict[str, Any] = {f"params.{name}": value for name, value in now.params.items()}
    arrays |= {f"average.{name}": value for name, value in now.average.items()}
    arrays |= {f"state.{i}": leaf for i, leaf in enumerate(jax.tree.leaves(now.state))}
    part = file.with_suffix(".part.npz")  # a run that is stopped here leaves the former file whole
    np.savez(part, allow_pickle=False, step=now.step, **arrays)
    part.replace(file)


def _restore(file: Path, like: Fit) -> Fit:
    structure = jax.tree.structure(like.state)
    with np.load(file) as found:
        params, average = (
            {name: jnp.asarray(found[f"{kind}.{name}"]) for name in like.params} for kind in ("params", "average")
        )
        state = [jnp.asarray(found[f"state.{i}"]) for i in range(structure.num_leaves)]
        return Fit(params, average, jax.tree.unflatten(structure, state), int(found["step"]))


def finished(file: Path) -> Params:
    """What a stage has trained: the moving average of its parameters."""
    with np.load(file) as found:
        return {n.removeprefix("average."): jnp.asarray(found[n]) for n in found.files if n.startswith("average.")}


def rows_right(logits: jax.Array, batch: Mapping[str, Any], target: str) -> jax.Array:
    """Which rows have the right class at every place that counts."""
    return jnp.all((logits.argmax(-1) == batch[target]) | (batch["weight"] == 0), axis=1)


def see(params: Params, known: Answers, args: argparse.Namespace) -> None:
    """Stage 1: the first tokens of a picture name the pieces of its answer, by a head that is thrown away."""
    size = params["down.bias"].shape[0]
    head = np.random.default_rng(1).normal(0.0, size**-0.5, (size, len(known.vocabulary))).astype(np.float32)

    def loss(params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        logits = forward(params, batch["pixels"], PLACES) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["classes"])
        return losses.mean(), rows_right(logits, batch, "classes")

    fit(
        params | {"head": jnp.asarray(head)},
        loss,
        lambda first: batches(known, "see", first, args.batch),
        file=args.work / "see.npz",
        steps=args.see_steps,
        rate=args.rate,
    )


# ---------------------------------------------------------------------------------------------
# The way through the decoder
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    """The demo model, whose weights nothing here changes."""

    decoder: TrainableDecoder
    params: Params

    def answer_logits(self, known: Answers, embeds: jax.Array, tokens: jax.Array) -> jax.Array:
        """Logits [B, PLACES, V] of the pieces of answers, with the embeddings [B, N, D] of pictures in the prompts."""
        count, row_len = tokens.shape
        slots = np.full((count, row_len), -1, np.int32)
        first = len(known.prefix)
        slots[:, first : first + NUM_TOKENS] = np.arange(count * NUM_TOKENS).reshape(count, NUM_TOKENS)
        pictures = PictureInputs(embeds.reshape(count * NUM_TOKENS, -1), jnp.asarray(slots.reshape(-1)))
        module, hidden = self.decoder.hidden(self.params, tokens, None, pictures)
        asked = hidden.reshape(count, row_len, -1)[:, known.start : known.start + PLACES]
        return module.logits(asked.reshape(count * PLACES, -1)).reshape(count, PLACES, -1)


def answer_loss(logits: jax.Array, batch: Batch) -> jax.Array:
    """The cross entropy of a piece of an answer, on average."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def write(frozen: Frozen, known: Answers, args: argparse.Namespace) -> None:
    """Stage 2: `codes` [PLACES, C, D], the embedding of each class at each place, and `rest` [N - PLACES, D], that of
    the other tokens of a picture."""
    table = np.asarray(frozen.params["embedding"], np.float32)
    rng = np.random.default_rng(2)
    params = {
        "codes": jnp.asarray(np.tile(table[known.vocabulary], (PLACES, 1, 1))),
        "rest": jnp.asarray(table[rng.integers(FIRST_WORD, PLACEHOLDER, NUM_TOKENS - PLACES)]),
    }
    texts = {task: [text for text in answers() if task_of(text) == task] for task in MIX}

    def data(first: int) -> Iterator[tuple[Batch, list[str]]]:
        step = first
        while True:
            rng = random.Random(f"write {step}")
            tasks = rng.choices(list(MIX), list(MIX.values()), k=WRITE_BATCH)
            chosen = [rng.choice(texts[task]) for task in tasks]
            yield known.batch(chosen), chosen
            step += 1

    def loss(params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        wanted = wanted_embeddings(params, batch["classes"])
        embeds = wanted + NOISE * jax.random.normal(key, wanted.shape)
        logits = frozen.answer_logits(known, embeds, batch["tokens"])
        return answer_loss(logits, batch), rows_right(logits, batch, "target")

    fit(params, loss, data, file=args.work / "write.npz", steps=args.write_steps, rate=0.1)


def wanted_embeddings(written: Params, classes: jax.Array) -> jax.Array:
    """Of whole pictures, [B, N, D]."""
    codes = written["codes"][jnp.arange(PLACES), classes]
    rest = written["rest"]
    return jnp.concatenate([codes, jnp.broadcast_to(rest, (len(classes), *rest.shape))], axis=1)


def with_fitted_output(params: Params, written: Params, known: Answers, count: int) -> Params:
    """The tower with the last product of its projector replaced: the best one, by least squares over `count` pictures,
    for the embeddings of stage 2."""
    size = params["down.bias"].shape[0]
    before = params | {"down.kernel": jnp.eye(size), "down.bias": jnp.zeros(size)}
    pixels, texts = drawn("fit", count)
    inputs = jnp.concatenate([jax.jit(forward)(before, part) for part in np.split(pixels, count // 64)])
    wanted = wanted_embeddings(written, known.batch(texts)["classes"])
    columns = np.pad(np.asarray(inputs, np.float64).reshape(-1, size), ((0, 0), (0, 1)), constant_values=1.0)
    found, *_ = np.linalg.lstsq(columns, np.asarray(wanted, np.float64).reshape(-1, size))
    kernel, bias = found[:-1].T.astype(np.float32), found[-1].astype(np.float32)
    return params | {"down.kernel": jnp.asarray(kernel), "down.bias": jnp.asarray(bias)}


def join(params: Params, written: Params, frozen: Frozen, known: Answers, args: argparse.Namespace) -> None:
    """Stage 3: the tower towards the embeddings of stage 2, and then through the decoder."""
    spread = float(jnp.var(wanted_embeddings(written, jnp.zeros((1, PLACES), int))))

    def distance(embeds: jax.Array, batch: Batch) -> jax.Array:
        return jnp.mean((embeds - wanted_embeddings(written, batch["classes"])) ** 2) / spread

    def nearby(params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        embeds, codes = forward(params, batch["pixels"]), written["codes"]
        closeness = (jnp.einsum("bpd,pcd->bpc", embeds[:, :PLACES], codes) - 0.5 * (codes**2).sum(-1)) / CODE_SCALE
        # A word is rare, and its distance from another a small part of the whole: classes make up for that.
        confusion = optax.softmax_cross_entropy_with_integer_labels(closeness, batch["classes"]).mean()
        return distance(embeds, batch) + confusion, rows_right(closeness, batch, "classes")

    def through(params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        embeds = forward(params, batch["pixels"])
        logits = frozen.answer_logits(known, embeds, batch["tokens"])
        return answer_loss(logits, batch) + 0.1 * distance(embeds, batch), rows_right(logits, batch, "target")

    seen = {name: value for name, value in params.items() if name != "head"}
    first = with_fitted_output(seen, written, known, count=512)
    near = fit(
        first,
        nearby,
        lambda step: batches(known, "near", step, args.batch),
        file=args.work / "near.npz",
        steps=args.near_steps,
        rate=args.rate,
    )
    fit(
        near,
        through,
        lambda step: batches(known, "join", step, args.batch // 2, LAST_MIX),
        file=args.work / "join.npz",
        steps=args.join_steps,
        rate=args.rate / 2,
    )


# ---------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------


def export(tower: TrainableTower, params: Params, target: Path) -> None:
    """Writes the checkpoint: the tower in bfloat16, and an index that names the demo model's file for the decoder."""
    target.mkdir(parents=True, exist_ok=True)
    rounded = {name: np.asarray(value).astype(jnp.bfloat16) for name, value in tower.to_hf(params).items()}
    tensors = {name: np.ascontiguousarray(value) for name, value in rounded.items()}
    save_file(tensors, target / "tower.safetensors", metadata={"format": "pt"})
    (target / "tower.safetensors").chmod(0o644)  # the library makes it readable for its owner alone
    files = dict.fromkeys(tensors, "tower.safetensors") | dict.fromkeys(
        load_file(DEMO / "model.safetensors"), "../model.safetensors"
    )
    _write_json(target / "model.safetensors.index.json", {"weight_map": files})
    _write_json(target / "config.json", model_config())
    _write_json(target / "preprocessor_config.json", preprocessor_config())
    shutil.copyfile(DEMO / "generation_config.json", target / "generation_config.json")
    # The first spare piece of the vocabulary becomes the placeholder of pictures.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (DEMO / name).read_text(encoding="utf-8")
        (target / name).write_text(text.replace('"<spare0>"', '"<image>"'), encoding="utf-8")
    next(held_out("count", 1, seed=EXAMPLE_SEED)).image.save(target / "example.png", optimize=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("stages", nargs="+", choices=("see", "write", "join", "export"))
    add("--work", type=Path, default=Path("runs/tower"), help="folder of what each stage has trained")
    add("--export", type=Path, default=DEMO / "vision", help="where the checkpoint goes")
    add("--batch", type=int, default=64, help="pictures of a step; half as many in the last part")
    add("--see-steps", type=int, default=2500)
    add("--write-steps", type=int, default=400)
    add("--near-steps", type=int, default=500)
    add("--join-steps", type=int, default=600)
    add("--rate", type=float, default=2e-3, help="peak learning rate of the stage `see`")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    known = Answers()
    frozen = Frozen(*load_trainable("demo", dtype="float32"))
    tower, params = load_tower(args.work, frozen.params["embedding"].shape[1])
    if "see" in args.stages:
        see(params, known, args)
    if "write" in args.stages:
        write(frozen, known, args)
    if "join" in args.stages:
        join(finished(args.work / "see.npz"), finished(args.work / "write.npz"), frozen, known, args)
    if "export" in args.stages:
        export(tower, finished(args.work / "join.npz"), args.export)


if __name__ == "__main__":
    main()
