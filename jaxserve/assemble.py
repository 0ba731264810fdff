"""From a config to a running engine: tokenizer, weights, device, scheduler, loop, in this order.

Owns the order, so that what fails soonest is tried first: a wrong tokenizer is found before gigabytes are read.
Refuses to be clever: every part is built by its own package and handed to the next.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping

from jaxserve.config import ResolvedConfig
from jaxserve.config_schema import Config
from jaxserve.engine import Engine, ModelInfo
from jaxserve.models import load_model, resolve_model_path
from jaxserve.models.decoder_config import RopeScaling
from jaxserve.runtime.build import build_runner
from jaxserve.sched import Limits, Policy, Runner, Scheduler, SchedulerOptions, create_scheduler
from jaxserve.text import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# What takes the place of `sched.policy` from a notebook: a name, a policy, a scheduler, or a class of either.
SchedulerChoice = str | type[Policy] | Policy | Callable[[Limits, SchedulerOptions], Scheduler] | Scheduler

# Told of each executable compiled: how many are done, of how many, the newest one's name.
OnCompiled = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A model that is ready to run plans.

    Attributes:
      vocab_size: V of the model; the tokenizer may know fewer ids.
      eos_token_ids: as the checkpoint says.
      sampling_defaults: options of `SamplingParams` that the checkpoint recommends.
      private_prompts_above: see `ModelInfo`.
    """

    runner: Runner
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, object]
    private_prompts_above: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """An engine, and what front doors need beside it."""

    engine: Engine
    sampling_defaults: Mapping[str, object]
    config: Config


def assemble(
    resolved: ResolvedConfig,
    *,
    scheduler: SchedulerChoice | None = None,
    on_compiled: OnCompiled = lambda done, total, name: None,
) -> Assembly:
    """Builds everything; takes as long as loading and compiling take. The engine has no thread yet.

    `scheduler` replaces `sched.policy`. Raises ConfigError, CheckpointError or CapacityError.
    """
    config = resolved.config
    tokenizer = build_tokenizer(config)
    device = build_device(config, on_compiled)
    limits = device.runner.limits
    chosen = create_scheduler(
        config.sched.policy if scheduler is None else scheduler,
        limits,
        chunked_prefill=config.sched.chunked_prefill,
        prefix_caching=config.cache.prefix_caching,
        ageing_s=config.sched.ageing_s,
    )
    eos = set(device.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    model = ModelInfo(
        name=config.model.name or resolve_model_path(config.model.path).name,
        vocab_size=device.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=tuple(sorted(eos)),
        # The last token of a sequence is never written to a page.
        max_pool_tokens=limits.num_pages * limits.page_size + 1,
        private_prompts_above=device.private_prompts_above,
    )
    engine = Engine(
        runner=device.runner,
        scheduler=chosen,
        tokenizer=tokenizer,
        model=model,
        max_waiting=config.sched.max_waiting,
        seed=config.model.seed,
    )
    return Assembly(engine=engine, sampling_defaults=device.sampling_defaults, config=config)


def build_engine(resolved: ResolvedConfig) -> Engine:
    """The engine of `assemble` alone."""
    return assemble(resolved).engine


def build_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer, None with `model.skip_tokenizer`. Raises CheckpointError."""
    if config.model.skip_tokenizer:
        return None
    return load_tokenizer(resolve_model_path(config.model.tokenizer or config.model.path))


def build_device(config: Config, on_compiled: OnCompiled) -> Device:
    """Loads the weights and compiles the step."""
    loaded = load_model(
        config.model.path,
        dtype=config.model.dtype,
        random_weights=config.model.random_weights,
        seed=config.model.seed,
    )
    size = f"{loaded.num_params:,} parameters, {loaded.num_bytes / 2**30:.3f} GiB"
    logger.info("%s: %s, %s", config.model.path, size, loaded.dtype)
    built = build_runner(
        config, loaded, progress=lambda done, total, newest: on_compiled(done, total, newest.name), say=logger.info
    )
    for line in built.compile_report:
        logger.info(line)
    rope = loaded.config.rope
    return Device(
        runner=built.runner,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.checkpoint.eos_token_ids,
        sampling_defaults=loaded.checkpoint.default_sampling,
        private_prompts_above=rope.original_max_position if rope.scaling is RopeScaling.DYNAMIC else None,
    )
