"""Decisions that a config leaves open, for a model and a device: sizes, and the implementation of each op.

None of them needs weights. The number of pages is decided in `memory`.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxserve.config.schema import Config, SpeculationConfig
from jaxserve.errors import ConfigError, KernelsUnavailable
from jaxserve.kernels.dispatch import Device, I, Op, U
from jaxserve.kernels.grouped_matmul import GroupedMatmul, GroupedMatmulUse
from jaxserve.kernels.matmul import MatmulUse
from jaxserve.kernels.ops import GROUPED_MATMUL
from jaxserve.kernels.paged_attention import PAGE_SIZES, AttentionUse
from jaxserve.kernels.selection import NONE, Selector, SelectorOptions, find_selector
from jaxserve.models.adapters.slots import projection_forms
from jaxserve.models.decoder_config import DecoderConfig, ExpertSpec
from jaxserve.models.layers import attention_use
from jaxserve.models.partition import Partition
from jaxserve.models.quantised import Kept
from jaxserve.models.weights import Path
from jaxserve.runtime.adapters import AdapterSizes
from jaxserve.runtime.buckets import DEFAULTS, make_buckets
from jaxserve.runtime.checked_kernels import CheckedKernels
from jaxserve.runtime.drafter import FromTokens, Speculation
from jaxserve.runtime.drafting import DRAFTERS, DrafterOptions
from jaxserve.runtime.executables import Sizes
from jaxserve.runtime.heads import AUTO, find_head, make_drafter
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.values.chips import canonical_kind

logger = logging.getLogger(__name__)


def backend_of(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """'cpu', 'gpu' or 'tpu'."""
    return "gpu" if device.platform in {"cuda", "rocm"} else device.platform


def describe(device: jax.Device) -> Device:  # pyright: ignore[reportInvalidTypeForm]
    """The description of `device` that kernels are chosen by."""
    backend = backend_of(device)
    capability = device.compute_capability.split(".") if backend == "gpu" else None
    return Device(
        backend=backend,
        kind=canonical_kind(device.device_kind),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
    )


def attention_uses(model: DecoderConfig, sizes: Sizes, dtype: np.dtype) -> tuple[AttentionUse, ...]:
    """The use of paged attention by each layer of a model. `model` has the sizes of one device."""
    return tuple(
        attention_use(model, layer, page_size=sizes.page_size, query_dtype=dtype, cache_dtype=sizes.cache_dtype)
        for layer in model.layers
    )


def draft_uses(sizes: Sizes, devices: int, dtype: np.dtype) -> tuple[AttentionUse, ...]:
    """The uses of paged attention by the layers of a drafter on one of `devices`. None has scales for eight bits."""
    decoder = None if sizes.speculation is None else sizes.speculation.drafter.decoder
    if decoder is None:
        return ()
    local = Partition.of(decoder, devices).local
    return tuple(
        attention_use(local, layer, page_size=sizes.page_size, query_dtype=dtype, cache_dtype=dtype)
        for layer in local.layers
    )


def resolve_selector(config: Config, page_size: int) -> Selector | None:
    """What chooses the pages of decode steps; None where they read all. Raises ConfigError."""
    asked = config.attention
    if asked.select != NONE and config.speculation.method != "none":
        raise ConfigError(
            f"attention.select is {asked.select!r} and speculation.method {config.speculation.method!r}, but rejected "
            "drafts would widen the summaries of pages, and tokens would depend on drafts; leave one of them out"
        )
    if asked.select != NONE and config.store.pages == "canonical":
        raise ConfigError(
            f"attention.select is {asked.select!r} and store.pages canonical, but summaries of pages have no canonical "
            "form; leave one of them out"
        )
    return find_selector(asked.select, SelectorOptions(num_pages=asked.pages, page_size=page_size))


def grouped_uses(partition: Partition, dtype: np.dtype, kept: Mapping[Path, Kept]) -> tuple[GroupedMatmulUse, ...]:
    """The uses of grouped products by layers with experts, of float matrices and of codes. `kept`: of the model."""
    uses = []
    for number, layer in enumerate(partition.local.layers):
        if not isinstance(layer.mlp, ExpertSpec):
            continue
        floats = GroupedMatmulUse(
            dtype=jnp.dtype(dtype).name,
            num_experts=layer.mlp.num_held,
            hidden_size=partition.model.hidden_size,
            size=layer.mlp.size,
            num_devices=partition.devices // partition.expert_parts,
        )
        for name in ("gate_up", "down"):
            found = kept.get(("layers", number, "mlp", name))
            if found is None or found.storage is None:
                uses.append(floats)
                continue
            uses.append(dataclasses.replace(floats, storage=found.storage.of_codes, arithmetic=found.arithmetic))
            if found.storage.offsets:
                uses.append(dataclasses.replace(floats, dtype="float32"))
    return tuple(dict.fromkeys(uses))


def matmul_uses(
    dtype: np.dtype, mesh: Mesh | AbstractMesh, kept: Mapping[Path, Kept], *, adapters: bool = False
) -> tuple[MatmulUse, ...]:
    """The uses of products: with float weights, and with each form of codes. `kept`: of the model; experts have uses
    of their own (`grouped_uses`). `adapters`: whether the engine takes some."""
    floats = MatmulUse(dtype=jnp.dtype(dtype).name, num_devices=mesh.size, adapters=adapters)
    dense = [found for whole in kept.values() for found in whole.each if not found.is_experts]
    codes = (
        dataclasses.replace(floats, storage=found.storage.of_codes, arithmetic=found.arithmetic, adapters=False)
        for found in dense
        if found.storage is not None
    )
    with_offsets = any(found.storage is not None and found.storage.offsets for found in dense)
    offsets = (dataclasses.replace(floats, dtype="float32", adapters=False),) if with_offsets else ()
    return tuple(dict.fromkeys((floats, *offsets, *codes)))


def choose_grouped_matmul(
    config: Config,
    partition: Partition,
    dtype: np.dtype,
    kept: Mapping[Path, Kept],
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    checked: CheckedKernels | None = None,
) -> GroupedMatmul | None:
    """`choose` for the products of experts; None for a model that has none. Raises ConfigError as it does."""
    uses = grouped_uses(partition, dtype, kept)
    return choose(GROUPED_MATMUL, config, uses, device, checked) if uses else None


def resolve_sizes(config: Config, model: DecoderConfig, weights_dtype: np.dtype, backend: str) -> Sizes:
    """Fills in what the config leaves open. Raises ConfigError for combinations that cannot work."""
    if backend not in DEFAULTS:
        raise ConfigError(f"JAX runs on {backend!r} here; this version runs on {', '.join(DEFAULTS)}")
    defaults = DEFAULTS[backend]
    max_model_len = config.model.max_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"model.max_len is {max_model_len}, but the checkpoint is made for {model.max_position} tokens "
            "(max_position_embeddings); lower it, or change the checkpoint's rope scaling"
        )
    max_rows = config.sched.max_rows or min(defaults.max_rows, config.sched.max_step_tokens or defaults.max_rows)
    max_step_tokens = config.sched.max_step_tokens or max(defaults.max_step_tokens, max_rows)
    if max_step_tokens < max_rows:
        raise ConfigError(
            f"sched.max_step_tokens is {max_step_tokens}, less than sched.max_rows {max_rows}: a step must hold one "
            "token of every row; raise the one or lower the other"
        )
    max_mixed_tokens = config.sched.max_mixed_tokens
    if max_mixed_tokens and not config.sched.chunked_prefill:
        raise ConfigError(
            f"sched.max_mixed_tokens is {max_mixed_tokens} and sched.chunked_prefill is false, but a prompt that must "
            "not be cut cannot keep to a limit; leave one of them out"
        )
    if max_mixed_tokens is None:
        max_mixed_tokens = defaults.max_mixed_tokens
    page_groups = PageGroups.of(model.windows, max_model_len)
    speculation = resolve_speculation(config, model, weights_dtype, page_groups)
    return Sizes(
        backend=backend,
        page_size=config.cache.page_size or PAGE_SIZES[backend],
        max_rows=max_rows,
        max_model_len=max_model_len,
        buckets=make_buckets(
            max_rows,
            max_step_tokens,
            config.runtime.token_buckets,
            config.runtime.row_buckets,
            defaults.growth,
            widths=() if speculation is None else _widths(config.speculation),
            rounds=config.speculation.rounds,
            max_wide_tokens=defaults.max_wide_tokens,
        ),
        cache_dtype=weights_dtype if config.cache.dtype == "auto" else jnp.dtype(config.cache.dtype),
        page_groups=page_groups,
        max_mixed_tokens=max_mixed_tokens or None,
        speculation=speculation,
    )


def resolve_adapters(config: Config, partition: Partition) -> AdapterSizes | None:
    """The slots for adapters; None: there are none. Raises ConfigError for settings that do not go with them yet."""
    asked = config.adapters
    if not asked.slots:
        if asked.load or asked.directory is not None:
            raise ConfigError(
                "adapters.load or adapters.directory is set, but adapters.slots is 0; set it to 1 or more"
            )
        return None
    parallel, drafts = config.parallel, config.speculation.method
    others = {
        "parallel.pipeline": parallel.pipeline > 1,
        "parallel.expert": parallel.expert > 1,
        "hosts.num_processes": config.hosts.num_processes > 1 or config.hosts.coordinator is not None,
        "runtime.batch_invariant": config.runtime.batch_invariant,
        "store.kind": config.store.kind is not None or config.store.connector is not None,
        "handoff.secret_file": config.handoff.secret_file is not None,
        "events.port": config.events.port is not None,
        "speculation.method": drafts not in ("none", "grammar") and drafts not in DRAFTERS,
        "a decoder of the model's own": partition.model.module is not None,
    }
    if given := [name for name, is_set in others.items() if is_set]:
        raise ConfigError(
            f"adapters.slots is {asked.slots}, and adapters do not go with {', '.join(given)} yet; leave one out"
        )
    return AdapterSizes(num_slots=asked.slots, max_rank=asked.max_rank, forms=projection_forms(partition))


def resolve_speculation(
    config: Config, model: DecoderConfig, dtype: np.dtype, page_groups: PageGroups
) -> Speculation | None:
    """What makes drafts; None where steps have one token of each row. Raises ConfigError, CheckpointError."""
    asked = config.speculation
    if asked.method == "none" and asked.rounds == 1:
        find_head(config, model)  # refuses a head that nothing would read
        return None
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"speculation.method is {asked.method!r} and speculation.rounds {asked.rounds}, but parallel.pipeline is "
            f"{config.parallel.pipeline}: the stages of a pipeline run one token of a sequence at a time; use "
            "parallel.tensor, or leave speculation out"
        )
    head = find_head(config, model)
    if head is not None:
        return Speculation(drafter=make_drafter(head, config, page_groups.groups, dtype), window=asked.window)
    make = DRAFTERS.get("ngram" if asked.method == AUTO else asked.method)
    drafter = make(
        DrafterOptions(
            ngram_min=asked.ngram_min,
            ngram_max=asked.ngram_max,
            num_answers=asked.num_answers,
            answer_len=asked.answer_len,
            model=asked.model,
            replay_errors=asked.replay_errors,
        )
    )
    return Speculation(drafter=FromTokens(drafter), window=asked.window)


def _widths(asked: SpeculationConfig) -> list[int]:
    """Powers of two up to the width asked for, and that; one token alone where there are no drafts."""
    if asked.method == "none":
        return [1]
    widths = [width for width in (2, 4, 8) if width < asked.width] + [asked.width]
    return [1, *widths] if asked.rounds > 1 else widths


def choose(
    op: Op[I, U],
    config: Config,
    uses: Sequence[U],
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    checked: CheckedKernels | None = None,
) -> I:
    """The implementation of `op` that the config names, or the best one, ready and checked on `device`, be it by an
    earlier start (`checked`).

    'auto' takes the next one, with a warning, where kernels cannot be compiled here or are slower than XLA's. Raises
    ConfigError as `Op.resolve` and `Op.check` do, and KernelsUnavailable for kernels that the config names.
    """
    described, uses, choice = describe(device), tuple(dict.fromkeys(uses)), getattr(config.kernels, op.name)
    found, passed_over = op.resolve(device=described, uses=uses, choice=choice), {}
    while (reason := _passes_over(op, found, uses, choice)) is not None:
        logger.warning("%s: %r is passed over: %s", op.name, found.name, reason)
        passed_over[found.name] = reason
        found = op.resolve(device=described, uses=uses, passed_over=passed_over)
    if config.kernels.self_check and found.name != op.reference:
        with jax.default_device(device):
            error = max(_error_of(op, found, use, device, checked) for use in uses)
        logger.info("%s: %r is right to %.1e on this device", op.name, found.name, error)
    return found


def _error_of(
    op: Op[I, U],
    implementation: I,
    use: U,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    checked: CheckedKernels | None,
) -> float:
    """`Op.check`, or what an earlier start has found with the same source. Kernels from elsewhere have no digest."""
    fields: Any = op.kind
    given = [getattr(implementation, field.name) for field in dataclasses.fields(fields)]
    functions = [op.error, op.case_of, op.limit, *filter(callable, given)]
    is_ours = all(str(getattr(function, "__module__", "")).startswith("jaxserve.") for function in functions)
    if checked is None or not is_ours:
        return op.check(implementation, use, describe(device))
    facts = (op.name, implementation.name, use)
    if (error := checked.error_of(device, *facts)) is None:
        error = op.check(implementation, use, describe(device))
        checked.keep(error, device, *facts)
    return error


def _passes_over(op: Op[I, U], implementation: I, uses: Sequence[U], choice: object) -> str | None:
    """Makes an implementation ready. Returns why 'auto' must take another one, or None."""
    try:
        for use in uses:
            implementation.prepare(use)
    except KernelsUnavailable as error:
        if choice != "auto":
            raise
        return str(error)
    if choice != "auto":
        return None
    return next((reason for use in uses if (reason := op.slower(implementation, use)) is not None), None)
