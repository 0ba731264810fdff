"""The feed-forward block of mixture-of-experts models: a router, its chosen experts, and the sum of what they give.

    y = sum over the k chosen e of  w_e * down_e(activation(gate_e x) * up_e x)

Tokens are sorted by expert, so that the products are grouped ones (`kernels.grouped_matmul`), and nothing is ever
dropped: an expert takes all tokens that choose it, or none.

A token's result depends on the token alone. The router's product goes through a weight, like all others, since one
expert that flips with the shape of a batch is no rounding error; of equal logits the lower expert wins; and a token's k
results are added in the order of its choice. Padding tokens go to no expert, so that they cost no reading of weights.

Devices share experts, each one's columns, or both. All of them have all tokens: each computes what its experts and
columns add to each token, and one sum over devices ends the block.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from jaxserve.kernels.activations import ACTIVATIONS
from jaxserve.kernels.row_sum import row_sum
from jaxserve.models.decoder_config import ExpertSpec
from jaxserve.models.layers import Summand
from jaxserve.models.sharding import WHOLE, Shards, expert_weight, param, weight

_ALPHA = 1.702  # of gpt-oss's activation


class Experts(nnx.Module):
    """One layer's mixture of experts. `gate_up` is [E, 2, F, D]: gate, then up; `down` is [E, D, F].

    The router's arrays and the biases of `down` are whole on each device: they are small, and each adds something for
    every expert or after the sum.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        hidden_size: int,
        dtype: DTypeLike,
        *,
        experts: Shards = WHOLE,
    ) -> None:
        """A block, or one device's part of it.

        Args:
          spec: with the sizes of the arrays: of one device where it is to run under `shard_map`; but `count` is of all.
          experts: the devices that have different experts.
        """
        self.spec, self.experts = spec, experts
        held, size = spec.num_held, spec.size
        self.router = weight(jnp.zeros((spec.count, hidden_size), dtype), ("router", "embed"), num_in=1)
        self.gate_up = expert_weight(
            jnp.zeros((held, 2, size, hidden_size), dtype), ("experts", "gate_up", "expert_mlp", "embed")
        )
        self.down = expert_weight(jnp.zeros((held, hidden_size, size), dtype), ("experts", "embed", "expert_mlp"))
        self.router_bias = param(jnp.zeros(spec.count, dtype), ("router",)) if spec.router_bias else None
        self.gate_up_bias = (
            param(jnp.zeros((held, 2, size), dtype), ("experts", "gate_up", "expert_mlp")) if spec.bias else None
        )
        self.down_bias = param(jnp.zeros((spec.count, hidden_size), dtype), ("router", "embed")) if spec.bias else None
        self.shared = SharedExpert(spec, hidden_size, dtype) if spec.shared_size else None

    def __call__(self, x: Float[Array, "T D"], is_real: Bool[Array, " T"]) -> Summand:
        """What this device adds to the hidden states. Rows of tokens that are not real are finite and mean nothing."""
        with jax.named_scope("router"):
            ids, weights = self._route(x)
        out = self._mix(x, jnp.where(is_real[:, None], ids, self._nobody), weights)
        if self.shared is not None:
            with jax.named_scope("shared"):
                out = out + self.shared(x)
        if self.down_bias is None:
            return Summand(out, None)
        return Summand(out, _add_slots(self.down_bias[...].astype(jnp.float32)[ids.T], weights))

    @property
    def _nobody(self) -> int:
        """An id that is past all experts of all devices."""
        return self.spec.num_held * self.experts.count

    def _route(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """Each token's experts, by falling logit, and their weights in float32."""
        logits = self.router.get_value().multiply(x)
        if self.router_bias is not None:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        chosen, ids = jax.lax.top_k(logits, self.spec.per_token)  # of equal ones the lower index comes first
        largest = chosen[:, :1]
        powers = jnp.exp(chosen - largest)
        total = row_sum(powers if self.spec.renormalise else jnp.exp(logits - largest))
        return ids, powers / total[:, None]

    def _mix(self, x: Float[Array, "T D"], ids: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
        """What this device's experts and columns add to each token, in float32."""
        held, per_token = self.spec.num_held, self.spec.per_token
        with jax.named_scope("sort"):
            own = self.experts.local_ids(ids, held).reshape(-1)  # [T * k]; `held` or more for those of nobody here
            order = jnp.argsort(own, stable=True)
            places = jnp.argsort(order)
            group_sizes = jnp.sum(own[:, None] == jnp.arange(held), axis=0, dtype=jnp.int32)
            rows = x[order // per_token]
        with jax.named_scope("gate_up"):
            gate_up = self.gate_up.get_value().multiply(rows, group_sizes)  # [T * k, 2, F]
            if self.gate_up_bias is not None:
                biases = self.gate_up_bias[...].at[own[order]].get(mode="fill", fill_value=0)
                gate_up = gate_up + biases.astype(jnp.float32)
            gate_up = gate_up.astype(x.dtype)
            activated = self._activate(gate_up[:, 0], gate_up[:, 1])
        with jax.named_scope("down"):
            out = self.down.get_value().multiply(activated, group_sizes)  # [T * k, D]
        with jax.named_scope("combine"):
            return _add_slots(out[places.reshape(ids.shape).T], weights)

    def _activate(self, gate: Float[Array, "M F"], up: Float[Array, "M F"]) -> Float[Array, "M F"]:
        if self.spec.limit is None:
            return ACTIVATIONS[self.spec.activation](gate) * up
        gate, up = jnp.minimum(gate, self.spec.limit), jnp.clip(up, -self.spec.limit, self.spec.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(_ALPHA * gate))


class SharedExpert(nnx.Module):
    """sigmoid(gate x) * down(activation(gate_up x)): a gated block that all tokens go through (Qwen2-MoE).

    Returns float32, and only what this device's columns add: the caller sums over devices.
    """

    def __init__(self, spec: ExpertSpec, hidden_size: int, dtype: DTypeLike) -> None:
        size = spec.shared_size
        self.activation = spec.activation
        self.gate_up = weight(jnp.zeros((2, size, hidden_size), dtype), ("gate_up", "mlp", "embed"), num_in=1)
        self.down = weight(jnp.zeros((hidden_size, size), dtype), ("embed", "mlp"), num_in=1)
        self.gate = weight(jnp.zeros((1, hidden_size), dtype), ("one", "embed"), num_in=1)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        out = self.down.get_value().multiply(self.gate_up.get_value().multiply_gated(x, self.activation))
        return out * jax.nn.sigmoid(self.gate.get_value().multiply(x))


def _add_slots(out: Float[Array, "k T D"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
    """The weighted sum over k, one after the other: a reduction's order would be the compiler's.

    k comes first, since a TPU would keep [T, k, D] in tiles of one row where only one of k is read.
    """
    total = out[0] * weights[:, :1]
    for slot in range(1, out.shape[0]):
        total = total + out[slot] * weights[:, slot : slot + 1]
    return total
