"""Trains, evaluates and exports the demo model that ships in ``jaxserve/demo_model``.

It is the training side of a small Llama: a plain JAX forward over packed rows, the optimizer and its schedule,
checkpoints, and the export to a Hugging Face style directory. It shares no code with the engine on purpose, so that the
two can check each other.

    XLA_FLAGS=--xla_cpu_enable_fast_math=true python scripts/train_demo.py --work runs/demo

The run resumes from the newest checkpoint in ``--work`` if there is one. The schedule follows the
seconds spent computing, so a run that is paused or stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import shutil
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import sentencepiece as spm
from build_demo_tokenizer import CHAT_TAGS, build, convert
from demo_tasks import (
    TASKS,
    Conversation,
    Item,
    Message,
    conversation,
    held_out_items,
    list_conversation,
    long_conversation,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Params = dict[str, Any]
Group = dict[str, np.ndarray]

BOS = 1
CONTEXT = 1024
STORY_WEIGHT = 0.3
EMBED_SCALE = 25.0  # folded into embedding and final norm by the export
EMBED_RATE = 0.3  # learning rate of the embedding, as a share of the others'

# Share of the examples in short rows, before the adaptive factor.
MIX = {
    "text": 0.03,
    "story": 0.03,
    "talk": 0.02,
    "add": 0.21,
    "add_steps": 0.10,
    "lookup": 0.13,
    "sort": 0.18,
    "sort_letters": 0.11,
    "reverse": 0.07,
    "reverse_dashes": 0.05,
    "json": 0.07,
}


@dataclass(frozen=True)
class Shape:
    """Size of the network, under the names of a Hugging Face config."""

    vocab_size: int
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


# ---------------------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------------------


def init_params(shape: Shape, seed: int) -> Params:
    """Random weights; matrices are stored input first."""
    rng = np.random.default_rng(seed)
    d, f = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim

    def normal(rows: int, columns: int, std: float) -> np.ndarray:
        return rng.normal(0.0, std, (rows, columns)).astype(np.float32)

    out = (2 * shape.num_hidden_layers) ** -0.5
    layers = [
        {
            "qkv": normal(d, q + 2 * kv, d**-0.5),
            "o": normal(q, d, out * q**-0.5),
            "gate_up": normal(d, 2 * f, d**-0.5),
            "down": normal(f, d, out * f**-0.5),
            "norm1": np.ones(d, np.float32),
            "norm2": np.ones(d, np.float32),
        }
        for _ in range(shape.num_hidden_layers)
    ]
    return {
        "embed": normal(shape.vocab_size, d, 1.0 / EMBED_SCALE),
        "layers": layers,
        "norm": np.ones(d, np.float32),
    }


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def forward(
    params: Params,
    shape: Shape,
    tokens: jax.Array,
    position: jax.Array,
    segment: jax.Array,
    pick: jax.Array | None = None,
) -> jax.Array:
    """Logits of packed rows; a token sees the earlier tokens of its own segment.

    ``pick`` holds indices into the flattened rows: only these places get logits (and pass the
    last feed-forward part), which saves a seventh of a training step.
    """
    rows, length = tokens.shape
    heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    x = params["embed"][tokens] * EMBED_SCALE
    rates = shape.rope_theta ** (-jnp.arange(dim // 2, dtype=jnp.float32) * 2.0 / dim)
    angle = position[..., None].astype(jnp.float32) * rates
    cos, sin = (f(angle)[:, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))

    def rotate(v: jax.Array) -> jax.Array:
        a, b = jnp.split(v, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    index = jnp.arange(length)
    seen = (index[:, None] >= index[None, :]) & (segment[:, :, None] == segment[:, None, :])
    bias = jnp.where(seen, 0.0, -1e9).astype(jnp.float32)[:, None]
    cuts = (heads * dim, (heads + kv_heads) * dim)
    for layer in params["layers"]:
        inner = rms_norm(x, layer["norm1"], shape.rms_norm_eps)
        q, k, v = jnp.split(inner @ layer["qkv"], cuts, -1)
        q = rotate(q.reshape(rows, length, heads, dim)) * dim**-0.5
        k = rotate(k.reshape(rows, length, kv_heads, dim))
        v = v.reshape(rows, length, kv_heads, dim)
        k, v = (jnp.repeat(t, heads // kv_heads, axis=2) for t in (k, v))
        score = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) + bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(score, axis=-1).astype(x.dtype), v)
        mixed = mixed.reshape(rows, length, heads * dim)
        if pick is not None and layer is params["layers"][-1]:
            x, mixed = (t.reshape(rows * length, -1)[pick] for t in (x, mixed))
        x = x + mixed @ layer["o"]
        inner = rms_norm(x, layer["norm2"], shape.rms_norm_eps)
        gate, up = jnp.split(inner @ layer["gate_up"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
    return rms_norm(x, params["norm"], shape.rms_norm_eps) @ params["embed"].T


def loss_sums(params: Params, shape: Shape, group: Group) -> tuple[jax.Array, jax.Array]:
    """Weighted negative log likelihood of one group of rows, and the sum of the weights."""
    logits = forward(params, shape, group["tokens"], group["position"], group["segment"], group["pick"])
    right = jnp.take_along_axis(logits, group["target"][..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - right
    return jnp.sum(nll * group["weight"]), jnp.sum(group["weight"])


def make_optimizer() -> optax.GradientTransformation:
    """AdamW without its learning rate, which the step multiplies in."""

    def is_matrix(params: Params) -> Params:
        return jax.tree.map(lambda p: p.ndim == 2, params)

    def slower_embedding(updates: Params, params: Params | None = None) -> Params:
        return updates | {"embed": updates["embed"] * EMBED_RATE}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
        optax.add_decayed_weights(0.05, mask=is_matrix),
        optax.stateless(slower_embedding),
    )


def make_step(shape: Shape, optimizer: optax.GradientTransformation):
    """The jitted training step: (params, state, groups, rate) -> (params, state, loss)."""

    def total(params: Params, groups: list[Group]) -> jax.Array:
        sums = [loss_sums(params, shape, group) for group in groups]
        return sum(s for s, _ in sums) / sum(w for _, w in sums)

    def step(params: Params, state: Any, groups: list[Group], rate: jax.Array):
        loss, grads = jax.value_and_grad(total)(params, groups)
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return params, state, loss

    return jax.jit(step, donate_argnums=(0, 1))


# ---------------------------------------------------------------------------------------------
# Tokens and rows
# ---------------------------------------------------------------------------------------------


class Codec:
    """Turns conversations into tokens, the way the exported chat template does."""

    def __init__(self, path: Path) -> None:
        self.sp = spm.SentencePieceProcessor(model_file=str(path))
        self.system, self.user, self.assistant, self.end = (self.sp.piece_to_id(tag) for tag in CHAT_TAGS)

    def chat(self, chat: Conversation) -> tuple[list[int], list[float]]:
        """Tokens and the loss weight each has as a target."""
        tokens, weights = [BOS], [0.0]
        if chat.text is not None:
            tokens += [*self.sp.encode(chat.text), self.end]
            return tokens, [0.0] + [STORY_WEIGHT] * (len(tokens) - 1)
        for index, message in enumerate(chat.messages):
            body = [*self.sp.encode(message["content"]), self.end]
            tokens += [getattr(self, message["role"]), *body]
            weight = 0.0
            if message["role"] == "assistant":
                weight = STORY_WEIGHT if index in chat.story_turns else 1.0
            weights += [0.0] + [weight] * len(body)
        return tokens, weights

    def prompt(self, item: Item) -> list[int]:
        """Tokens up to where the answer begins."""
        if not item.messages:
            return [BOS, *self.sp.encode(item.prompt)]
        return [*self.chat(Conversation(messages=list(item.messages)))[0], self.assistant]

    def chat_length(self, messages: list[Message]) -> int:
        """Number of tokens of these messages as a chat."""
        return len(self.chat(Conversation(messages=messages))[0])


def empty_group(rows: int, length: int) -> Group:
    """Rows of padding; unused places are segments of their own kind with no weight."""
    group = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "position", "segment", "target")}
    return group | {"weight": np.zeros((rows, length), np.float32)}


def pack(group: Group, chats, patience: int = 40) -> Group:
    """Fill the rows from the iterator ``chats`` of (tokens, weights), first fit."""
    rows, length = group["tokens"].shape
    used, count, misses = [0] * rows, 0, 0
    while misses < patience:
        tokens, weights = next(chats)
        size = len(tokens) - 1
        row = next((r for r in range(rows) if used[r] + size <= length), None)
        if row is None:
            misses += 1
            continue
        count += 1
        place = slice(used[row], used[row] + size)
        used[row] += size
        group["tokens"][row, place] = tokens[:-1]
        group["target"][row, place] = tokens[1:]
        group["weight"][row, place] = weights[1:]
        group["position"][row, place] = np.arange(size)
        group["segment"][row, place] = count
    return only_answers(group)


def only_answers(group: Group, share: float = 0.5) -> Group:
    """Replace the targets of all places by those of the (at most ``share``) places that count."""
    weight = group["weight"].reshape(-1)
    pick = np.zeros(int(weight.size * share), np.int32)
    chosen = np.flatnonzero(weight)[: pick.size]
    pick[: chosen.size] = chosen
    used = (np.arange(pick.size) < chosen.size).astype(np.float32)
    answers = {
        "pick": pick,
        "target": group["target"].reshape(-1)[pick],
        "weight": weight[pick] * used,
    }
    return group | answers


class Data:
    """Batches, each a function of (seed, step) and of the current mix; made in a thread."""

    def __init__(self, codec: Codec, seed: int, mix: dict[str, float]) -> None:
        self.codec, self.seed, self.mix = codec, seed, mix
        self.ready: queue.Queue = queue.Queue(maxsize=6)
        self.long_share, self.list_share = 0.0, 1.0

    def _short(self, rng: random.Random):
        names = list(self.mix)
        while True:
            task = rng.choices(names, [self.mix[name] for name in names])[0]
            turns = rng.choices((1, 2, 3), (0.8, 0.13, 0.07))[0]
            yield self.codec.chat(conversation(rng, task, turns))

    def _lists(self, rng: random.Random):
        while True:
            pairs = rng.randint(2, 40) if rng.random() < 0.5 else rng.randint(20, 40)
            yield self.codec.chat(list_conversation(rng, pairs, 6))

    def _long(self, rng: random.Random):
        def fits(messages: list[Message]) -> bool:
            return self.codec.chat_length(messages) <= CONTEXT

        while True:
            yield self.codec.chat(long_conversation(rng, fits))

    def batch(self, step: int) -> list[Group]:
        """Short rows of every task; in some steps also rows of long lists or one of full length."""
        rng = random.Random(f"{self.seed} {step}")
        short = pack(empty_group(22, 128), self._short(rng))
        kind = rng.random()
        if kind < self.long_share:
            return [short, pack(empty_group(1, CONTEXT), self._long(rng), 1)]
        if kind > 1.0 - self.list_share:
            return [short, pack(empty_group(3, 240), self._lists(rng), 6)]
        return [short]

    def start(self, step: int) -> None:
        """Begin to prepare batches from ``step`` on."""

        def work() -> None:
            for number in range(step, 1 << 40):
                self.ready.put(self.batch(number))

        threading.Thread(target=work, daemon=True).start()


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


class Evaluator:
    """Exact match per task and free samples.

    A greedy answer equals the right one if and only if every argmax after a right prefix is
    right, the end of the turn included; so one forward per item replaces the decoding loop.
    """

    def __init__(self, shape: Shape, codec: Codec) -> None:
        self.codec = codec
        self.argmax = jax.jit(lambda p, t, i, s: jnp.argmax(forward(p, shape, t, i, s), axis=-1))

    def _predict(self, params: Params, tokens: np.ndarray) -> np.ndarray:
        position = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        return np.asarray(self.argmax(params, tokens, position, np.zeros_like(tokens)))

    def accuracy(self, params: Params, task: str, count: int, seed: int = 0) -> float:
        """Share of ``count`` held-out items answered exactly."""
        pending: dict[int, list[tuple[list[int], int]]] = {}
        for item in held_out_items(task, count, seed):
            prompt = self.codec.prompt(item)
            tokens = [*prompt, *self.codec.sp.encode(item.answer), self.codec.end]
            length = next(n for n in (64, 128, 240, CONTEXT) if len(tokens) <= n)
            pending.setdefault(length, []).append((tokens, len(prompt)))
        right = 0
        for length, items in pending.items():
            rows = max(1, 4096 // length)
            for start in range(0, len(items), rows):
                part = items[start : start + rows]
                block = np.zeros((rows, length), np.int32)
                for row, (tokens, _) in enumerate(part):
                    block[row, : len(tokens)] = tokens
                best = self._predict(params, block)
                for row, (tokens, begin) in enumerate(part):
                    right += list(best[row, begin - 1 : len(tokens) - 1]) == tokens[begin:]
        return right / count

    def generate(self, params: Params, prompts: list[list[int]], limit: int = 130) -> list[str]:
        """Greedy continuations, by recomputing everything for each token."""
        rows = [list(prompt) for prompt in prompts]
        open_rows = set(range(len(rows)))
        length = 64
        for _ in range(limit):
            while length <= max(map(len, rows)):
                length = min(length + 64, CONTEXT)
            block = np.zeros((len(rows), length), np.int32)
            for row, tokens in enumerate(rows):
                block[row, : len(tokens)] = tokens
            best = self._predict(params, block)
            for row in list(open_rows):
                rows[row].append(int(best[row, len(rows[row]) - 1]))
                if rows[row][-1] == self.codec.end or len(rows[row]) >= CONTEXT:
                    open_rows.discard(row)
            if not open_rows:
                break
        return [
            self.codec.sp.decode([t for t in row[len(p) :] if t != self.codec.end])
            for row, p in zip(rows, prompts, strict=True)
        ]


SAMPLE_QUESTIONS = (
    "Hello!",
    "What can you do?",
    "Tell me a story about a fox.",
    "What is 683+784?",
    'Spell "window" backwards.',
    "Put these words in order: tree, apple, kite.",
    "Fill in name, age, city: My friend Ada from London is 36.",
    "Here is a list: egg:12, lamp:77, ring:40. What is lamp?",
    "Who wrote this book?",
)
SAMPLE_OPENINGS = ("Once upon a time", "Long ago, a brave little")


def show_samples(params: Params, evaluator: Evaluator, console: Console) -> None:
    """Print what the model says to a few prompts."""
    codec = evaluator.codec
    asked = [codec.prompt(Item("", "", ({"role": "user", "content": text},))) for text in SAMPLE_QUESTIONS]
    asked += [[BOS, *codec.sp.encode(text)] for text in SAMPLE_OPENINGS]
    said = evaluator.generate(params, asked)
    for prompt, text in zip((*SAMPLE_QUESTIONS, *SAMPLE_OPENINGS), said, strict=True):
        console.print(f"  {prompt} -> {text}", markup=False, highlight=False)


# ---------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------

FILES = Path(__file__).resolve().parent.parent / "jaxserve" / "demo_model"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _bf16(value: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(value).astype(jnp.bfloat16))


def folded(params: Params) -> Params:
    """The same network as an ordinary Llama: no factor on the embedding."""
    embed, norm = params["embed"] * EMBED_SCALE, params["norm"] / EMBED_SCALE
    return params | {"embed": embed, "norm": norm}


def as_served(params: Params) -> Params:
    """Weights rounded to bfloat16 as the export holds them, in this script's scale and float32."""
    rounded = jax.tree.map(lambda p: jnp.asarray(_bf16(p)).astype(jnp.float32), folded(params))
    return rounded | {
        "embed": rounded["embed"] / EMBED_SCALE,
        "norm": rounded["norm"] * EMBED_SCALE,
    }


def export(params: Params, shape: Shape, tokenizer: Path, target: Path) -> None:
    """Write the directory that Hugging Face and jaxserve read."""
    from safetensors.numpy import save_file

    params = folded(params)
    q = shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for number, layer in enumerate(params["layers"]):
        name = f"model.layers.{number}."
        f = shape.intermediate_size
        tensors |= {
            name + "self_attn.q_proj.weight": layer["qkv"][:, :q].T,
            name + "self_attn.k_proj.weight": layer["qkv"][:, q : q + kv].T,
            name + "self_attn.v_proj.weight": layer["qkv"][:, q + kv :].T,
            name + "self_attn.o_proj.weight": layer["o"].T,
            name + "mlp.gate_proj.weight": layer["gate_up"][:, :f].T,
            name + "mlp.up_proj.weight": layer["gate_up"][:, f:].T,
            name + "mlp.down_proj.weight": layer["down"].T,
            name + "input_layernorm.weight": layer["norm1"],
            name + "post_attention_layernorm.weight": layer["norm2"],
        }
    target.mkdir(parents=True, exist_ok=True)
    data = {key: np.ascontiguousarray(_bf16(value)) for key, value in tensors.items()}
    part = target / "model.safetensors.part"  # readers never see a half-written file
    save_file(data, part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(target / "model.safetensors")
    (target / "cache_scales.json").unlink(missing_ok=True)  # of the former weights; the README says how to make it
    if tokenizer.resolve() != (target / "tokenizer.model").resolve():
        shutil.copyfile(tokenizer, target / "tokenizer.model")
    convert(tokenizer, target / "tokenizer.json")
    if target.resolve() != FILES:
        shutil.copyfile(FILES / "chat_template.jinja", target / "chat_template.jinja")
    codec = Codec(tokenizer)
    ids = {"bos_token_id": BOS, "eos_token_id": codec.end, "pad_token_id": 2}
    _write_json(
        target / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(shape),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "max_position_embeddings": CONTEXT,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            **ids,
        },
    )
    _write_json(target / "generation_config.json", {"do_sample": False, **ids})
    special = {
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
    }
    _write_json(
        target / "special_tokens_map.json",
        special | {"additional_special_tokens": list(CHAT_TAGS[:3])},
    )
    added = {
        str(codec.sp.piece_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for text in ("<unk>", "<s>", "</s>", *CHAT_TAGS)
    }
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
            "added_tokens_decoder": added,
            "additional_special_tokens": list(CHAT_TAGS[:3]),
            **special,
        },
    )


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


class Checkpoints:
    """Orbax checkpoints of weights, optimizer state and counters."""

    def __init__(self, path: Path, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self.manager = ocp.CheckpointManager(path.resolve(), options=options)

    def save(self, step: int, tree: Any, notes: dict[str, Any]) -> None:
        """Write checkpoint ``step`` and wait for it."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(tree), notes=ocp.args.JsonSave(notes))
        self.manager.save(step, args=items, force=True)
        self.manager.wait_until_finished()

    def load(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest checkpoint, or None."""
        step = self.manager.latest_step()
        if step is None:
            return None
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        found = self.manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes), notes=ocp.args.JsonRestore()),
        )
        return found["state"], dict(found["notes"])


def rate_at(done: float, step: int, peak: float, decay_from: float, warmup: int) -> float:
    """Learning rate: warm-up by steps, flat, then linear to zero by share of the time budget."""
    tail = 1.0 if done < decay_from else max(0.0, (1.0 - done) / (1.0 - decay_from))
    return peak * min(1.0, (step + 1) / warmup) * tail


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, default=Path("runs/demo"), help="folder of the checkpoints")
    add("--export", type=Path, default=Path("jaxserve/demo_model"), help="where the model goes")
    add("--minutes", type=float, default=90.0, help="computing time of the whole schedule")
    add("--steps", type=int, default=1 << 30, help="stop after this many steps")
    add("--seed", type=int, default=0)
    add("--rate", type=float, default=1.6e-3, help="peak learning rate")
    add("--decay-from", type=float, default=0.7, help="share of the time with a flat rate")
    add("--warmup", type=int, default=100, help="steps of warm-up")
    add("--long-from", type=float, default=0.4, help="share of the time before long rows")
    add("--long-share", type=float, default=0.25, help="share of the steps that hold one then")
    add("--list-share", type=float, default=0.5, help="share of the steps with long lists")
    add("--eval-every", type=float, default=5.0, help="minutes between evaluations")
    add("--eval-items", type=int, default=96, help="held-out items per task and evaluation")
    add("--final-items", type=int, default=512, help="the same for the last evaluation")
    add("--mix", default="", help="changes of the mix, such as sort=0.4,json=0.05")
    add("--init-from", type=Path, help="weights of another run, with a fresh optimizer")
    add("--layers", type=int, default=5)
    add("--ffn", type=int, default=704)
    add("--no-resume", action="store_true", help="ignore checkpoints in --work")
    add("--evaluate", action="store_true", help="only evaluate and export what is in --work")
    return parser.parse_args()


def report(target: Path, lines: list[str]) -> None:
    """Put the newest table of results into the model card, between its two marks."""
    card = target / "README.md"
    if not card.exists():
        return
    text = card.read_text(encoding="utf-8")
    begin, end = "<!-- results -->\n", "<!-- /results -->"
    if begin in text and end in text:
        head, rest = text.split(begin, 1)
        tail = rest.split(end, 1)[1]
        card.write_text(head + begin + "\n".join(lines) + "\n" + end + tail, encoding="utf-8")


class Run:
    """One training run: its weights, counters and what happens at each evaluation."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.tokenizer = args.work / "tokenizer.model"
        if not self.tokenizer.exists():
            build(self.tokenizer)
        self.codec = Codec(self.tokenizer)
        self.shape = Shape(self.codec.sp.vocab_size(), num_hidden_layers=args.layers, intermediate_size=args.ffn)
        self.params: Params = jax.tree.map(jnp.asarray, init_params(self.shape, args.seed))
        self.optimizer = make_optimizer()
        pairs = [part.split("=") for part in args.mix.split(",") if part]
        self.mix_changes = {name: float(value) for name, value in pairs}
        self.mix = MIX | self.mix_changes
        self.start_mix = dict(self.mix)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.before_decay_saved = False
        self.earlier = {"step": 0, "tokens": 0, "seconds": 0.0}  # of the run in --init-from
        if args.init_from:
            like = {"params": self.params, "state": self.optimizer.init(self.params)}
            found = Checkpoints(args.init_from, 1).load(like)
            if found is None:
                raise SystemExit(f"no checkpoint in {args.init_from}")
            self.params, self.earlier = found[0]["params"], found[1]
        self.state = self.optimizer.init(self.params)
        self.checkpoints = Checkpoints(args.work / "newest", 2)
        self.evaluator = Evaluator(self.shape, self.codec)
        count = sum(p.size for p in jax.tree.leaves(self.params))
        console.print(f"{count / 1e6:.2f} M parameters, {self.shape.vocab_size} pieces")
        if not args.no_resume:
            self._resume()

    def _tree(self) -> dict[str, Any]:
        return {"params": self.params, "state": self.state}

    def _resume(self) -> None:
        found = self.checkpoints.load(self._tree())
        if found is None:
            return
        tree, notes = found
        self.params, self.state = tree["params"], tree["state"]
        self.step, self.tokens = notes["step"], notes["tokens"]
        self.seconds = notes["seconds"]
        self.before_decay_saved = notes["before_decay_saved"]
        self.mix = notes["mix"] | self.mix_changes
        self.console.print(f"resumed at step {self.step}, {self.seconds / 60:.1f} minutes")

    def save(self, checkpoints: Checkpoints | None = None) -> None:
        """Write a checkpoint."""
        notes = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "before_decay_saved": self.before_decay_saved,
            "mix": self.mix,
        }
        (checkpoints or self.checkpoints).save(self.step, self._tree(), notes)

    @property
    def done(self) -> float:
        """Share of the time budget that is spent."""
        return self.seconds / (60 * self.args.minutes)

    def evaluate(self, items: int, adapt: bool = True) -> dict[str, float]:
        """Accuracy per task; also moves the mix towards what is still wrong, and exports."""
        scores = {}
        for task in TASKS:
            count = max(8, items // 8) if task == "lookup_long" else items
            scores[task] = self.evaluator.accuracy(self.params, task, count)
        text = "  ".join(f"{task} {100 * score:.1f}" for task, score in scores.items())
        self.console.print(
            f"[eval] step {self.step} {self.tokens / 1e6:.1f} Mtok {self.seconds / 60:.1f} min: {text}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        if adapt:
            need = {task: max(0.2, 1.0 - score) for task, score in scores.items()}
            usual = statistics.mean(need.values())  # for stories and talk, which have no score
            for task, share in self.start_mix.items():
                self.mix[task] = share * need.get(task, usual)
        export(self.params, self.shape, self.tokenizer, self.args.export)
        return scores

    def final(self) -> None:
        """Evaluate float32 and bfloat16 weights, print, and fill the table of the model card."""
        count = self.args.final_items
        earlier = self.earlier
        lines = [
            f"{earlier['step'] + self.step:,} steps, "
            f"{(earlier['tokens'] + self.tokens) / 1e6:.1f} M tokens, "
            f"{(earlier['seconds'] + self.seconds) / 60:.0f} minutes; "
            f"exact match in % on {count} held-out items a task (lookup_long: {count // 4}).",
            "",
            "| task | float32 | bfloat16 |",
            "|---|---|---|",
        ]
        served = as_served(self.params)
        for task in TASKS:
            items = count // 4 if task == "lookup_long" else count  # 1024 tokens each
            pair = [self.evaluator.accuracy(p, task, items, 1) for p in (self.params, served)]
            lines.append(f"| {task} | {100 * pair[0]:.1f} | {100 * pair[1]:.1f} |")
            self.console.print(lines[-1], markup=False)
        export(self.params, self.shape, self.tokenizer, self.args.export)
        report(self.args.export, lines)
        show_samples(served, self.evaluator, self.console)

    def train(self) -> None:
        """The training loop, up to the time budget or the number of steps."""
        args, console = self.args, self.console
        update = make_step(self.shape, self.optimizer)
        data = Data(self.codec, args.seed, self.mix)
        data.long_share = args.long_share if self.done >= args.long_from else 0.0
        data.list_share = args.list_share
        data.start(self.step)
        recent: list[float] = []
        losses: list[jax.Array] = []
        next_eval = self.seconds + 60 * args.eval_every
        bar = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(),
            TextColumn("{task.percentage:>5.1f} %  loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:.0f} tok/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        with bar:
            job = bar.add_task("train", total=1.0, completed=self.done, step=self.step, loss=0.0, speed=0.0)
            while self.done < 1.0 and self.step < args.steps:
                began = time.perf_counter()
                groups = data.ready.get()
                rate = rate_at(self.done, self.step, args.rate, args.decay_from, args.warmup)
                self.params, self.state, loss = update(self.params, self.state, groups, jnp.float32(rate))
                losses.append(loss)
                loss.block_until_ready()
                self.step += 1
                self.tokens += sum(int((g["segment"] > 0).sum()) for g in groups)
                took = time.perf_counter() - began
                recent = [*recent[-40:], took]
                # A step far above the usual is a pause of the process, not work.
                self.seconds += min(took, 5 * statistics.median(recent))
                data.long_share = args.long_share if self.done >= args.long_from else 0.0
                if self.step % 50 == 0:
                    mean = float(np.mean([float(x) for x in losses]))
                    speed = sum(int(g["tokens"].size) for g in groups) / statistics.median(recent)
                    losses = []
                    bar.update(job, completed=self.done, step=self.step, loss=mean, speed=speed)
                    if not console.is_terminal:
                        console.print(
                            f"step {self.step} {100 * self.done:.1f}% loss {mean:.4f} rate "
                            f"{rate:.2e} {speed:.0f} tok/s {statistics.median(recent):.3f} s/step"
                        )
                if not self.before_decay_saved and self.done >= args.decay_from > 0:
                    self.before_decay_saved = True
                    self.save(Checkpoints(args.work / "before_decay", 1))
                if self.seconds >= next_eval:
                    began = time.perf_counter()
                    self.evaluate(args.eval_items)
                    self.seconds += min(time.perf_counter() - began, 60.0)
                    next_eval = self.seconds + 60 * args.eval_every
                    self.save()
        self.save()


def main() -> None:
    """Train (or only evaluate), then report."""
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    run = Run(args, Console(soft_wrap=True))
    if not args.evaluate:
        run.train()
    run.final()


if __name__ == "__main__":
    main()
