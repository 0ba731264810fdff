"""From a config to a running engine: tokenizer, weights, device, scheduler, loop, in this order.

The order puts quick failures first: a wrong tokenizer is found before gigabytes are read. Every part is built by its
own package and handed to the next.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxserve import __version__
from jaxserve.assemble.answers import embedding_rules, find_reranker
from jaxserve.assemble.device import Device, WeightSource
from jaxserve.assemble.devices import find_devices
from jaxserve.assemble.draft_tokenizer import check_draft_tokenizer
from jaxserve.assemble.handoff import CanonicalSlots, check_handoff
from jaxserve.assemble.live_weights import LiveWeights
from jaxserve.assemble.page_connector import ConnectorStore, PageConnectors, prepare_page_connectors
from jaxserve.assemble.page_store import PageStore, PageStores, prepare_page_stores
from jaxserve.assemble.pictures import find_pictures, plan_pictures
from jaxserve.assemble.step_log import open_step_log
from jaxserve.config import ResolvedConfig, policy_of
from jaxserve.config.model_path import model_name, packaged_examples, resolve_model_path
from jaxserve.config.schema import Config
from jaxserve.engine import AnyEngine, EmbeddingRules, Engine, EngineGroup, ModelInfo, Reranker
from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.engine.degrading import DegradeOptions, Degrading
from jaxserve.engine.interpreter import collector_paused, process_interpreter
from jaxserve.engine.lookup import LookupOptions
from jaxserve.engine.observers import StepObserver
from jaxserve.engine.restarting import RestartOptions
from jaxserve.engine.step_deadlines import StepDeadlines
from jaxserve.engine.step_log import check_step_log
from jaxserve.errors import ConfigError
from jaxserve.files.gguf_file import parts_of
from jaxserve.hosts import JointStore, checkpoint_digest
from jaxserve.kernels.selection import NONE
from jaxserve.kv.page_events import PageEvents, check_page_events, open_page_events, open_page_events_of
from jaxserve.models import (
    LoadedModel,
    PlannedModel,
    check_described,
    configured_checkpoint,
    decoder_config,
    plan_model,
)
from jaxserve.models.adapters.placing import AdapterReader
from jaxserve.models.checkpoint import CheckpointKind
from jaxserve.models.decoder_config import RopeScaling
from jaxserve.models.drafts.attaching import with_head
from jaxserve.models.family import is_own_family
from jaxserve.models.loading import describe_rounding
from jaxserve.models.quantised import configured_quantisation, describe_quantisation
from jaxserve.progress import Progress, Quiet
from jaxserve.routing import Router, RouterOptions, create_router
from jaxserve.runtime.build import BuildHooks, Built, build_runners
from jaxserve.runtime.compile_events import CompileCounter
from jaxserve.runtime.drafting import DRAFTERS
from jaxserve.runtime.executables import AbstractStage
from jaxserve.runtime.heads import find_head
from jaxserve.runtime.memory import longest_sequence
from jaxserve.runtime.mesh import layer_ranges, make_meshes
from jaxserve.runtime.runner import Weights
from jaxserve.sched import (
    ContinuousScheduler,
    LaterBuckets,
    Limits,
    Policy,
    Scheduler,
    SchedulerOptions,
    SpeculationOptions,
    create_lengths,
    create_scheduler,
    find_scheduler,
)
from jaxserve.sched.ladder import LadderOptions, Rung
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy
from jaxserve.text import CachingTokenizer, Tokenizer, load_tokenizer
from jaxserve.vision import PictureProcessor

logger = logging.getLogger(__name__)

# A replacement of `sched.policy` from a notebook: a name, a policy, a scheduler, or a class of either.
SchedulerChoice = str | type[Policy] | Policy | Callable[[Limits, SchedulerOptions], Scheduler] | Scheduler


EngineStore = PageStore | ConnectorStore | JointStore

# Builds the devices of all replicas, and reports its phases.
MakeDevices = Callable[[Config, Progress], Sequence[Device]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """An engine, and the values that front doors need beside it.

    `seconds`: times of the start, by name; of several replicas, those of the first. `later`: the step shapes that are
    built in the background. `pages`: of an engine that exchanges them with others (`handoff:`).
    """

    engine: AnyEngine
    sampling_defaults: Mapping[str, object]
    config: Config
    seconds: Mapping[str, float]
    later: Sequence[LaterBuckets]
    weights: LiveWeights
    pages: CanonicalSlots | None = None

    @property
    def adapters(self) -> LoadedAdapters:
        """Raises ConfigError where the engine takes none."""
        loaded = self.engine.model.adapters
        if loaded is None:
            raise ConfigError("this engine takes no LoRA adapters; start it with adapters.slots of 1 or more")
        return loaded


@collector_paused()  # a tenth of a start would be looking at what has just been made
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
    choice = policy_of(config) if scheduler is None else scheduler
    num_replicas = config.parallel.data
    find_scheduler(choice)
    if scheduler is None and config.sched.policy is None:
        logger.info(
            "sched.policy is null: %s, %s", choice, "for there are keys" if choice == "fair" else "without keys"
        )
    create_lengths(config.sched.lengths)
    create_tier_policy(config.cache.host_policy, TierOptions(admission=config.cache.host_admission))
    page_stores = prepare_page_stores(config) if config.store.connector is None else prepare_page_connectors(config)
    check_page_events(config)
    options = scheduler_options(config)
    exchanges = check_handoff(config)
    if config.events.port is not None:
        _check_is_ours(choice, "events.port is set", "tells of no pages; leave events.port out")
    if exchanges:
        _check_is_ours(choice, "handoff.secret_file is set", "lends no pages; leave handoff out")
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
    pictures = find_pictures(config)
    tokenized_s = time.perf_counter()
    devices = [*(build_devices if make_devices is None else make_devices)(config, progress)]
    pages = None
    if exchanges:
        first = devices[0]
        pages = CanonicalSlots.of(
            first.slots, first.slot_form, lambda: devices[0].namespace, config.handoff.frame_bytes
        )
    model = describe_model(config, devices, tokenizer, embedding, reranker, pictures)
    with contextlib.ExitStack() as opened:
        if page_stores is not None:
            opened.callback(page_stores.close)
        stores = [None if page_stores is None else open_store(page_stores, device) for device in devices]
        events: list[PageEvents | None] = [*open_page_events(config)] or [None] * num_replicas
        for sender in events:
            if sender is not None:
                opened.callback(sender.close)

        def make_engine(
            number: int,
            device: Device,
            store: EngineStore | None,
            sender: PageEvents | None,
            dead: Engine | None = None,
        ) -> Engine:
            limits = device.runner.limits
            own = dataclasses.replace(options, namespace=device.namespace)
            made = create_scheduler(choice, limits, options=own, store=store)
            engine = Engine(
                runner=device.runner,
                scheduler=_watched(made, sender, limits),
                tokenizer=tokenizer,
                model=model,
                max_waiting=config.sched.max_waiting,
                max_waiting_tokens=config.sched.max_waiting_tokens,
                max_picture_bytes=config.vision.max_waiting_bytes,
                seed=config.model.seed,
                later=device.later,
                observers=_observers(config, device, number, model.name, choice),
                lookup=LookupOptions(
                    min_len=config.speculation.ngram_min,
                    max_len=config.speculation.ngram_max,
                    window=config.speculation.window,
                ),
                on_close=_closing(store, sender),
                may_be_fenced=config.hosts.coordinator is None,  # elsewhere hosts.stall_s ends what hangs
                name="the engine" if num_replicas == 1 else f"replica {number} of {num_replicas}",
                replaces=dead,
            )
            if store is not None:
                store.wake = engine.wake
            return engine

        def rebuild(number: int, dead: Engine) -> Engine:
            """On a thread of its own. Raises anything."""
            before = devices[number]
            if before.later is not None:
                before.later.wait()  # for the shape that is being compiled; it builds no other
            assert before.renew is not None
            # The name of the weights that it has, which may not be those of the start (`live_weights`).
            device = devices[number] = dataclasses.replace(before.renew(), namespace=before.namespace)
            store = None if page_stores is None else open_store(page_stores, device)
            sender = None if config.events.port is None else open_page_events_of(config, number)
            if device.later is not None:
                device.later.start()
            return make_engine(number, device, store, sender, dead)

        replicas = [
            make_engine(number, device, stores[number], events[number]) for number, device in enumerate(devices)
        ]
        later = [device.later for device in devices if device.later is not None]
        for buckets in later:
            buckets.start()
        compiles = CompileCounter()
        for stats in (stats for replica in replicas for stats in replica.stats):
            stats.watch_compiles(lambda: compiles.count)
        engine = replicas[0]
        if num_replicas > 1:
            watchdog, renewable = config.watchdog, all(device.renew is not None for device in devices)
            engine = EngineGroup(
                replicas,
                router,
                retries=config.route.retries,
                rebuild=rebuild if watchdog.restarts and renewable else None,
                restarts=RestartOptions(
                    most=watchdog.restarts,
                    window_s=watchdog.window_s,
                    backoff_s=watchdog.backoff_s,
                    wait_s=watchdog.wait_s,
                ),
            )
        opened.pop_all()  # the engine closes its stores and events
    seconds = {"tokenizer": tokenized_s - begin_s, **devices[0].seconds, "assemble": time.perf_counter() - begin_s}
    return Assembly(
        engine=engine,
        sampling_defaults=devices[0].sampling_defaults,
        config=config,
        seconds=seconds,
        later=later,
        weights=LiveWeights(engine, devices),
        pages=pages,
    )


def _observers(config: Config, device: Device, number: int, model: str, choice: SchedulerChoice) -> list[StepObserver]:
    """Of the engine of one replica, which has the `number`."""
    watchdog, degrade = config.watchdog, config.degrade
    found: list[StepObserver] = [process_interpreter(), StepDeadlines(watchdog.floor_s, watchdog.factor)]
    if degrade.highest != Rung.NONE.label:
        highest = Rung.of(degrade.highest)
        ladder = LadderOptions(highest=highest, up_s=degrade.up_s, down_s=degrade.down_s, calm=degrade.calm)
        found.append(Degrading(DegradeOptions(ladder, degrade.queue_s, degrade.step_ms / 1000)))
    log = open_step_log(
        config,
        limits=device.all_limits,
        model=model,
        policy=choice,
        vocab_size=device.vocab_size,
        replica=number,
        device_facts=device.facts,
    )
    return found if log is None else [*found, log]


def _check_is_ours(choice: SchedulerChoice, given: str, otherwise: str) -> None:
    """Raises ConfigError for a scheduler of somebody else: its pages are not known."""
    found = find_scheduler(choice)
    if not (isinstance(found, Policy | ContinuousScheduler) or (isinstance(found, type) and issubclass(found, Policy))):
        raise ConfigError(
            f"{given}, but the scheduler {choice!r:.120} is none of jaxserve's, and {otherwise}, or give a policy"
        )


def _watched(scheduler: Scheduler, events: PageEvents | None, limits: Limits) -> Scheduler:
    """The scheduler, which tells `events` of its pages from now on."""
    if events is not None:
        assert isinstance(scheduler, ContinuousScheduler), "`_check_is_ours` has seen it"
        scheduler.watch_pages(events)
        events.start(limits.page_size, limits.page_groups)
    return scheduler


def _closing(store: EngineStore | None, events: PageEvents | None) -> Callable[[], None] | None:
    parts = [part for part in (events, store) if part is not None]

    def close() -> None:
        for part in parts:
            part.close()

    return close if parts else None


def open_store(stores: PageStores | PageConnectors, device: Device) -> EngineStore:
    """What is behind the host memory of a replica. Raises what the store raises, and ConfigError."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    layout = f"jaxserve {__version__}, {versions}, {device.page_layout}"
    if isinstance(stores, PageConnectors):
        return stores.open(device.slots, layout, device.namespace, device.runner.limits.page_size)
    opened = stores.open(device.slots, layout, device.namespace, device.slot_form)
    return opened if device.join_stores is None else device.join_stores(opened)


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
        lends=config.handoff.role == "prefill",
        page_shares=config.cache.page_shares,
        watermark=sched.watermark,
        growth=sched.growth,
        lengths=sched.lengths,
        ageing_s=sched.ageing_s,
        input_weight=sched.input_weight,
        output_weight=sched.output_weight,
        preempt_lag=sched.preempt_lag,
        preempt_after=sched.preempt_after,
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
    pictures: PictureProcessor | None,
) -> ModelInfo:
    """The model as front doors see it: the limits that hold on every replica."""
    first = replicas[0]
    eos = set(first.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    limits = [device.runner.limits for device in replicas]
    return ModelInfo(
        name=_model_name(config),
        vocab_size=first.vocab_size,
        max_model_len=min(one.max_model_len for one in limits),
        eos_token_ids=tuple(sorted(eos)),
        max_pool_tokens=min(longest_sequence(one) for one in limits),
        private_prompts_above=first.private_prompts_above,
        max_position=first.max_position,
        generates=first.generates,
        embedding=embedding,
        reranker=reranker,
        drafter=config.speculation.method,
        pictures=pictures,
        adapters=first.adapters,
        examples=packaged_examples(config.model.path),
    )


def _model_name(config: Config) -> str:
    return config.model.name or model_name(config.model.path)


def _load_adapters(config: Config, loaded: LoadedModel, progress: Progress) -> LoadedAdapters | None:
    """The adapters of an engine, with those of `adapters.load`; None where it takes none.

    Raises AdapterError, and ConfigError for models that cannot have adapters yet, and settings that leave no room for
    one.
    """
    asked, checkpoint = config.adapters, loaded.checkpoint
    if not asked.slots:
        return None
    family = decoder_config(checkpoint)[0]
    kind = "a GGUF file" if checkpoint.kind is CheckpointKind.GGUF else "a model that takes pictures"
    if checkpoint.kind is CheckpointKind.GGUF or family.tower is not None:
        raise ConfigError(
            f"adapters.slots is {asked.slots}, and {config.model.path} is {kind}, for which adapters are not "
            "implemented; leave adapters out"
        )
    if asked.directory is not None and not Path(asked.directory).is_dir():
        raise ConfigError(f"adapters.directory: {asked.directory!r} is no directory; name the one of the adapters")
    reader = AdapterReader(family, loaded.partition, loaded.dtype, asked.max_rank)
    if asked.host_bytes < reader.num_bytes:
        raise ConfigError(
            f"adapters.host_bytes is {asked.host_bytes}, and one adapter of rank {asked.max_rank} takes "
            f"{reader.num_bytes} bytes of this model; raise it, or lower adapters.max_rank"
        )
    adapters = LoadedAdapters(reader.read, num_bytes=reader.num_bytes, limit_bytes=asked.host_bytes)
    for name, path in asked.load.items():
        progress.begin(f"reading the adapter {name}")
        adapters.load(name, path, _model_name(config))
    return adapters


def _check_not_shared(choice: SchedulerChoice, num_replicas: int) -> None:
    """A scheduler keeps the pages of one device, and a policy the counts of one queue: replicas cannot share them."""
    found = find_scheduler(choice)
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
    planned = plan_stages(config, first)
    adapters = _load_adapters(config, planned[0].shapes, progress)  # a wrong one is found before the model is loaded
    tower = plan_pictures(config, planned[0].shapes.mesh, planned[0].shapes.dtype)
    planned_s = time.perf_counter()
    replicas = build_runners(
        config,
        planned,
        others=others,
        tower=tower,
        content=_content(config, planned[0].shapes),
        progress=progress,
        say=logger.info,
        hooks=hooks,
        apart="jaxserve.assemble.steps_apart",
    )
    stages = replicas[0].models
    num_params, num_bytes = (sum(getattr(stage, name) for stage in stages) for name in ("num_params", "num_bytes"))
    size = f"{num_params:,} parameters, {num_bytes / 2**30:.3f} GiB"
    if len(stages) < config.parallel.pipeline:
        size += f" of {len(stages)} of {config.parallel.pipeline} stages"
    logger.info("%s: %s, %s", config.model.path, size, stages[0].dtype)
    if not stages[0].config.has_head:
        logger.warning("%s: there is no output projection (lm_head) in its files: it only embeds", config.model.path)
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
    meshes = None if hooks.one_of_many else first
    if tower is not None:
        meshes = None  # the embeddings of pictures would be those of another model's tower
    return [_describe_device(config, built, planned_s - begin_s, meshes, adapters) for built in replicas]


def _describe_device(
    config: Config, built: Built, plan_s: float, meshes: Sequence[Mesh] | None, adapters: LoadedAdapters | None
) -> Device:
    """`meshes`: of the first replica, for which other weights are planned; None: there are no other weights, since all
    of several processes would need them at the same step."""
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
        generates=loaded.config.has_head,
        seconds={"plan": plan_s, **built.seconds},
        later=built.later,
        facts={
            "device": jax.devices()[0].device_kind,
            "model": repr(loaded.config),
            "weights": _describe_weights(built.shapes),
            "cache scales": "none" if loaded.cache_scales is None else loaded.cache_scales.digest,
        },
        namespace=_namespace(config, loaded),
        namespace_of=lambda directory: _namespace(_with_model(config, directory), loaded),
        slots=built.runner.slots,
        page_layout=built.page_layout,
        slot_form=built.slot_form,
        new_weights=None if meshes is None else functools.partial(_new_weights, config, built, meshes),
        renew=lambda: _describe_device(config, built.renew(), plan_s, meshes, adapters),
        adapters=adapters,
    )


def _new_weights(config: Config, built: Built, meshes: Sequence[Mesh], source: WeightSource) -> Weights:
    """See `Device.new_weights`. Raises CheckpointError and ConfigError."""
    if isinstance(source, Mapping):
        return built.new_weights.from_arrays(source)
    return built.new_weights.from_models(plan_stages(_with_model(config, os.fspath(source)), meshes))


def _with_model(config: Config, directory: str) -> Config:
    model = config.model.model_copy(update={"path": directory, "random_weights": False})
    return config.model_copy(update={"model": model})


def _namespace(config: Config, loaded: LoadedModel) -> str:
    """See `Device.namespace`."""
    model = config.model
    checkpoint = checkpoint_digest(resolve_model_path(model.path), model.random_weights)
    weights = f"random weights of seed {model.seed}" if model.random_weights else "its weights"
    read = f"read by {model.family}, with {sorted(model.overrides.items())}"
    codes = f"quantised {model.quantization}, {list(model.quantization_rules.items())}"
    pages = config.cache.dtype + ("" if loaded.cache_scales is None else f" with scales {loaded.cache_scales.digest}")
    drafts = config.speculation
    if drafts.method not in DRAFTERS:  # a head or model, whose keys and values are part of a page
        pages += f" beside those of {drafts.method} {drafts.model}"
    if config.attention.select != NONE:  # keys and values of generated tokens follow from what these attended to
        pages += f", generated with {config.attention.select} of {config.attention.pages} pages"
    return f"checkpoint of {checkpoint} {read}, {weights} in {loaded.dtype}, {codes}, pages in {pages}"


def _content(config: Config, planned: LoadedModel) -> str | None:
    """A text that differs for weights of other numbers; None where these do not follow from files and from settings.

    Beside samples of the files it has the times at which they were changed, since a training may change numbers outside
    of all samples.
    """
    checkpoint = planned.checkpoint
    is_own = is_own_family(checkpoint.config, checkpoint.config_file, checkpoint.family)
    if config.model.random_weights or not is_own:
        return None
    folders = [] if checkpoint.gguf is not None else [checkpoint.path]
    if config.speculation.model is not None:
        folders.append(Path(config.speculation.model).expanduser())
    files = [] if checkpoint.gguf is None else [*parts_of(checkpoint.gguf)]
    files += [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    drafts = "none" if config.speculation.model is None else checkpoint_digest(folders[-1], config_only=False)
    changed = [(file.name, file.stat().st_mtime_ns) for file in files]
    return f"{_namespace(config, planned)}, drafts of {drafts}, changed {changed}"


def _describe_weights(stages: Sequence[AbstractStage]) -> str:
    """A digest of shapes, types and shardings, in a few characters."""
    leaves = [leaf for stage in stages for leaf in stage.weights]
    texts = [f"{leaf.shape} {leaf.dtype} {leaf.sharding.spec}" for leaf in leaves]
    return f"{len(leaves)} arrays, checksum {zlib.crc32(' '.join(texts).encode()):08x}"


def plan_stages(config: Config, meshes: Sequence[Mesh]) -> list[PlannedModel]:
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
