"""The training loop of a draft head: optimizer, moving average, checkpoints that a stopped run goes on from.

All that a run is follows from its options and its answers: batches are functions of (seed, step), the schedule one of
the step. So a run that was stopped and begun again ends with the same numbers as one that was not.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError, how_to_install
from jaxserve.lab.training.answers import Example
from jaxserve.lab.training.batches import Rows, batches, fitting
from jaxserve.lab.training.losses import LossOptions, draft_loss, make_guesses, starts_of
from jaxserve.models.drafts.loading import IDS_PATH
from jaxserve.models.loading import LoadedModel
from jaxserve.models.sharding import MESH_AXES
from jaxserve.models.trainable import whole_graphdef

if TYPE_CHECKING:
    import optax

_STARTS_SHARE = 0.4  # of the tokens of a batch, at most: drafts that a step learns from
_SAVE_EVERY_S = 120.0
LOG_NAME = "log.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The recipe.

    Attributes:
      steps: of the whole schedule.
      num_rows, row_len: tokens of a batch are their product.
      peak_rate, last_rate: of AdamW, on a cosine behind `warmup` steps.
      clip: largest norm of a gradient.
      decay: of weights.
      average: of the moving average of weights, which is what is kept.
      seed: of batches and of dropped features.
    """

    steps: int
    num_rows: int = 4
    row_len: int = 1024
    peak_rate: float = 1e-3
    last_rate: float = 1e-5
    warmup: int = 100
    clip: float = 0.5
    decay: float = 0.01
    average: float = 0.999
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError."""
        if self.steps < 1 or self.num_rows < 1 or self.row_len < 16:
            raise ConfigError(
                f"steps {self.steps}, rows {self.num_rows} and a row length of {self.row_len} tokens are asked for, "
                "but at least 1, 1 and 16 are needed"
            )


class Trainer:
    """One run in the directory `work`: mutated by `train`, which may be called again."""

    def __init__(
        self,
        *,
        model: LoadedModel,
        graphdef: nnx.GraphDef,
        state: nnx.State,
        examples: Sequence[Example],
        options: TrainOptions,
        loss: LossOptions,
        work: Path,
    ) -> None:
        """`graphdef` and `state` are the head's, as `new_head` makes it; `examples` are those to learn from.

        Raises ConfigError for options that cannot be, a missing library, and a directory with a run of another recipe.
        """
        options.check()
        self.options, self.loss, self._work = options, loss, work
        self._model, self._target = model, whole_graphdef(model)
        self._graphdef = graphdef
        self._examples = fitting(examples, options.row_len)
        self._optimizer = make_optimizer(options)
        whole = NamedSharding(model.mesh, PartitionSpec())
        state = jax.device_put(state, whole)
        # A path that is no weight is not trained: the ids of a draft vocabulary.
        trained = {path: leaf for path, leaf in flat(state).items() if path != IDS_PATH}
        self._fixed = {path: leaf for path, leaf in flat(state).items() if path == IDS_PATH}
        self._like = state
        self.step = 0
        self._tree = {
            "params": trained,
            "average": jax.tree.map(jnp.copy, trained),
            "optimizer": self._optimizer.init(trained),
        }
        work.mkdir(parents=True, exist_ok=True)
        self._checkpoints = _Checkpoints(work / "checkpoints")
        self._recipe = json.loads(json.dumps([dataclasses.asdict(options), dataclasses.asdict(loss), self._sizes()]))
        found = self._checkpoints.load(self._tree)
        if found is not None:
            tree, notes = found
            if notes["recipe"] != self._recipe:
                raise ConfigError(
                    f"{work} has a run of another recipe ({_first_difference(notes['recipe'], self._recipe)}); give "
                    "another directory, or the options of that run to go on with it"
                )
            self._tree, self.step = tree, int(notes["step"])

    def _sizes(self) -> list[Any]:
        return sorted([".".join(map(str, path)), list(leaf.shape)] for path, leaf in self._tree["params"].items())

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the head."""
        return self._graphdef

    @property
    def averaged(self) -> nnx.State:
        """The head as it would be kept now."""
        return self._state(self._tree["average"])

    def _state(self, params: dict[str, Any]) -> nnx.State:
        return with_flat(self._like, params | self._fixed)

    def train(self, *, stop_after_s: float | None = None, tell: Callable[[dict[str, float]], None]) -> bool:
        """Up to the last step, or for that many seconds. True when all are done. `tell` hears every 20 steps."""
        options, begin_s, saved_s = self.options, time.monotonic(), time.monotonic()
        rows_sharded = self._row_sharding()
        update = jax.jit(
            functools.partial(_update, self._graphdef, self._target, self._optimizer, self.loss, self._state, options),
            donate_argnums=(0,),
        )
        recent: list[dict[str, Any]] = []
        last_s = time.monotonic()
        for rows in batches(self._examples, options.num_rows, options.row_len, options.seed, self.step):
            if self.step >= options.steps:
                break
            if stop_after_s is not None and time.monotonic() - begin_s > stop_after_s:
                break
            starts = starts_of(rows, int(rows.row_len * _STARTS_SHARE))
            placed = jax.device_put((rows, starts), rows_sharded)
            self._tree, facts = update(self._tree, self._model.state, *placed, jnp.int32(self.step))
            recent.append(facts | {"tokens": int((rows.segments < rows.num_segments).sum())})
            self.step += 1
            if self.step % 20 == 0 or self.step == options.steps:
                now_s = time.monotonic()
                told = _summary(recent, self.step, now_s - last_s)
                recent, last_s = [], now_s
                with (self._work / LOG_NAME).open("a", encoding="utf-8") as log:
                    log.write(json.dumps(told) + "\n")
                tell(told)
            if time.monotonic() - saved_s > _SAVE_EVERY_S:
                self.save()
                saved_s = time.monotonic()
        self.save()
        return self.step >= options.steps

    def save(self) -> None:
        """Writes a checkpoint and waits for it."""
        self._checkpoints.save(self.step, self._tree, {"step": self.step, "recipe": self._recipe})

    def _row_sharding(self) -> NamedSharding:
        """Rows are dealt out over all devices where their number divides; else each device computes all of them."""
        count = self._model.mesh.devices.size
        divides = self.options.num_rows % count == 0
        return NamedSharding(self._model.mesh, PartitionSpec(MESH_AXES if divides and count > 1 else None))


def _update(
    graphdef: nnx.GraphDef,
    target: nnx.GraphDef,
    optimizer: "optax.GradientTransformation",
    loss: LossOptions,
    state_of: Callable[[dict[str, Any]], nnx.State],
    options: TrainOptions,
    tree: dict[str, Any],
    target_state: nnx.State,
    rows: Rows,
    starts: jax.Array,
    step: jax.Array,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    key = jax.random.fold_in(jax.random.key(options.seed), step)

    def of(params: dict[str, Any]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        head, decoder = nnx.merge(graphdef, state_of(params)), nnx.merge(target, target_state)
        return draft_loss(head, make_guesses(head, decoder, rows, starts, loss, key), loss)

    (value, (reached, taken)), grads = jax.value_and_grad(of, has_aux=True)(tree["params"])
    updates, state = optimizer.update(grads, tree["optimizer"], tree["params"])
    params = jax.tree.map(lambda p, u: p + u, tree["params"], updates)
    # The average of a young run leaves its first weights behind sooner.
    keep = jnp.minimum(options.average, (1.0 + step) / (10.0 + step))
    average = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, tree["average"], params)
    return {"params": params, "average": average, "optimizer": state}, {
        "loss": value,
        "reached": reached,
        "taken": taken,
    }


def make_optimizer(options: TrainOptions) -> "optax.GradientTransformation":
    """AdamW with a warm-up and a cosine. Raises ConfigError where optax is not installed."""
    try:
        import optax
    except ImportError as error:
        raise ConfigError(f"training needs optax, which is not installed; {how_to_install('train')}") from error

    def is_matrix(params: dict[str, Any]) -> dict[str, bool]:
        return {path: leaf.ndim > 1 for path, leaf in params.items()}

    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=options.peak_rate,
        warmup_steps=min(options.warmup, max(1, options.steps // 2)),
        decay_steps=max(2, options.steps),
        end_value=options.last_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=options.decay, mask=is_matrix),
    )


def flat(state: nnx.State) -> dict[Any, jax.Array]:
    """The arrays of a state by their paths, each of which is one."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        (found[path],) = jax.tree.leaves(variable)
    return {_name(path): leaf for path, leaf in found.items()}


def _name(path: tuple[Any, ...]) -> Any:
    return IDS_PATH if path == IDS_PATH else ".".join(map(str, path))


def with_flat(like: nnx.State, arrays: dict[Any, Any]) -> nnx.State:
    """A state with other arrays, by the names of `flat`."""
    return nnx.map_state(lambda path, param: jax.tree.unflatten(jax.tree.structure(param), [arrays[_name(path)]]), like)


def _summary(recent: Sequence[dict[str, Any]], step: int, seconds: float) -> dict[str, float]:
    reached, taken = (np.sum([np.asarray(facts[name]) for facts in recent], axis=0) for name in ("reached", "taken"))
    shares = taken / np.maximum(reached, 1e-6)
    return {
        "step": step,
        "loss": float(np.mean([float(facts["loss"]) for facts in recent])),
        "tokens_per_s": sum(facts["tokens"] for facts in recent) / seconds,
        "seconds": seconds,
        **{f"taken_{place + 1}": float(share) for place, share in enumerate(shares)},
    }


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next(_first_difference(a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(old, dict) and isinstance(new, dict):
        name = next((n for n in {**old, **new} if old.get(n) != new.get(n)), "")
        return f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
    return f"{old!r:.60} became {new!r:.60}"


class _Checkpoints:
    """Orbax checkpoints of a run; the newest two are kept."""

    def __init__(self, path: Path) -> None:
        import orbax.checkpoint as ocp  # takes a quarter of a second

        self._ocp = ocp
        self._manager = ocp.CheckpointManager(path.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def save(self, step: int, tree: Any, notes: dict[str, Any]) -> None:
        if self._manager.latest_step() == step:
            return
        args = self._ocp.args
        items = args.Composite(state=args.StandardSave(tree), notes=args.JsonSave(notes))
        self._manager.save(step, args=items, force=True)
        self._manager.wait_until_finished()

    def load(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest checkpoint, or None."""
        step = self._manager.latest_step()
        if step is None:
            return None
        args = self._ocp.args
        notes = self._manager.restore(step, args=args.Composite(notes=args.JsonRestore()))["notes"]
        shapes = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, like)
        try:
            found = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(shapes)))
        except ValueError:  # another head's shapes: the recipe says which
            return like, dict(notes)
        return found["state"], dict(notes)
