"""Draft heads once more, in NumPy and float64, from the tensors of their files and the equations of their papers.

Nothing of jaxserve is used. A head is run over whole sequences, without a cache: slot i has the token i and the feature
of the place before it, and the feature of place -1 is zeros.
"""

import dataclasses

import numpy as np

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the one layer of a head."""

    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    ffn: int = 40
    vocab: int = 128
    eps: float = 1e-5
    theta: float = 10_000.0


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turned(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions 0, 1, ... of x [n, heads, dim]."""
    count, _, dim = x.shape
    angle = np.arange(count)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attended(t: Tensors, prefix: str, x: np.ndarray, s: Sizes) -> np.ndarray:
    """Causal attention, projections included."""
    count = len(x)
    q = turned((x @ t[f"{prefix}.q_proj.weight"].T).reshape(count, s.heads, s.head_dim), s.theta)
    k = turned((x @ t[f"{prefix}.k_proj.weight"].T).reshape(count, s.kv_heads, s.head_dim), s.theta)
    v = (x @ t[f"{prefix}.v_proj.weight"].T).reshape(count, s.kv_heads, s.head_dim)
    k, v = (np.repeat(a, s.heads // s.kv_heads, 1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(s.head_dim)
    scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ t[f"{prefix}.o_proj.weight"].T


def fed(t: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    gate = silu(x @ t[f"{prefix}.gate_proj.weight"].T)
    return (gate * (x @ t[f"{prefix}.up_proj.weight"].T)) @ t[f"{prefix}.down_proj.weight"].T


def wide_layer(
    t: Tensors, name: str, e: np.ndarray, f: np.ndarray, s: Sizes, norm_before_residual: bool = False
) -> np.ndarray:
    """The layer of EAGLE-3."""
    normed = rms(f, t[f"{name}.hidden_norm.weight"], s.eps)
    both = np.concatenate([rms(e, t[f"{name}.input_layernorm.weight"], s.eps), normed], -1)
    x = (normed if norm_before_residual else f) + attended(t, f"{name}.self_attn", both, s)
    return x + fed(t, f"{name}.mlp", rms(x, t[f"{name}.post_attention_layernorm.weight"], s.eps))


def layer(t: Tensors, name: str, x: np.ndarray, s: Sizes, first_norm: bool) -> np.ndarray:
    """Llama's layer, with or without its first norm."""
    inner = rms(x, t[f"{name}.input_layernorm.weight"], s.eps) if first_norm else x
    x = x + attended(t, f"{name}.self_attn", inner, s)
    return x + fed(t, f"{name}.mlp", rms(x, t[f"{name}.post_attention_layernorm.weight"], s.eps))


class Head:
    """A head of one kind: its outputs, features and logits. `target_head` [V, D] is the target's output projection."""

    def __init__(self, kind: str, tensors: Tensors, sizes: Sizes, table: np.ndarray, target_head: np.ndarray, **flags):
        self.kind, self.s, self.flags = kind, sizes, flags
        self.t = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.table, self.target_head = np.float64(table), np.float64(target_head)

    def first_features(self, hidden: np.ndarray, taps: list[np.ndarray]) -> np.ndarray:
        if self.kind != "eagle3":
            return np.float64(hidden)
        x = np.concatenate([np.float64(tap) for tap in taps], -1)
        if self.flags.get("norm_before_fc"):
            x = rms(x, self.t["input_norm.weight"], self.s.eps)
        return x @ self.t["fc.weight"].T

    def outputs(self, tokens: list[int], features: np.ndarray) -> np.ndarray:
        e, t = self.table[tokens], self.t
        if self.kind == "eagle3":
            name = "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0"
            return wide_layer(t, name, e, features, self.s, self.flags.get("norm_before_residual", False))
        if self.kind == "mtp":
            e = rms(e, t["mtp.pre_fc_norm_embedding.weight"], self.s.eps)
            features = rms(features, t["mtp.pre_fc_norm_hidden.weight"], self.s.eps)
            x = layer(t, "mtp.layers.0", np.concatenate([e, features], -1) @ t["mtp.fc.weight"].T, self.s, True)
            return rms(x, t["mtp.norm.weight"], self.s.eps)
        x = np.concatenate([e, features], -1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
        return layer(t, "layers.0", x, self.s, False)

    def next_features(self, x: np.ndarray) -> np.ndarray:
        return rms(x, self.t["norm.weight"], self.s.eps) if self.flags.get("norm_output") else x

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Over the target's vocabulary; -inf for tokens that are no drafts."""
        if self.kind != "eagle3":
            return x @ self.target_head.T
        found = rms(x, self.t["norm.weight"], self.s.eps) @ self.t["lm_head.weight"].T
        out = np.full((*found.shape[:-1], self.s.vocab), -np.inf)
        ids = np.arange(found.shape[-1]) + self.t.get("d2t", np.zeros(found.shape[-1])).astype(int)
        out[..., ids] = found
        return out

    def chain(self, tokens: list[int], hidden: np.ndarray, taps: list[np.ndarray], then: list[int]) -> list[np.ndarray]:
        """Logits of the token behind `tokens`, whose last has not gone through the target; then of each behind `then`,
        one after the other. `hidden` and `taps` are of all tokens but the last."""
        real = self.first_features(hidden, taps)
        features = np.concatenate([np.zeros((1, self.s.hidden)), real])
        tokens, found = list(tokens), []
        for token in [*then, None]:
            x = self.outputs(tokens, features)
            found.append(self.logits(x[-1]))
            features = np.concatenate([features, self.next_features(x[-1:])])
            tokens = [*tokens, token]
        return found


def medusa(tensors: Tensors, hidden: np.ndarray, num_heads: int, num_layers: int, head: np.ndarray) -> list[np.ndarray]:
    """Logits of each head in the original layout; `head` is the target's output projection."""
    found = []
    for i in range(num_heads):
        x = np.float64(hidden)
        for j in range(num_layers):
            x = x + silu(x @ tensors[f"{i}.{j}.linear.weight"].T + tensors.get(f"{i}.{j}.linear.bias", 0.0))
        found.append(x @ np.float64(tensors.get(f"{i}.{num_layers}.weight", head)).T)
    return found
