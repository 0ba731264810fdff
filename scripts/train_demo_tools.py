"""Trains the LoRA adapter with which the demo model calls tools, and exports it as PEFT would write it.

    XLA_FLAGS=--xla_cpu_enable_fast_math=true python scripts/train_demo_tools.py --work runs/tools

The model stays as it is: its forward is that of ``train_demo.py``, and each step adds the product of the adapter's two
matrices to each weight. Chats come from ``demo_tool_tasks.py`` and are written by the chat template of the model, so
that training and serving show it the same tokens; the assistant's turns are what is learnt. The run goes on from the
newest checkpoint in ``--work``. Its schedule follows the processor's seconds: a pause or a neighbour changes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_tool_tasks import KINDS, Message, ToolItem, held_out_tool_items, tool_conversation
from rich.console import Console
from safetensors.numpy import load_file, save_file
from train_demo import (
    EMBED_SCALE,
    FILES,
    STORY_WEIGHT,
    Checkpoints,
    Group,
    Params,
    Shape,
    empty_group,
    forward,
    loss_sums,
    only_answers,
    pack,
    rate_at,
)

from jaxserve.text import ChatTemplate, encode_chat, load_tokenizer

Adapter = list[dict[str, dict[str, jax.Array]]]  # of each layer, by module: "A" [r, in] and "B" [out, r]

RANK = 32
ALPHA = 64  # the product of B and A counts ALPHA / RANK times
# Rows and their length in a step. Attention over long rows is most of their time, and three of four chats are short.
SHORT, LONG, LONG_SHARE = (5, 304), (3, 512), 0.12
# What decides: the first token of a turn, the signs and digits of a call, and where a number ends. Each counts this
# often, for most tokens of a call are the same in all of them.
DECIDING = ("+", "-", "*", *"0123456789", '"}')
DECIDING_WEIGHT = 6.0
JUDGED = (4, 640)  # the same for held-out items, of which none is longer
# Where each module is in the matrices of `train_demo.py`, which are stored input first.
MODULES = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
}

# ---------------------------------------------------------------------------------------------
# Model and adapter
# ---------------------------------------------------------------------------------------------


def load_base(folder: Path = FILES) -> tuple[Shape, Params]:
    """The model of a directory, in float32: the inverse of ``train_demo.export``."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    tensors = {name: np.asarray(value, np.float32) for name, value in load_file(folder / "model.safetensors").items()}
    layers = []
    for number in range(shape.num_hidden_layers):
        name = f"model.layers.{number}."
        joined: dict[str, list[np.ndarray]] = {}
        for module, place in MODULES.items():
            joined.setdefault(place, []).append(tensors[f"{name}{module}.weight"].T)
        layers.append(
            {place: np.concatenate(parts, axis=1) for place, parts in joined.items()}
            | {
                "norm1": tensors[name + "input_layernorm.weight"],
                "norm2": tensors[name + "post_attention_layernorm.weight"],
            }
        )
    embed, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    return shape, {"embed": embed / EMBED_SCALE, "layers": layers, "norm": norm * EMBED_SCALE}


def init_adapter(shape: Shape, seed: int) -> Adapter:
    """Random A and zero B, so that the model begins as it is."""
    rng = np.random.default_rng(seed)
    d, f, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_attention_heads * head, shape.num_key_value_heads * head
    sizes = dict(zip(MODULES, ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d)), strict=True))
    return [
        {
            module: {
                "A": jnp.asarray(rng.normal(0.0, rows**-0.5, (RANK, rows)), jnp.float32),
                "B": jnp.zeros((columns, RANK), jnp.float32),
            }
            for module, (rows, columns) in sizes.items()
        }
        for _ in range(shape.num_hidden_layers)
    ]


def with_adapter(base: Params, adapter: Adapter) -> Params:
    """The model with the adapter's products added to its weights."""
    layers = []
    for layer, modules in zip(base["layers"], adapter, strict=True):
        changes: dict[str, list[jax.Array]] = {}
        for module, place in MODULES.items():
            pair = modules[module]
            changes.setdefault(place, []).append((ALPHA / RANK) * (pair["B"] @ pair["A"]).T)
        layers.append(layer | {place: layer[place] + jnp.concatenate(parts, 1) for place, parts in changes.items()})
    return base | {"layers": layers}


def rounded(adapter: Adapter) -> Adapter:
    """As the export holds it."""
    return jax.tree.map(lambda array: array.astype(jnp.bfloat16).astype(jnp.float32), adapter)


def export(adapter: Adapter, target: Path) -> None:
    """Write the directory in PEFT's format."""
    tensors = {
        f"base_model.model.model.layers.{number}.{module}.lora_{side}.weight": np.asarray(array.astype(jnp.bfloat16))
        for number, modules in enumerate(adapter)
        for module, pair in modules.items()
        for side, array in pair.items()
    }
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    (target / "adapter_model.safetensors").chmod(0o644)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
    }
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------
# Tokens and rows
# ---------------------------------------------------------------------------------------------


class ChatWriter:
    """Chats as tokens, by the template that the model is served with."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(FILES)
        self.template = ChatTemplate.of(self.tokenizer)
        ids = {self.tokenizer.token_text(i): i for i in range(self.tokenizer.vocab_size)}
        self.assistant, self.end = ids["<|assistant|>"], ids["<|end|>"]
        self.deciding = {ids[text] for text in DECIDING}

    def write(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, weights: list[float]
    ) -> tuple[list[int], list[float]]:
        """Tokens, and the weight that each has as a target: those of an assistant's turn have the next of ``weights``,
        times that of what decides; all others 0."""
        ids = list(encode_chat(self.tokenizer, self.template, messages, tools=tools, add_generation_prompt=False))
        left, weight, of_tokens, before = iter(weights), 0.0, [], None
        for token in ids:
            decides = before == self.assistant or token in self.deciding
            of_tokens.append(weight * (DECIDING_WEIGHT if decides else 1.0))
            before = token
            if token == self.assistant:
                weight = next(left)
            elif token == self.end:
                weight = 0.0
        return ids, of_tokens

    def training(self, rng: random.Random, longest: int) -> Iterator[tuple[list[int], list[float]]]:
        """Chats without an end, of ``longest`` tokens at most and the one that is only a target."""
        while True:
            chat = tool_conversation(rng)
            weights = [
                STORY_WEIGHT if index in chat.free_turns else 1.0
                for index, message in enumerate(chat.messages)
                if message["role"] == "assistant"
            ]
            tokens, of_tokens = self.write(chat.messages, chat.schemas, weights)
            if len(tokens) <= longest + 1:
                yield tokens, of_tokens

    def item(self, item: ToolItem) -> tuple[list[int], list[float]]:
        """A held-out item with its answer, which alone has weight."""
        turns = sum(message["role"] == "assistant" for message in item.messages)
        return self.write([*item.messages, item.answer], item.tools, [0.0] * turns + [1.0])


def packed(chats: Iterable[tuple[list[int], list[float]]]) -> Iterator[tuple[Group, int]]:
    """All chats in order, in groups of rows, and how many there are in each; each chat is a segment."""
    rows, length = JUDGED
    group, count, row, used = empty_group(rows, length), 0, 0, 0
    for tokens, weights in chats:
        size = len(tokens) - 1
        if used + size > length:
            row, used = row + 1, 0
        if row == rows:
            yield only_answers(group), count
            group, count, row, used = empty_group(rows, length), 0, 0, 0
        place = slice(used, used + size)
        used, count = used + size, count + 1
        group["tokens"][row, place], group["target"][row, place] = tokens[:-1], tokens[1:]
        group["weight"][row, place] = weights[1:]
        group["position"][row, place], group["segment"][row, place] = np.arange(size), count
    yield only_answers(group), count


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, default=Path("runs/tools"), help="folder of the checkpoints")
    add("--export", type=Path, default=FILES / "tools", help="where the adapter goes")
    add("--minutes", type=float, default=25.0, help="processor time of the whole schedule")
    add("--seed", type=int, default=0)
    add("--rate", type=float, default=2e-3, help="peak learning rate")
    add("--decay-from", type=float, default=0.5, help="share of the time with a flat rate")
    add("--warmup", type=int, default=60, help="steps of warm-up")
    add("--eval-every", type=float, default=4.0, help="minutes between evaluations")
    add("--eval-items", type=int, default=40, help="held-out items of each kind in an evaluation")
    return parser.parse_args()


class Run:
    """One training run: its adapter, counters, and what happens at each evaluation."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.writer = ChatWriter()
        self.shape, base = load_base()
        self.base = jax.tree.map(jnp.asarray, base)
        self.adapter = init_adapter(self.shape, args.seed)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
        self.state = self.optimizer.init(self.adapter)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.checkpoints = Checkpoints(args.work / "newest", 2)
        self.update, self.argmax = self._make_update(), self._make_argmax()
        found = self.checkpoints.load(self._tree())
        if found is not None:
            tree, notes = found
            self.adapter, self.state = tree["adapter"], tree["state"]
            self.step, self.tokens, self.seconds = notes["step"], notes["tokens"], notes["seconds"]
            console.print(f"resumed at step {self.step}, {self.seconds / 60:.1f} minutes")

    def _tree(self) -> dict[str, Any]:
        return {"adapter": self.adapter, "state": self.state}

    def _make_update(self):
        def loss(adapter: Adapter, base: Params, group: Group) -> jax.Array:
            total, weight = loss_sums(with_adapter(base, adapter), self.shape, group)
            return total / weight

        def update(adapter: Adapter, state: Any, base: Params, group: Group, rate: jax.Array):
            value, grads = jax.value_and_grad(loss)(adapter, base, group)
            updates, state = self.optimizer.update(grads, state, adapter)
            return jax.tree.map(lambda p, u: p - rate * u, adapter, updates), state, value

        return jax.jit(update, donate_argnums=(0, 1))

    def _make_argmax(self):
        def argmax(params: Params, group: Group) -> jax.Array:
            logits = forward(params, self.shape, group["tokens"], group["position"], group["segment"], group["pick"])
            return jnp.argmax(logits, axis=-1)

        return jax.jit(argmax)

    def accuracy(self, params: Params, kind: str, count: int, seed: int = 0) -> float:
        """Share of held-out items of which every token of the answer is the most likely one behind a right prefix."""
        items = (self.writer.item(item) for item in held_out_tool_items(kind, count, seed))
        right = 0
        for group, chats in packed(items):
            wrong = np.asarray(self.argmax(params, group)) != group["target"]
            segments = group["segment"].reshape(-1)[group["pick"]]
            right += chats - len({*segments[wrong & (group["weight"] > 0)].tolist()})
        return right / count

    def evaluate(self) -> None:
        """Print the accuracy of each kind, export and save."""
        params = with_adapter(self.base, rounded(self.adapter))
        shares = {kind: self.accuracy(params, kind, self.args.eval_items) for kind in KINDS}
        text = "  ".join(f"{kind} {100 * share:.1f}" for kind, share in shares.items())
        self.console.print(
            f"[eval] step {self.step} {self.tokens / 1e6:.2f} Mtok {self.seconds / 60:.1f} min: {text}", markup=False
        )
        export(self.adapter, self.args.export)
        notes = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        self.checkpoints.save(self.step, self._tree(), notes)

    def train(self) -> None:
        """Steps until the time is spent."""
        args, losses = self.args, []
        next_eval = self.seconds + 60 * args.eval_every
        while (done := self.seconds / (60 * args.minutes)) < 1.0:
            began = time.process_time()
            rng = random.Random(f"tools {args.seed} {self.step}")
            rows, length = LONG if rng.random() < LONG_SHARE else SHORT
            group = pack(empty_group(rows, length), self.writer.training(rng, length), 12)
            rate = rate_at(done, self.step, args.rate, args.decay_from, args.warmup)
            self.adapter, self.state, loss = self.update(self.adapter, self.state, self.base, group, jnp.float32(rate))
            losses.append(float(loss))
            self.step += 1
            self.tokens += int((group["segment"] > 0).sum())
            self.seconds += time.process_time() - began
            if self.step % 20 == 0:
                self.console.print(
                    f"step {self.step} {100 * done:.1f} % loss {np.mean(losses[-20:]):.4f} rate {rate:.1e} "
                    f"{self.seconds / self.step:.2f} s/step",
                    markup=False,
                )
            if self.seconds >= next_eval:
                self.evaluate()
                next_eval = self.seconds + 60 * args.eval_every
        self.evaluate()


def main() -> None:
    """Train and export."""
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    Run(args, Console(soft_wrap=True, highlight=False)).train()


if __name__ == "__main__":
    main()
