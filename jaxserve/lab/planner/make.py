"""One plan, from a config and the name of a topology: read config.json, place, size, compile, predict."""

import dataclasses
import time
from collections.abc import Callable

import jax.numpy as jnp

from jaxserve.chips import Topology, parse_topology
from jaxserve.config.schema import Config
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.lab.compiled.ahead import AbsentModel, place_ahead
from jaxserve.lab.planner.fit import Fit, fit_memory, memory_use, smallest_fitting, with_settings
from jaxserve.lab.planner.predict import Roofline
from jaxserve.lab.planner.report import Plan, Prediction, StepFacts
from jaxserve.lab.planner.steps import choose_buckets, compile_steps
from jaxserve.lab.roofline import Assumptions, Work
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.loading import choose_dtype, decoder_config, describe_rounding

_CONTEXT = 2048  # tokens a row, where no length of sequences is given


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of a plan beside the config.

    Attributes:
      tensor: replaces parallel.tensor; 'auto' takes all devices of the topology.
      buckets: names of the steps to compile ('decode 64x64'); ('all',) for all; empty: the largest of either kind.
      context: tokens a row in the predictions; None: 2048, or model.max_len where that is less.
      compile: False sizes by arithmetic alone, in seconds, and needs no compiler for the topology.
      exact: compile every layer; False: few of them, and extend. None: every layer on TPUs and CPUs, few on GPUs.
    """

    tensor: int | str | None = None
    buckets: tuple[str, ...] = ()
    context: int | None = None
    compile: bool = True
    exact: bool | None = None
    assumptions: Assumptions = dataclasses.field(default_factory=Assumptions)


def make_plan(
    config: Config,
    topology_name: str,
    options: PlanOptions = PlanOptions(),
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plans `config` for a topology such as 'v5e:2x4'. Needs the config.json under `model.path` and no weights.

    `say` gets a line before anything that takes long. A model that is too large is a plan with `fits` false.

    Raises ConfigError for topologies and settings that cannot be, CheckpointError for an unreadable config.json.
    """
    start = time.perf_counter()
    topology = parse_topology(topology_name)
    config = _settle(config, topology, options)
    checkpoint = read_checkpoint(config.model.path)
    model = decoder_config(checkpoint)[1]
    chosen = choose_dtype(config.model.dtype, topology.chip.backend, checkpoint)
    if rounding := describe_rounding(config.model.dtype, chosen, checkpoint):
        say(rounding)
    dtype = chosen.name
    absent = place_ahead(config, model, topology=topology.name, dtype=dtype, to_compile=options.compile)
    fit = fit_memory(absent, topology)
    problem, suggestion, steps = fit.problem, None, ()
    if problem is None and options.compile:
        steps, problem = _compile(absent, model, topology, fit, options, say)
    if problem is not None:
        whole = fit.needs.weight_bytes * config.parallel.tensor
        suggestion = smallest_fitting(config, model, dtype, topology, whole)
    temporaries = max((step.temporary_bytes for step in steps), default=None)
    memory = memory_use(fit, temporaries)
    context = min(options.context or _CONTEXT, absent.sizes.max_model_len)
    predictions = (
        () if problem is not None else _predict(absent, topology, dtype, steps, options, context, memory.kv_tokens)
    )
    return Plan(
        topology=topology.name,
        chip=topology.chip.kind,
        num_devices=topology.num_devices,
        devices_used=config.parallel.tensor * config.parallel.data,
        tensor=config.parallel.tensor,
        data=config.parallel.data,
        model=config.model.name or checkpoint.path.name,
        dtype=dtype,
        fits=problem is None,
        problem=problem,
        suggestion=suggestion,
        memory=memory,
        steps=steps,
        predictions=predictions,
        assumptions=options.assumptions.sentences(topology, context, dtype, config.parallel.tensor)
        if predictions
        else (),
        notes=tuple(_notes(config, topology, absent, model, fit, steps)),
        seconds=time.perf_counter() - start,
    )


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
    say: Callable[[str], None],
) -> tuple[tuple[StepFacts, ...], str | None]:
    """The facts of the compiled steps, and the reason if they do not fit, by the rule of a starting server."""
    assert fit.plan is not None
    exact = topology.chip.backend != "gpu" if options.exact is None else options.exact
    try:
        steps = compile_steps(
            absent,
            model,
            topology.name,
            buckets=choose_buckets(absent, options.buckets),
            num_pages=fit.plan.num_pages,
            exact=exact,
            say=say,
        )
    except CapacityError as error:
        return (), str(error)
    try:
        fit.plan.check_temporaries(max(step.temporary_bytes for step in steps))
    except CapacityError as error:
        return steps, str(error)
    return steps, None


def _predict(
    absent: AbsentModel,
    topology: Topology,
    dtype: str,
    steps: tuple[StepFacts, ...],
    options: PlanOptions,
    context: int,
    kv_tokens: int,
) -> tuple[Prediction, ...]:
    sizes = absent.sizes
    work = Work(
        model=absent.stages[0].partition.local,
        weight_size=jnp.dtype(dtype).itemsize,
        cache_size=jnp.dtype(sizes.cache_dtype).itemsize,
    )
    roofline = Roofline(
        topology=topology,
        work=work,
        steps=steps,
        assumed=options.assumptions,
        dtype=dtype,
        kv_tokens=kv_tokens,
        replicas=absent.config.parallel.data,
    )
    # Without a compiled step the bytes between devices are unknown.
    if not steps and absent.config.parallel.tensor > 1:
        return ()
    rows = [b.rows for b in sizes.buckets if b.decode_only]
    largest = max(b.tokens for b in sizes.buckets if not b.decode_only)
    return (
        *(roofline.decode(number, context) for number in rows),
        roofline.prefill(min(largest, sizes.max_model_len)),
    )


def _notes(
    config: Config,
    topology: Topology,
    absent: AbsentModel,
    model: DecoderConfig,
    fit: Fit,
    steps: tuple[StepFacts, ...],
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
    if fit.plan is not None and fit.plan.num_pages * fit.plan.page_size + 1 < fit.plan.max_model_len:
        notes.append(
            f"the pages hold {fit.plan.num_pages * fit.plan.page_size} tokens, so no sequence reaches model.max_len "
            f"{fit.plan.max_model_len}"
        )
    if steps and len(steps[0].compiled_layers) > 1:
        layers = " and ".join(map(str, steps[0].compiled_layers))
        notes.append(
            f"compiled with {layers} layers, extended to {model.num_layers}; bytes of weights and pages are exact "
            "(--exact compiles all)"
        )
    if steps and not any(step.kernels for step in steps):
        notes.append("no Pallas kernel is inside: attention runs as XLA made it")
    return notes
