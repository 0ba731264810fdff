"""One layer at a time over all texts: hidden states go in and come out, and what its products take in is measured.

The layer's own modules run, with weights that look at their inputs (`_Tapped`), so that every family is the same here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxserve.kernels.coded_weight import round_activations
from jaxserve.kernels.matmul import Axes, Weight
from jaxserve.kernels.paged_attention import AttentionBatch, PagedAttention
from jaxserve.kernels.xla_matmul import DenseWeight
from jaxserve.models.decoder import Decoder, DecoderLayer
from jaxserve.models.decoder_config import DecoderConfig, LayerSpec, RopeConfig
from jaxserve.models.partition import Partition
from jaxserve.models.rope import rope_table
from jaxserve.models.sharding import WeightParameter, with_leaves
from jaxserve.quantise.source import Arrays
from jaxserve.runtime.calibration import Largest, recording

Hidden = list[np.ndarray]  # [T, D] of each step
Step = tuple[AttentionBatch, Int[Array, " T"]]  # of whole sequences, and their tokens
Count = Callable[[int, int], None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a product has taken in: sums over tokens.

    Attributes:
      gram: of x x^T.
      magnitude: of |x|.
      tokens: how many.
    """

    gram: Float[Array, "K K"]
    magnitude: Float[Array, " K"]
    tokens: Float[Array, ""]

    @classmethod
    def none(cls, depth: int) -> "Inputs":
        return cls(gram=jnp.zeros((depth, depth)), magnitude=jnp.zeros(depth), tokens=jnp.zeros(()))

    def with_more(self, x: Float[Array, "T ..."], real: Bool[Array, " T"]) -> "Inputs":
        """With those of tokens that are `real`, not padding."""
        rows = jnp.where(real[:, None], x.reshape(len(x), -1).astype(jnp.float32), 0)
        products = jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST)
        return Inputs(
            gram=self.gram + products,
            magnitude=self.magnitude + jnp.abs(rows).sum(axis=0),
            tokens=self.tokens + real.sum(),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tapped(Weight):
    """A `kernels.matmul.Weight` while a layer is traced: a dense one that hands its inputs to `saw`.

    `rounds_inputs`: it multiplies them as int8 codes would, one scale for each token.
    """

    array: Array
    num_in: int = dataclasses.field(metadata={"static": True})
    saw: Callable[[Array], None] = dataclasses.field(metadata={"static": True})
    rounds_inputs: bool = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`."""
        self.saw(x)
        if self.rounds_inputs:
            flat = x.reshape(len(x), -1)
            codes, scales = round_activations(flat, flat.shape[1], ())
            x = (codes.astype(jnp.float32) * scales).astype(x.dtype).reshape(x.shape)
        return DenseWeight(array=self.array, num_in=self.num_in).multiply(x)

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        return DenseWeight(array=self.array, num_in=self.num_in).take(rows)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        return (axes,)


class Streams:
    """Runs parts of one decoder on the default device."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, attention: PagedAttention) -> None:
        self._config, self._dtype = config, dtype
        self._placement = Partition.of(config, 1).placement
        self._layer = _compiled_layer(attention, config.ropes)

    @functools.lru_cache(maxsize=8)  # noqa: B019 (lives as long as one job)
    def _abstract(self, part: LayerSpec | str) -> tuple[nnx.GraphDef, nnx.State]:
        """A layer, or what comes before the layers ('begin') or after them ('end')."""
        config, depth = self._config, self._config.num_layers

        def make() -> nnx.Module:
            if isinstance(part, LayerSpec):
                return DecoderLayer(config, part, self._dtype, self._placement)
            layers = range(0) if part == "begin" else range(depth, depth)
            return Decoder(config, self._dtype, placement=self._placement, layers=layers)

        return nnx.split(nnx.eval_shape(make))

    def _filled(self, part: LayerSpec | str, arrays: Mapping[str, np.ndarray]) -> tuple[nnx.GraphDef, nnx.State]:
        graphdef, abstract = self._abstract(part)

        def one(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
            return with_leaves(variable, [jnp.asarray(arrays[".".join(map(str, path))], self._dtype)])

        return graphdef, nnx.map_state(one, abstract)

    def embed(self, outer: Arrays, steps: Sequence[Step]) -> Hidden:
        """What the first layer takes in."""
        graphdef, state = self._filled("begin", outer)
        return [np.asarray(_run_embedding(state, tokens, batch, graphdef=graphdef)) for batch, tokens in steps]

    def advance(
        self,
        layer: int,
        arrays: Arrays,
        steps: Sequence[Step],
        hidden: Hidden,
        *,
        rounded: frozenset[str] = frozenset(),
        kept: int = 1,
        count: Count = lambda done, total: None,
    ) -> tuple[Hidden, Largest]:
        """What the next layer takes in, and the `kept` largest magnitudes of keys and values of each head.

        `rounded`: parameters whose inputs are rounded to int8.
        """
        graphdef, state = self._filled(self._config.layers[layer], arrays)
        largest, out = self._no_magnitudes(kept), []
        for (batch, _), x in zip(steps, hidden, strict=True):
            y, largest, _ = self._layer(state, x, batch, largest, {}, graphdef=graphdef, rounded=rounded)
            out.append(np.asarray(y))
            count(len(out), len(steps))
        return out, largest

    def measure(
        self,
        layer: int,
        arrays: Arrays,
        steps: Sequence[Step],
        hidden: Hidden,
        names: Sequence[str],
        *,
        count: Count = lambda done, total: None,
    ) -> dict[str, Inputs]:
        """What the products of these parameters take in."""
        spec = self._config.layers[layer]
        graphdef, state = self._filled(spec, arrays)
        weights = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(self._abstract(spec)[1])}
        inputs = {}
        for name in names:
            dense = weights[name].get_raw_value()
            inputs[name] = Inputs.none(int(np.prod(dense.array.shape[-dense.num_in :])))
        largest = self._no_magnitudes(1)
        for done, ((batch, _), x) in enumerate(zip(steps, hidden, strict=True), start=1):
            _, largest, inputs = self._layer(state, x, batch, largest, inputs, graphdef=graphdef, rounded=frozenset())
            jax.block_until_ready(largest)
            count(done, len(steps))
        return inputs

    def compare(
        self,
        outer: tuple[Arrays, Arrays],
        hidden: tuple[np.ndarray, np.ndarray],
        batch: AttentionBatch,
        targets: np.ndarray,
    ) -> np.ndarray:
        """`quality.Compared` of a step, as columns [T, 6]: of the float model, and of the rounded one.

        `outer`: parameters beside the layers; `hidden`: after the last layer; `targets` [T]: the next token of each.
        """
        graphdef, exact = self._filled("end", outer[0])
        _, found = self._filled("end", outer[1])
        x, y = hidden
        return np.asarray(_compare(exact, found, x, y, batch, targets, graphdef=graphdef))

    def _no_magnitudes(self, kept: int) -> Largest:
        shape = (self._config.num_kv_heads, kept)
        return Largest(keys=jnp.zeros(shape), values=jnp.zeros(shape))


@functools.partial(jax.jit, static_argnames="graphdef")
def _run_embedding(state: nnx.State, tokens: Array, batch: AttentionBatch, *, graphdef: nnx.GraphDef) -> Array:
    return nnx.merge(graphdef, state)(tokens, (), (batch,), (), None)[0]


@functools.cache
def _compiled_layer(attention: PagedAttention, ropes: tuple[RopeConfig, ...]) -> Callable[..., Any]:
    """`_run_layer`, which jobs of one process share: what one has compiled the next finds."""
    return jax.jit(
        functools.partial(_run_layer, recording(attention), ropes),
        static_argnames=("graphdef", "rounded"),
        donate_argnames=("largest", "inputs"),
    )


def _run_layer(
    attention: PagedAttention,
    ropes: Sequence[RopeConfig],
    state: nnx.State,
    x: Float[Array, "T D"],
    batch: AttentionBatch,
    largest: Largest,
    inputs: dict[str, Inputs],
    *,
    graphdef: nnx.GraphDef,
    rounded: frozenset[str],
) -> tuple[Float[Array, "T D"], Largest, dict[str, Inputs]]:
    seen: dict[str, Array] = {}

    def tapped(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_raw_value() if isinstance(variable, WeightParameter) else None
        if not isinstance(value, DenseWeight):
            return variable
        name = ".".join(map(str, path))
        tap = _Tapped(
            array=value.array,
            num_in=value.num_in,
            saw=functools.partial(seen.__setitem__, name),
            rounds_inputs=name in rounded,
        )
        return variable.replace(tap)

    layer = nnx.merge(graphdef, nnx.map_state(tapped, state))
    tables = {rope: rope_table(rope, batch.positions, batch.positions + 1) for rope in ropes}
    out, largest = layer(x, tables, largest, batch, attention)
    real = batch.token_rows < batch.context_lens.shape[0]
    return out, largest, {name: found.with_more(seen[name], real) for name, found in inputs.items()}


@functools.partial(jax.jit, static_argnames="graphdef")
def _compare(
    exact: nnx.State,
    found: nnx.State,
    x: Float[Array, "T D"],
    y: Float[Array, "T D"],
    batch: AttentionBatch,
    targets: Int[Array, " T"],
    *,
    graphdef: nnx.GraphDef,
) -> Float[Array, "T 6"]:
    p, q = (
        jax.nn.log_softmax(_logits(nnx.merge(graphdef, state), hidden, batch))
        for state, hidden in ((exact, x), (found, y))
    )
    # sum p (log p - log q) as a sum of terms that are never negative: sum of q - p is 0. Small differences by series.
    d = p - q
    term = jnp.where(jnp.abs(d) < 0.03, d * d * (0.5 - d / 6 + d * d / 24), d + jnp.expm1(-d))
    divergence = jnp.sum(jnp.where(p > -jnp.inf, jnp.exp(p) * term, 0), axis=1)
    best, chosen = jnp.argmax(p, axis=1), jnp.argmax(q, axis=1)
    of_target = jnp.take_along_axis(jnp.stack([p, q]), targets[None, :, None], axis=2)[..., 0]
    columns = [divergence, -of_target[0], -of_target[1], best == targets, chosen == targets, best == chosen]
    return jnp.stack([column.astype(jnp.float32) for column in columns], axis=1)


def _logits(decoder: Any, hidden: Array, batch: AttentionBatch) -> Array:
    return decoder.logits(decoder(hidden, (), (batch,), (), None)[0])
