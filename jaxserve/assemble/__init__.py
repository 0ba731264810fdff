"""From a config to a running engine: tokenizer, weights, device, scheduler, loop, in this order.

The order puts quick failures first: a wrong tokenizer is found before gigabytes are read. Every part is built by its
own package and handed to the next.
"""

import contextlib
import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxserve import __version__
from jaxserve.assemble.answers import embedding_rules, find_reranker
from jaxserve.assemble.devices import find_devices
from jaxserve.assemble.draft_tokenizer import check_draft_tokenizer
from jaxserve.assemble.page_connector import ConnectorStore, PageConnectors, prepare_page_connectors
from jaxserve.assemble.page_store import PageStore, PageStores, prepare_page_stores
from jaxserve.assemble.step_log import open_step_log
from jaxserve.config import ResolvedConfig
from jaxserve.config.schema import Config
from jaxserve.engine import AnyEngine, EmbeddingRules, Engine, EngineGroup, ModelInfo, Reranker
from jaxserve.engine.interpreter import process_interpreter
from jaxserve.engine.lookup import LookupOptions
from jaxserve.engine.step_log import check_step_log
from jaxserve.errors import ConfigError
from jaxserve.hosts import checkpoint_digest
from jaxserve.kernels.selection import NONE
from jaxserve.kv.page_events import PageEvents, check_page_events, open_page_events
from jaxserve.models import (
    LoadedModel,
    PlannedModel,
    check_described,
    configured_checkpoint,
    decoder_config,
    plan_model,
    resolve_model_path,
)
from jaxserve.models.decoder_config import RopeScaling
from jaxserve.models.drafts.attaching import with_head
from jaxserve.models.loading import describe_rounding
from jaxserve.models.quantised import configured_quantisation, describe_quantisation
from jaxserve.progress import Progress, Quiet
from jaxserve.routing import Router, RouterOptions, create_router
from jaxserve.runtime.build import BuildHooks, Built, build_runners
from jaxserve.runtime.canonical_pages import SlotForm
from jaxserve.runtime.compile_events import CompileCounter
from jaxserve.runtime.drafting import DRAFTERS
from jaxserve.runtime.heads import find_head
from jaxserve.runtime.host_slots import SlotBytes
from jaxserve.runtime.memory import longest_sequence
from jaxserve.runtime.mesh import layer_ranges, make_meshes
from jaxserve.sched import (
    SCHEDULERS,
    ContinuousScheduler,
    LaterBuckets,
    Limits,
    Policy,
    Runner,
    Scheduler,
    SchedulerOptions,
    SpeculationOptions,
    create_lengths,
    create_scheduler,
    find_scheduler,
)
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy
from jaxserve.text import CachingTokenizer, Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# A replacement of `sched.policy` from a notebook: a name, a policy, a scheduler, or a class of either.
SchedulerChoice = str | type[Policy] | Policy | Callable[[Limits, SchedulerOptions], Scheduler] | Scheduler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A model that is ready to run plans.

    Attributes:
      vocab_size: V of the model; the tokenizer may know fewer ids.
      eos_token_ids: as the checkpoint says.
      sampling_defaults: options of `SamplingParams` that the checkpoint recommends.
      private_prompts_above, max_position: see `ModelInfo`.
      seconds: times of its construction: `plan` for the checkpoint's header and all shapes, then `weights` and
        `executables` at once.
      later: step shapes that the runner does not have yet; None: it has all.
      facts: settings that must be the same in all processes that run the model together, as texts.
      namespace: of the keys of pages (see `content`); equal where pages could be exchanged.
      slots: host memory for pages; None where there is none.
      page_layout: how the bytes of a slot are arranged.
      slot_form: the same as a value, where it is known.
    """

    runner: Runner
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, object]
    private_prompts_above: int | None = None
    max_position: int | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    later: LaterBuckets | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    namespace: str = ""
    slots: SlotBytes | None = None
    page_layout: str = ""
    slot_form: SlotForm | None = None

    @property
    def all_limits(self) -> Limits:
        """The runner's limits once every bucket is there."""
        return self.runner.limits if self.later is None else self.later.all_limits


# Builds the devices of all replicas, and reports its phases.
MakeDevices = Callable[[Config, Progress], Sequence[Device]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """An engine, and the values that front doors need beside it.

    `seconds`: times of the start, by name; of several replicas, those of the first. `later`: the step shapes that are
    built in the background.
    """

    engine: AnyEngine
    sampling_defaults: Mapping[str, object]
    config: Config
    seconds: Mapping[str, float]
    later: Sequence[LaterBuckets]


def assemble(
    resolved: ResolvedConfig,
    *,
    scheduler: SchedulerChoice | None = None,
    progress: Progress = Quiet(),  # noqa: B008 (stateless)
    make_devices: MakeDevices | None = None,
) -> Assembly:
    """Builds everything; takes as long as loading and compiling take. The engine has no thread yet.

    `scheduler` replaces `sched.policy`; an object cannot where `parallel.data` is more than 1, since each replica has
    its own. `make_devices` replaces `build_devices`. Raises ConfigError, CheckpointError or CapacityError.
    """
    begin_s = time.perf_counter()
    config = resolved.config
    choice = config.sched.policy if scheduler is None else scheduler
    num_replicas = config.parallel.data
    find_scheduler(choice)
    create_lengths(config.sched.lengths)
    create_tier_policy(config.cache.host_policy, TierOptions(admission=config.cache.host_admission))
    page_stores = prepare_page_stores(config) if config.store.connector is None else prepare_page_connectors(config)
    check_page_events(config)
    if config.events.port is not None:
        _check_tells_of_pages(choice)
    if num_replicas > 1:
        _check_not_shared(choice, num_replicas)
    if config.runtime.step_log is not None:
        check_step_log(config.runtime.step_log)
    router = build_router(config)
    check_described(configured_checkpoint(config.model), random_weights=config.model.random_weights)
    progress.begin("reading the tokenizer")
    tokenizer = build_tokenizer(config)
    check_draft_tokenizer(config, tokenizer)
    embedding, reranker = embedding_rules(config.model), find_reranker(config, tokenizer)
    tokenized_s = time.perf_counter()
    devices = (build_devices if make_devices is None else make_devices)(config, progress)
    model = describe_model(config, devices, tokenizer, embedding, reranker)
    interpreter = process_interpreter()
    with contextlib.ExitStack() as opened:
        if page_stores is not None:
            opened.callback(page_stores.close)
        stores = [None if page_stores is None else _open_store(page_stores, device) for device in devices]
        events: list[PageEvents | None] = [*open_page_events(config)] or [None] * num_replicas
        for sender in events:
            if sender is not None:
                opened.callback(sender.close)
        replicas = [
            Engine(
                runner=device.runner,
                scheduler=_watched(
                    create_scheduler(
                        choice,
                        device.runner.limits,
                        options=dataclasses.replace(scheduler_options(config), namespace=device.namespace),
                        store=stores[number],
                    ),
                    events[number],
                    device.runner.limits,
                ),
                tokenizer=tokenizer,
                model=model,
                max_waiting=config.sched.max_waiting,
                max_waiting_tokens=config.sched.max_waiting_tokens,
                seed=config.model.seed,
                later=device.later,
                step_log=open_step_log(
                    config,
                    limits=device.all_limits,
                    model=model.name,
                    policy=choice,
                    vocab_size=device.vocab_size,
                    replica=number,
                    device_facts=device.facts,
                ),
                interpreter=interpreter,
                lookup=LookupOptions(
                    min_len=config.speculation.ngram_min,
                    max_len=config.speculation.ngram_max,
                    window=config.speculation.window,
                ),
                on_close=_closing(stores[number], events[number]),
            )
            for number, device in enumerate(devices)
        ]
        for replica, store in zip(replicas, stores, strict=True):
            if store is not None:
                store.wake = replica.wake
        later = [device.later for device in devices if device.later is not None]
        for buckets in later:
            buckets.start()
        compiles = CompileCounter()
        for stats in (stats for replica in replicas for stats in replica.stats):
            stats.watch_compiles(lambda: compiles.count)
        engine = replicas[0] if num_replicas == 1 else EngineGroup(replicas, router, retries=config.route.retries)
        opened.pop_all()  # the engine closes its stores and events
    seconds = {"tokenizer": tokenized_s - begin_s, **devices[0].seconds, "assemble": time.perf_counter() - begin_s}
    return Assembly(
        engine=engine,
        sampling_defaults=devices[0].sampling_defaults,
        config=config,
        seconds=seconds,
        later=later,
    )


def _check_tells_of_pages(choice: SchedulerChoice) -> None:
    """Raises ConfigError for a scheduler that `events:` cannot watch."""
    found = find_scheduler(choice)
    if not (isinstance(found, Policy | ContinuousScheduler) or (isinstance(found, type) and issubclass(found, Policy))):
        raise ConfigError(
            f"events.port is set, but the scheduler {choice!r:.120} is none of jaxserve's, and tells of no pages; "
            "leave events.port out, or give a policy"
        )


def _watched(scheduler: Scheduler, events: PageEvents | None, limits: Limits) -> Scheduler:
    """The scheduler, which tells `events` of its pages from now on."""
    if events is not None:
        assert isinstance(scheduler, ContinuousScheduler), "`_check_tells_of_pages` has seen it"
        scheduler.watch_pages(events)
        events.start(limits.page_size, limits.page_groups)
    return scheduler


def _closing(store: PageStore | ConnectorStore | None, events: PageEvents | None) -> Callable[[], None] | None:
    parts = [part for part in (events, store) if part is not None]

    def close() -> None:
        for part in parts:
            part.close()

    return close if parts else None


def _open_store(stores: PageStores | PageConnectors, device: Device) -> PageStore | ConnectorStore:
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    layout = f"jaxserve {__version__}, {versions}, {device.page_layout}"
    if isinstance(stores, PageConnectors):
        return stores.open(device.slots, layout, device.namespace, device.runner.limits.page_size)
    return stores.open(device.slots, layout, device.namespace, device.slot_form)


def scheduler_options(config: Config) -> SchedulerOptions:
    """The settings of `sched:` and `cache:` for the scheduler. Raises ConfigError."""
    sched = config.sched
    return SchedulerOptions(
        chunked_prefill=sched.chunked_prefill,
        prefix_caching=config.cache.prefix_caching,
        sparse=config.attention.select != NONE,
        host_policy=config.cache.host_policy,
        host_tier=TierOptions(admission=config.cache.host_admission),
        store_wait_s=config.store.wait_s,
        watermark=sched.watermark,
        growth=sched.growth,
        lengths=sched.lengths,
        ageing_s=sched.ageing_s,
        input_weight=sched.input_weight,
        output_weight=sched.output_weight,
        ttft_target_s=sched.ttft_target_s,
        tpot_target_s=sched.tpot_target_s,
        speculation=SpeculationOptions(
            width=config.speculation.width,
            rounds=config.speculation.rounds,
            adaptive=config.speculation.adaptive,
            device_drafts=config.speculation.method not in ("none", "grammar"),
        ),
    )


def build_router(config: Config) -> Router:
    """The policy of `route:`. Raises ConfigError."""
    return create_router(config.route.policy, router_options(config))


def router_options(config: Config) -> RouterOptions:
    """The settings of `route:` for the policy. Raises ConfigError."""
    route = config.route
    return RouterOptions(slack=route.slack, table_blocks=route.table_blocks, seed=route.seed)


def describe_model(
    config: Config,
    replicas: Sequence[Device],
    tokenizer: Tokenizer | None,
    embedding: EmbeddingRules,
    reranker: Reranker | None,
) -> ModelInfo:
    """The model as front doors see it: the limits that hold on every replica."""
    first = replicas[0]
    eos = set(first.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    limits = [device.runner.limits for device in replicas]
    return ModelInfo(
        name=config.model.name or resolve_model_path(config.model.path).name,
        vocab_size=first.vocab_size,
        max_model_len=min(one.max_model_len for one in limits),
        eos_token_ids=tuple(sorted(eos)),
        max_pool_tokens=min(longest_sequence(one) for one in limits),
        private_prompts_above=first.private_prompts_above,
        max_position=first.max_position,
        embedding=embedding,
        reranker=reranker,
        drafter=config.speculation.method,
    )


def _check_not_shared(choice: SchedulerChoice, num_replicas: int) -> None:
    """A scheduler keeps the pages of one device, and a policy the counts of one queue: replicas cannot share them."""
    found = SCHEDULERS.get(choice)
    if isinstance(found, type):
        return
    if isinstance(found, Policy) or callable(getattr(found, "schedule", None)):
        raise ConfigError(
            f"the scheduler is an object, a {type(found).__name__}, but parallel.data asks for {num_replicas} replicas "
            "that each need their own; give its class, a function that makes one, or a name"
        )


def build_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer, None with `model.skip_tokenizer`. Raises CheckpointError."""
    if config.model.skip_tokenizer:
        return None
    tokenizer = load_tokenizer(resolve_model_path(config.model.tokenizer or config.model.path))
    cache_bytes = config.model.encode_cache_bytes
    return CachingTokenizer(tokenizer, cache_bytes) if cache_bytes else tokenizer


def build_devices(
    config: Config,
    progress: Progress,
    *,
    hooks: BuildHooks = BuildHooks(),  # noqa: B008 (frozen)
) -> list[Device]:
    """Loads the weights and compiles the step, for the devices of each replica."""
    begin_s = time.perf_counter()
    progress.begin("looking for devices and at the checkpoint")
    first, *others = make_meshes(config.parallel, find_devices(config))
    planned = _plan_stages(config, first)
    planned_s = time.perf_counter()
    replicas = build_runners(config, planned, others=others, progress=progress, say=logger.info, hooks=hooks)
    stages = replicas[0].models
    num_params, num_bytes = (sum(getattr(stage, name) for stage in stages) for name in ("num_params", "num_bytes"))
    size = f"{num_params:,} parameters, {num_bytes / 2**30:.3f} GiB"
    logger.info("%s: %s, %s", config.model.path, size, stages[0].dtype)
    if rounding := describe_rounding(config.model.dtype, stages[0].dtype, stages[0].checkpoint):
        logger.warning("%s: %s", config.model.path, rounding)
    if (scales := stages[0].cache_scales) is not None:
        level = logging.WARNING if scales.is_one else logging.INFO
        logger.log(level, "%s: %s", config.model.path, scales.describe(config.cache.dtype))
    kept = {path: found for stage in stages for path, found in stage.kept.items()}
    for line in describe_quantisation(stages[0].checkpoint, stages[0].dtype, kept):
        logger.info("%s: %s", config.model.path, line)
    for line in replicas[0].compile_report:
        logger.info(line)
    return [_describe_device(config, built, planned_s - begin_s) for built in replicas]


def _describe_device(config: Config, built: Built, plan_s: float) -> Device:
    stages = built.models
    loaded = stages[0]
    stretched = [r.original_max_position for r in loaded.config.ropes if r.scaling is RopeScaling.DYNAMIC]
    return Device(
        runner=built.runner,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.checkpoint.eos_token_ids,
        sampling_defaults=loaded.checkpoint.default_sampling,
        private_prompts_above=min(stretched, default=None),
        max_position=loaded.config.max_position,
        seconds={"plan": plan_s, **built.seconds},
        later=built.later,
        facts={
            "device": jax.devices()[0].device_kind,
            "model": repr(loaded.config),
            "weights": _describe_weights(stages),
            "cache scales": "none" if loaded.cache_scales is None else loaded.cache_scales.digest,
        },
        namespace=_namespace(config, loaded),
        slots=built.runner.slots,
        page_layout=built.page_layout,
        slot_form=built.slot_form,
    )


def _namespace(config: Config, loaded: LoadedModel) -> str:
    """See `Device.namespace`."""
    model = config.model
    checkpoint = checkpoint_digest(resolve_model_path(model.path), model.random_weights)
    weights = f"random weights of seed {model.seed}" if model.random_weights else "its weights"
    read = f"read by {model.family}, with {sorted(model.overrides.items())}"
    codes = f"quantised {model.quantization}, {list(model.quantization_rules.items())}"
    pages = config.cache.dtype + ("" if loaded.cache_scales is None else f" with scales {loaded.cache_scales.digest}")
    drafts = config.speculation
    if drafts.method not in DRAFTERS.names():  # a head or model, whose keys and values are part of a page
        pages += f" beside those of {drafts.method} {drafts.model}"
    if config.attention.select != NONE:  # keys and values of generated tokens follow from what these attended to
        pages += f", generated with {config.attention.select} of {config.attention.pages} pages"
    return f"checkpoint of {checkpoint} {read}, {weights} in {loaded.dtype}, {codes}, pages in {pages}"


def _describe_weights(stages: Sequence[LoadedModel]) -> str:
    """A digest of shapes, types and shardings, in a few characters."""
    leaves = [leaf for stage in stages for leaf in jax.tree.leaves(stage.state)]
    texts = [f"{leaf.shape} {leaf.dtype} {leaf.sharding.spec}" for leaf in leaves]
    return f"{len(leaves)} arrays, checksum {zlib.crc32(' '.join(texts).encode()):08x}"


def _plan_stages(config: Config, meshes: Sequence[Mesh]) -> list[PlannedModel]:
    """The stages of one replica's pipeline, each for its own devices."""
    checkpoint = configured_checkpoint(config.model)
    ranges: list[range | None] = [None]
    if len(meshes) > 1:
        ranges = [*layer_ranges(decoder_config(checkpoint)[1].num_layers, len(meshes))]
    planned = [
        plan_model(
            checkpoint,
            dtype=config.model.dtype,
            mesh=mesh,
            layers=layers,
            random_weights=config.model.random_weights,
            seed=config.model.seed,
            quantisation=configured_quantisation(config.model),
            cache_dtype=config.cache.dtype,
            cache_scales=None if config.cache.scales is None else Path(config.cache.scales),
        )
        for mesh, layers in zip(meshes, ranges, strict=True)
    ]
    head = find_head(config, planned[0].shapes.config) if len(planned) == 1 else None
    return planned if head is None else [with_head(planned[0], head.path, head.config)]
