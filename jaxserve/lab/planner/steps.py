"""The real step, compiled for devices that are not here, and facts of its program.

Steps are chosen and compiled here, and extended from few layers to all; `predict` turns them into seconds.

Few layers may stand for all: layers are unrolled and alike, so a program of two of each kind, and one with two more of
a kind, show the cost of a layer and of everything else. XLA:GPU needs 1.5 to 4 seconds for a layer, minutes for a
large model; libtpu's time is nearly all spent outside the layers (4 layers of Llama-3.1-8B on v5e:2x2 compiled in 64 s,
32 in 95 s), so there the whole model is compiled.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import jax

from jaxserve.config.schema import Config
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.lab.compiled.ahead import AbsentModel, compile_stage, place_ahead
from jaxserve.lab.compiled.collectives import Collective, count_collectives
from jaxserve.lab.compiled.temporaries import largest_temporaries
from jaxserve.lab.compiled.traffic import kernel_calls, memory_traffic, names_in_scope, weight_kernels
from jaxserve.lab.planner.count import StepCounter
from jaxserve.lab.planner.report import CountedStep, StepFacts
from jaxserve.models.decoder_config import DecoderConfig, LayerSpec
from jaxserve.models.quantised import Kept
from jaxserve.models.weights import Path
from jaxserve.progress import Progress
from jaxserve.runtime.build import plan_stage_memory
from jaxserve.runtime.compile import Compiled
from jaxserve.runtime.executables import bucket_layouts, step_name
from jaxserve.runtime.hlo import parse_hlo
from jaxserve.sched.plan import Bucket

_FEW = 2  # layers of a kind in the base program, and how many more its variants have
_NO_LIMIT = 2**62  # bytes of a device on which any number of pages fits


def choose_buckets(absent: AbsentModel, names: Sequence[str]) -> list[Bucket]:
    """The buckets to compile: those named as in reports ('decode 64x64'), all for 'all', for none the largest of each
    kind: decode, with prompts, and of several tokens a row where there are drafts."""
    buckets = absent.sizes.buckets
    if list(names) == ["all"]:
        return list(buckets)
    if not names:
        wide = [b for b in buckets if not b.plain]
        plain = max(b for b in buckets if b.decode_only and b.plain)
        return [plain, max(b for b in buckets if not b.decode_only), *([max(wide)] if wide else ())]
    known = {step_name(b): b for b in buckets}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--buckets names {unknown[0]!r}; this config has {', '.join(known)}, or 'all'")
    return [known[name] for name in names]


def compile_steps(
    absent: AbsentModel,
    model: DecoderConfig,
    topology: str,
    *,
    buckets: Sequence[Bucket],
    num_pages: int,
    exact: bool,
    counter: StepCounter | None,
    progress: Progress,
) -> tuple[StepFacts, ...]:
    """Compiles the steps of `buckets`, whole or (not `exact`) with few layers; `counter` guesses their times.

    Raises CapacityError when the compiler says that a step does not fit the device.
    """
    programs = [model] if exact else few_layers(model)
    facts = []
    for program in programs:
        placed = absent if program is model else _placed(absent, program, topology)
        steps = ", ".join(map(step_name, buckets))
        progress.begin(f"compiling {steps} for {topology} with {program.num_layers} layers")
        facts.append(_compile(placed, topology, buckets, num_pages, counter, progress))
    if len(programs) == 1:
        return tuple(facts[0])
    extra = [model.layers.count(kind) - _FEW for kind in dict.fromkeys(model.layers)]
    predicted = _argument_bytes(absent, num_pages)
    return tuple(_extend(base, more, extra, predicted[base.name]) for base, *more in zip(*facts, strict=True))


def few_layers(model: DecoderConfig) -> list[DecoderConfig]:
    """A base with two layers of each kind, then for each kind a model with two more of it.

    The model alone when that would not be less to compile.
    """
    kinds = list(dict.fromkeys(model.layers))
    base = [kind for kind in kinds for _ in range(_FEW)]
    sizes = [base, *([*base, *[kind] * _FEW] for kind in kinds)]
    if sum(map(len, sizes)) >= model.num_layers or any(model.layers.count(kind) < _FEW for kind in kinds):
        return [model]
    return [dataclasses.replace(model, layers=tuple(layers)) for layers in sizes]


def _placed(absent: AbsentModel, program: DecoderConfig, topology: str) -> AbsentModel:
    """A program of few layers, with the block tables of all."""
    kept = _kept_of(absent, program)
    dtype = absent.stages[0].dtype.name
    placed = place_ahead(
        absent.config,
        program,
        topology=topology,
        dtype=dtype,
        keep=lambda *_: kept,
        plan_tower=lambda *_: absent.tower,
    )
    groups = absent.sizes.page_groups.of_layers(program.windows)
    return dataclasses.replace(placed, sizes=dataclasses.replace(placed.sizes, page_groups=groups))


def _kept_of(absent: AbsentModel, program: DecoderConfig) -> dict[Path, Kept]:
    """What parameters of few layers are kept as: each layer of a kind as the one of that kind in the whole model."""
    places: dict[LayerSpec, list[int]] = {}
    for place, kind in enumerate(absent.stages[0].partition.model.layers):
        places.setdefault(kind, []).append(place)
    left = {kind: iter(found) for kind, found in places.items()}
    sources = {next(left[kind]): place for place, kind in enumerate(program.layers)}
    kept = {}
    for path, found in absent.kept.items():
        if path[0] != "layers":
            kept[path] = found
        elif path[1] in sources:
            kept["layers", sources[path[1]], *path[2:]] = found
    return kept


def _compile(
    absent: AbsentModel,
    topology: str,
    buckets: Sequence[Bucket],
    num_pages: int,
    counter: StepCounter | None,
    progress: Progress,
) -> list[StepFacts]:
    names = [step_name(bucket) for bucket in buckets]
    try:
        compiled = compile_stage(absent, num_pages=num_pages, only=names)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise CapacityError(
            f"the compiler for {topology} refuses a step: {reason}; lower cache.num_pages, "
            "cache.memory_fraction or sched.max_step_tokens"
        ) from error
    predicted = _argument_bytes(absent, num_pages)
    progress.begin("reading the compiled steps" + ("" if counter is None else ", and counting their kernels"))
    return [_read(compiled[step_name(b)], b, absent, predicted[step_name(b)], counter) for b in buckets]


def _argument_bytes(absent: AbsentModel, num_pages: int) -> dict[str, int]:
    """Weights, pages, state and inputs of each step, by arithmetic on shapes."""
    cache = absent.config.cache.model_copy(update={"num_pages": num_pages, "memory_bytes": None})
    config: Config = absent.config.model_copy(update={"cache": cache})
    memory = plan_stage_memory(config, absent.sizes, absent.stages, absent.attention, _NO_LIMIT)
    held = memory.weight_bytes + memory.cache_bytes + memory.state_bytes
    return {step_name(b): held + 4 * layout.size for b, layout in bucket_layouts(absent.sizes).items()}


def _read(
    compiled: Compiled,
    bucket: Bucket,
    absent: AbsentModel,
    predicted_argument_bytes: int,
    counter: StepCounter | None,
) -> StepFacts:
    try:
        text = compiled.call.as_text()
    except jax.errors.JaxRuntimeError as error:  # libtpu 0.0.51 does so for v5p and v6e
        raise ConfigError(
            f"this compiler cannot print the program of {compiled.name!r}: {error}; install the version of "
            "constraints.txt, or plan with --quick"
        ) from error
    memory, cost = compiled.call.memory_analysis(), compiled.call.cost_analysis()
    assert text is not None and memory is not None, compiled.name
    module = parse_hlo(text)
    kernels = kernel_calls(module)
    sampling = names_in_scope(module, "sample")
    stage = absent.stages[0]
    # Of the kernels, those of products move weights, which are counted; the others move pages.
    uncounted = kernels.keys() - weight_kernels(module)
    traffic = memory_traffic(module, hit_share=stage.partition.model.hit_share(bucket.tokens))
    moved = {name: size for name, size in traffic.items() if name not in uncounted}
    return StepFacts(
        name=compiled.name,
        tokens=bucket.tokens,
        rows=bucket.rows,
        decode_only=bucket.decode_only,
        compiled_layers=(len(stage.layers),),
        compile_seconds=compiled.seconds,
        temporary_bytes=compiled.temporary_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        predicted_argument_bytes=predicted_argument_bytes,
        flops=cost.get("flops") if cost else None,
        moved_bytes=sum(moved.values()),
        sampling_bytes=sum(size for name, size in moved.items() if name in sampling),
        kernels=dict(Counter(kernels.values())),
        collectives=count_collectives(module, stage.mesh.size),
        counted=None if counter is None else counter.count(module, bucket, stage.partition.local),
        width=bucket.width,
        largest_temporary=next(iter(largest_temporaries(module)), None),
    )


def _extend(
    base: StepFacts, more: Sequence[StepFacts], extra: Sequence[int], predicted_argument_bytes: int
) -> StepFacts:
    """Facts of a whole model. `extra[k]`: layers of kind k that the base lacks; `more[k]` has `_FEW` of them."""

    def line(start: float, values: Sequence[float]) -> float:
        # A layer cannot take less than nothing, though seconds are noisy.
        slopes = (max(0.0, value - start) / _FEW for value in values)
        return start + sum(number * slope for number, slope in zip(extra, slopes, strict=True))

    flops = [f.flops for f in more]
    kernels = {
        name: round(line(base.kernels.get(name, 0), [f.kernels.get(name, 0) for f in more]))
        for name in dict.fromkeys(name for f in (base, *more) for name in f.kernels)
    }
    return dataclasses.replace(
        base,
        compiled_layers=tuple(f.compiled_layers[0] for f in (base, *more)),
        compile_seconds=line(base.compile_seconds, [f.compile_seconds for f in more]),
        temporary_bytes=round(line(base.temporary_bytes, [f.temporary_bytes for f in more])),
        # Bytes of pages are no line where layers share slots: only what XLA counts beyond the arithmetic is extended.
        argument_bytes=predicted_argument_bytes + round(line(_uncounted(base), [_uncounted(f) for f in more])),
        predicted_argument_bytes=predicted_argument_bytes,
        flops=None if base.flops is None else line(base.flops, [f for f in flops if f is not None]),
        moved_bytes=line(base.moved_bytes, [f.moved_bytes for f in more]),
        sampling_bytes=line(base.sampling_bytes, [f.sampling_bytes for f in more]),
        kernels=kernels,
        collectives=_extend_collectives(base, more, line),
        counted=_extend_counted(base, more, line),
    )


def _uncounted(facts: StepFacts) -> int:
    return facts.argument_bytes - facts.predicted_argument_bytes


def _extend_counted(
    base: StepFacts, more: Sequence[StepFacts], line: Callable[[float, Sequence[float]], float]
) -> CountedStep | None:
    start, others = base.counted, [f.counted for f in more if f.counted is not None]
    if start is None or len(others) < len(more):
        return None
    parts = {part: line(seconds, [c.parts[part] for c in others]) for part, seconds in start.parts.items()}
    return dataclasses.replace(
        start,
        seconds=sum(parts.values()),
        parts=parts,
        byte_seconds=line(start.byte_seconds, [c.byte_seconds for c in others]),
        instructions=round(line(start.instructions, [c.instructions for c in others])),
        unestimated=round(line(start.unestimated, [c.unestimated for c in others])),
        unestimated_seconds=line(start.unestimated_seconds, [c.unestimated_seconds for c in others]),
    )


def _extend_collectives(
    base: StepFacts, more: Sequence[StepFacts], line: Callable[[float, Sequence[float]], float]
) -> tuple[Collective, ...]:
    tables = [{(c.kind, c.group): c for c in facts.collectives} for facts in (base, *more)]
    found = []
    for kind, group in dict.fromkeys(key for table in tables for key in table):
        none = Collective(kind=kind, group=group, count=0, payload_bytes=0)
        start, *others = (table.get((kind, group), none) for table in tables)
        found.append(
            Collective(
                kind=kind,
                group=group,
                count=round(line(start.count, [c.count for c in others])),
                payload_bytes=round(line(start.payload_bytes, [c.payload_bytes for c in others])),
            )
        )
    return tuple(found)
