"""One plan, from a config and the name of a topology: read config.json, place, size, compile, predict."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.assemble.pictures import plan_pictures
from jaxserve.config.schema import Config
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.kernels.packed_blocks import PackedBlocks
from jaxserve.kernels.packed_codes import PackedCodes
from jaxserve.kernels.storage import array_bytes
from jaxserve.lab.compiled.ahead import AbsentModel, place_ahead
from jaxserve.lab.ledger import counting_process
from jaxserve.lab.planner.count import StepCounter
from jaxserve.lab.planner.fit import Fit, fit_memory, memory_use, smallest_fitting, with_settings
from jaxserve.lab.planner.predict import Roofline
from jaxserve.lab.planner.report import PictureUse, Plan, Prediction, StepFacts, TowerUse
from jaxserve.lab.planner.steps import choose_buckets, compile_steps
from jaxserve.lab.roofline import Assumptions, Work
from jaxserve.lab.tower_work import TowerWork
from jaxserve.models.checkpoint import configured_checkpoint
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.loading import choose_dtype, decoder_config, describe_rounding, plan_kept
from jaxserve.models.partition import Partition
from jaxserve.models.quantised import Kept, configured_quantisation, describe_quantisation
from jaxserve.models.sharding import WeightParameter
from jaxserve.models.weights import Path
from jaxserve.progress import Progress, Quiet
from jaxserve.runtime.memory import MemoryPlan, longest_sequence
from jaxserve.sched.plan import Limits
from jaxserve.values.chips import Topology, parse_topology

_CONTEXT = 2048  # tokens a row, where no length of sequences is given


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of a plan beside the config.

    Attributes:
      tensor: replaces parallel.tensor; 'auto' takes all devices of the topology.
      buckets: names of the steps to compile ('decode 64x64'); ('all',) for all; empty: the largest of each kind.
      context: tokens a row in the predictions; None: 2048, or model.max_len where that is less.
      compile: False sizes by arithmetic alone, in seconds, and needs no compiler for the topology.
      exact: compile every layer; False: few of them, and extend. None: every layer on TPUs and CPUs, few on GPUs.
      count: guess the times of compiled steps by the schedules of their kernels, where the compiler prints them.
    """

    tensor: int | str | None = None
    buckets: tuple[str, ...] = ()
    context: int | None = None
    compile: bool = True
    exact: bool | None = None
    count: bool = True
    assumptions: Assumptions = dataclasses.field(default_factory=Assumptions)


def make_plan(
    config: Config,
    topology_name: str,
    options: PlanOptions = PlanOptions(),
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = Quiet(),  # noqa: B008 (immutable)
) -> Plan:
    """Plans `config` for a topology such as 'v5e:2x4'. Needs the config.json under `model.path` and no weights.

    `say` gets what there is to note about the checkpoint, `progress` what takes long. A model that is too large is a
    plan with `fits` false.

    Raises ConfigError for topologies and settings that cannot be, CheckpointError for an unreadable config.json.
    """
    start = time.perf_counter()
    topology = parse_topology(topology_name)
    config = _settle(config, topology, options)
    checkpoint = configured_checkpoint(config.model)
    family, model = decoder_config(checkpoint)
    chosen = choose_dtype(config.model.dtype, topology.chip.backend, checkpoint)
    if rounding := describe_rounding(config.model.dtype, chosen, checkpoint):
        say(rounding)
    dtype, wanted = chosen.name, configured_quantisation(config.model)

    def keep(partition: Partition, backend: str) -> Mapping[Path, Kept]:
        return plan_kept(checkpoint, family, partition, wanted, backend)

    plan_tower = functools.partial(plan_pictures, config)
    absent = place_ahead(
        config,
        model,
        topology=topology.name,
        dtype=dtype,
        to_compile=options.compile,
        keep=keep,
        plan_tower=plan_tower,
    )
    for line in describe_quantisation(checkpoint, chosen, absent.kept):
        say(line)
    fit = fit_memory(absent, topology)
    context = min(options.context or _CONTEXT, absent.sizes.max_model_len)
    work = step_work(absent)
    problem, suggestion, steps, uncounted = fit.problem, None, (), None
    if problem is None and options.compile:
        steps, problem, uncounted = _compile(absent, model, topology, fit, options, context, work, progress)
    if problem is not None:
        of_tower = 0 if absent.tower is None else absent.tower.planned.num_bytes  # whole on each device
        whole = (fit.needs.weight_bytes - of_tower) * config.parallel.tensor
        suggestion = smallest_fitting(config, model, dtype, topology, whole, keep, plan_tower)
    tower = _tower_use(absent, topology, dtype, options)
    temporaries = max((step.temporary_bytes for step in steps), default=None)
    if tower is not None and temporaries is not None:
        temporaries = max(temporaries, tower.pictures[-1].temporary_bytes)
    memory = memory_use(fit, temporaries)
    predictions = ()
    if problem is None:
        assert fit.plan is not None
        predictions = _predict(absent, topology, dtype, steps, options, context, work, fit.plan.limits)
    return Plan(
        topology=topology.name,
        chip=topology.chip.kind,
        num_devices=topology.num_devices,
        devices_used=config.parallel.tensor * config.parallel.data,
        tensor=config.parallel.tensor,
        data=config.parallel.data,
        model=config.model.name or checkpoint.path.name,
        dtype=dtype,
        weights=" and ".join(
            sorted({f.storage.code for found in absent.kept.values() for f in found.each if f.storage} | {dtype})
        ),
        fits=problem is None,
        problem=problem,
        suggestion=suggestion,
        memory=memory,
        steps=steps,
        predictions=predictions,
        assumptions=options.assumptions.sentences(topology, context, dtype, config.parallel.tensor)
        if predictions
        else (),
        notes=tuple(_notes(config, topology, absent, model, fit, steps, uncounted, predictions)),
        seconds=time.perf_counter() - start,
        tower=tower,
    )


def _tower_use(absent: AbsentModel, topology: Topology, dtype: str, options: PlanOptions) -> TowerUse | None:
    """What pictures take; the tower itself is not compiled here."""
    tower, sizes = absent.tower, absent.sizes.pictures
    if tower is None or sizes is None:
        return None
    work = TowerWork.of(tower.planned)
    pictures = [
        PictureUse(
            patches=patches,
            tokens=tower.num_lines(patches),
            temporary_bytes=tower.temporary_bytes(patches, 4),
            seconds=work.seconds(patches, topology, options.assumptions, dtype),
        )
        for patches in tower.buckets
    ]
    stage = absent.stages[0]
    return TowerUse(
        weight_bytes=tower.planned.num_bytes,
        pool_bytes=sizes.pool_lines * stage.partition.model.hidden_size * stage.dtype.itemsize,
        pool_tokens=sizes.pool.num_pages * sizes.pool.page_size,
        pictures=tuple(pictures),
    )


def step_work(absent: AbsentModel) -> Work:
    """The work of a step, with the bytes that each part of the weights has."""
    stage = absent.stages[0]
    weights = {path: v for path, v in nnx.to_flat_state(stage.state) if isinstance(v, WeightParameter)}
    experts = [path for path, variable in weights.items() if "experts" in variable.get_metadata()["logical_axes"]]
    head = ("lm_head",) if ("lm_head",) in weights else ("embedding",)
    return Work(
        model=stage.partition.local,
        weight_size=_number_bytes([v for path, v in weights.items() if path[0] == "layers" and path not in experts]),
        expert_size=_number_bytes([weights[path] for path in experts]) if experts else None,
        head_size=_number_bytes([weights[head]]) if head in weights else None,  # a stage in the middle has none
        activation_size=stage.dtype.itemsize,
        cache_size=jnp.dtype(absent.sizes.cache_dtype).itemsize,
    )


def _number_bytes(weights: Sequence[nnx.Variable]) -> float:
    """Bytes of a number of these weights on average, with its share of scales and zeros."""
    stored = numbers = 0
    for variable in weights:
        # Panels may be a part of the weight: beside others, in an order, with offsets, or of experts.
        parts = jax.tree_util.tree_leaves_with_path(
            variable.get_raw_value(), is_leaf=lambda part: isinstance(part, PackedCodes | PackedBlocks)
        )
        for place, part in parts:
            if isinstance(part, PackedBlocks):
                stored += part.panels.size
                numbers += part.panels.shape[0] * part.width * math.prod(part.in_shape)
                continue
            per_byte = 2 if isinstance(part, PackedCodes) and part.code == "int4" else 1
            for path, leaf in jax.tree_util.tree_leaves_with_path(part):
                stored += array_bytes(leaf.size, leaf.dtype)
                names = {getattr(step, "name", "") for step in (*place, *path)}
                numbers += 0 if names & {"scales", "zeros", "offsets", "order"} else leaf.size * per_byte
    return stored / numbers


def _settle(config: Config, topology: Topology, options: PlanOptions) -> Config:
    """The config with the parallelism that is planned."""
    parallel = config.parallel
    if parallel.pipeline != 1:
        raise ConfigError(
            f"parallel.pipeline is {parallel.pipeline}, but plans are made for one stage; plan with "
            "--set parallel.pipeline=1, and a --tensor that takes the devices of all stages"
        )
    tensor = parallel.tensor if options.tensor is None else options.tensor
    if tensor == "auto":
        tensor = topology.num_devices // parallel.data
        if tensor == 0:
            raise ConfigError(
                f"parallel.data is {parallel.data}, but {topology.name} has {topology.num_devices} devices; lower it"
            )
    if not isinstance(tensor, int) or tensor < 1:
        raise ConfigError(f"--tensor is {tensor!r}, but must be 'auto' or a number of at least 1")
    needed = tensor * parallel.data
    if needed > topology.num_devices:
        raise ConfigError(
            f"parallel.tensor x parallel.data is {needed}, but {topology.name} has {topology.num_devices} devices; "
            "lower it, name a larger topology, or let --tensor auto choose"
        )
    return with_settings(config, "parallel", tensor=tensor)


def _compile(
    absent: AbsentModel,
    model: DecoderConfig,
    topology: Topology,
    fit: Fit,
    options: PlanOptions,
    context: int,
    work: Work,
    progress: Progress,
) -> tuple[tuple[StepFacts, ...], str | None, str | None]:
    """The facts of the compiled steps, the reason if they do not fit, by the rule of a starting server, and the reason
    if their times are not guessed.
    """
    assert fit.plan is not None
    exact = topology.chip.backend != "gpu" if options.exact is None else options.exact
    buckets = choose_buckets(absent, options.buckets)
    uncounted = _why_not_counted(absent, options)
    with contextlib.ExitStack() as stack:
        counter = None
        if uncounted is None:
            counter = StepCounter(
                absent,
                topology,
                buckets,
                num_pages=fit.plan.num_pages,
                context=context,
                work=work,
                assumed=options.assumptions,
                counting=stack.enter_context(counting_process()),
            )
        try:
            steps = compile_steps(
                absent,
                model,
                topology.name,
                buckets=buckets,
                num_pages=fit.plan.num_pages,
                exact=exact,
                counter=counter,
                progress=progress,
            )
        except CapacityError as error:
            return (), str(error), uncounted
        if counter is not None:
            uncounted = counter.failure
    largest = [step.temporary_bytes for step in steps]
    if (tower := absent.tower) is not None:
        largest.append(tower.temporary_bytes(tower.buckets[-1], 4))
    try:
        fit.plan.check_compiled(max(largest), 0)  # of the programs, a plan compiles a few
    except CapacityError as error:
        return steps, str(error), uncounted
    return steps, None, uncounted


def _why_not_counted(absent: AbsentModel, options: PlanOptions) -> str | None:
    """Why no time of a step is guessed by count; None where one is."""
    if not options.count:
        return "it was not asked for"
    if absent.device.backend != "tpu":
        return "only the compiler for TPUs tells the cycles of a program"
    if absent.attention.name != "mosaic_tpu":
        return f"attention runs as {absent.attention.name}, in loops of which the program does not tell the turns"
    return None


def _predict(
    absent: AbsentModel,
    topology: Topology,
    dtype: str,
    steps: tuple[StepFacts, ...],
    options: PlanOptions,
    context: int,
    work: Work,
    limits: Limits,
) -> tuple[Prediction, ...]:
    sizes = absent.sizes
    roofline = Roofline(
        topology=topology,
        work=work,
        steps=steps,
        assumed=options.assumptions,
        dtype=dtype,
        limits=limits,
        replicas=absent.config.parallel.data,
    )
    # Without a compiled step the bytes between devices are unknown; of devices of a CPU, how fast they would cross.
    if absent.config.parallel.tensor > 1 and not (steps and topology.chip.link_bandwidth):
        return ()
    decoding = dict.fromkeys((b.width, b.rows) for b in sizes.buckets if b.decode_only)
    largest = max(b.tokens for b in sizes.buckets if not b.decode_only)
    return (
        *(roofline.decode(rows, context, width) for width, rows in sorted(decoding)),
        roofline.prefill(min(largest, sizes.max_model_len)),
    )


def _notes(
    config: Config,
    topology: Topology,
    absent: AbsentModel,
    model: DecoderConfig,
    fit: Fit,
    steps: tuple[StepFacts, ...],
    uncounted: str | None,
    predictions: tuple[Prediction, ...],
) -> list[str]:
    notes = []
    used = config.parallel.tensor * config.parallel.data
    if used < topology.num_devices:
        notes.append(f"{used} of the {topology.num_devices} devices are used; --tensor auto takes all")
    partition = absent.stages[0].partition
    if partition.copies > 1:
        notes.append(
            f"{model.num_kv_heads} key/value heads lie on {config.parallel.tensor} devices, each {partition.copies} "
            "times: pages cost that much more in all"
        )
    if topology.chip.backend == "gpu":
        notes.append(
            f"JAX is to reserve {fit.total_bytes / topology.chip.memory_bytes:.0%} of this device's "
            f"{topology.chip.memory_bytes / 2**30:.1f} GiB (cache.memory_fraction), and that share is planned with; "
            "where XLA_PYTHON_CLIENT_MEM_FRACTION is set, a server goes by that"
        )
    if fit.plan is not None:
        longest, wanted = longest_sequence(fit.plan.limits), fit.plan.limits.max_model_len
        if longest < wanted:
            notes.append(f"the pages hold a sequence of {longest} tokens, so none reaches model.max_len {wanted}")
    prefill = next((one for one in predictions if not one.decode), None)
    if fit.plan is not None and prefill is not None:
        notes.append(_break_even(fit.plan, prefill, config.parallel.tensor))
    if steps and len(steps[0].compiled_layers) > 1:
        layers = " and ".join(map(str, steps[0].compiled_layers))
        notes.append(
            f"compiled with {layers} layers, extended to {model.num_layers}; bytes of weights and pages are exact "
            "(--exact compiles all)"
        )
    if steps and config.parallel.tensor > 1 and not topology.chip.link_bandwidth:
        notes.append(f"no time is predicted: nothing is known of the links between devices of {topology.name}")
    if steps and not any(step.kernels for step in steps):
        notes.append("no Pallas kernel is inside: attention runs as XLA made it")
    if steps and uncounted is not None:
        notes.append(f"there is no guess of a step's time by count: {uncounted}")
    return notes


def _break_even(memory: MemoryPlan, prefill: Prediction, tensor: int) -> str:
    """The speed of a link to host memory beyond which loading the pages of a prompt takes less than computing them."""
    limits = memory.limits
    num_bytes = limits.pages_of(prefill.tokens) * memory.page_bytes * tensor
    slots = limits.slots
    held = f"{slots.num_slots} pages fit there" if slots.num_slots else "cache.host_bytes is 0: nothing is kept there"
    return (
        f"loading the pages of a prompt of {prefill.tokens} tokens from host memory ({num_bytes / 2**20:.1f} MiB) "
        f"takes less time than computing them where all links of a replica together bring more than "
        f"{num_bytes / prefill.seconds / 1e9:.2f} GB/s; {held}"
    )
