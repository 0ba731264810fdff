"""From a float checkpoint and texts to a rounded checkpoint and its report: layer by layer, going on where it was left.

Two texts go through the layers side by side. What is calibrated on goes through the rounded layers, so that each is
fitted to the inputs that it will have; what is judged on goes through both, and the next tokens are compared at the
end. Each layer is written before the next begins, and what goes on through it is what the file holds.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.kernels.paged_attention import LARGEST, PagedAttention
from jaxserve.models.cache_scales import FILE_NAME, CacheRanges, attention_modules, ranges_table
from jaxserve.models.quantised.bits import to_float32
from jaxserve.progress import Progress
from jaxserve.quantise import awq, folding, gptq
from jaxserve.quantise.budget import Unit, average_bits, check_budget, spend, units_of
from jaxserve.quantise.choice import Choice, Options, choose
from jaxserve.quantise.quality import Text, next_tokens, summary
from jaxserve.quantise.rounding import output_error, to_nearest
from jaxserve.quantise.source import Arrays, Source, Target
from jaxserve.quantise.streaming import Hidden, Inputs, Step, Streams
from jaxserve.quantise.work import ERRORS, Work, open_work
from jaxserve.quantise.written import quantization_config, read_back, tensors_of_weight
from jaxserve.runtime.calibration import whole_batches

QUALITY_NAME = "quality.json"
_F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """What a job measures on, in pieces that are short enough for a step.

    Attributes:
      calibration: what weights are fitted to.
      judged: what the quality is measured on.
      held_out: the two have nothing in common.
    """

    calibration: Sequence[Text]
    judged: Sequence[Text]
    held_out: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How a job runs, which is no matter of its results but for the last digits.

    Attributes:
      attention: that all layers use.
      dtype: of activations, and of the weights that multiply them.
      page_size: tokens of a page of keys and values.
      quantile: of magnitudes of keys and values, which becomes the largest number of a cache of eight bits.
    """

    attention: PagedAttention
    dtype: np.dtype
    page_size: int
    quantile: float


def quantise(
    source: Source,
    options: Options,
    texts: Texts,
    target: Path,
    *,
    setting: Setting,
    about: Mapping[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Writes `target` and returns its report, which is there as quality.json, too.

    `about`: what source and texts are, in values that JSON has: a job that was left goes on where they are equal.

    Raises ConfigError for options that cannot be had of this model, CheckpointError for weights that cannot be read.
    """
    choices = choose(source, options)
    if options.budget_bits is not None:
        check_budget(options.budget_bits, source.targets, choices)
    modules = _cache_modules(source) if options.cache_scales else []
    depth = source.config.num_layers
    job = {
        **about,
        "options": dataclasses.asdict(options) | {"rules": [list(rule) for rule in options.rules.items()]},
        "dtype": setting.dtype.name,
    }
    with open_work(target, job, depth + 1) as (work, resumed):
        done = sum(work.has(part) for part in range(depth + 1))
        if resumed:
            progress.begin(f"going on in {work.directory}: {done} of {depth} layers are done")
        return _Job(source, options, texts, setting, work, choices, modules, progress).run()


def _cache_modules(source: Source) -> list[str]:
    """The names of each layer's attention. Raises ConfigError where no engine would find scales beside them."""
    modules = attention_modules(source.family, source.config)
    if not modules[0].endswith(".self_attn"):
        raise ConfigError(
            f"--kv writes scales beside X.self_attn, but {source.family.architecture} calls it {modules[0]}, where no "
            "engine looks for them; leave --kv out, and use `jaxserve calibrate-cache` and cache.scales"
        )
    return modules


class _Job:
    """One run of a job."""

    def __init__(
        self,
        source: Source,
        options: Options,
        texts: Texts,
        setting: Setting,
        work: Work,
        choices: dict[str, Choice],
        cache_modules: list[str],
        progress: Progress,
    ) -> None:
        self._source, self._options, self._texts, self._setting = source, options, texts, setting
        self._work, self._choices, self._cache_modules, self._progress = work, choices, cache_modules, progress
        self._streams = Streams(source.config, setting.dtype, setting.attention)
        self._calibration = self._steps(texts.calibration)
        self._judged = self._steps(texts.judged)

    def run(self) -> dict[str, Any]:
        config, depth = self._source.config, self._source.config.num_layers
        outer = self._source.arrays(None, _F32)
        if self._options.budget_bits is not None:
            self._choices = self._within_budget(outer, self._options.budget_bits)
        self._progress.begin("embedding the texts")
        rounded_outer, outer_tensors, outer_notes = self._round_outer(outer)
        calibration = self._streams.embed(rounded_outer, self._calibration)
        exact, found = (self._streams.embed(arrays, self._judged) for arrays in (outer, rounded_outer))
        tokens = sum(len(text.ids) for text in self._texts.calibration)
        kept = math.floor(tokens * config.head_dim * (1 - self._setting.quantile)) + 1 if self._cache_modules else 1
        layers, keys, values = [], [], []
        for layer in range(depth):
            self._say(layer, "reading")
            floats = self._source.arrays(layer, _F32)
            if not self._work.has(layer):
                self._round_layer(layer, floats, calibration)
            rounded = self._read_layer(layer)
            integers = self._rounded_inputs(layer)
            advance = functools.partial(self._streams.advance, layer, count=self._progress.count)
            self._say(layer, "running the text of the calibration")
            calibration, largest = advance(rounded, self._calibration, calibration, rounded=integers, kept=kept)
            self._say(layer, "running the text of the judgement")
            found, _ = advance(rounded, self._judged, found, rounded=integers)
            exact, _ = advance(floats, self._judged, exact)
            keys.append(np.asarray(largest.keys)[:, -1])
            values.append(np.asarray(largest.values)[:, -1])
            weights = self._work.notes(layer)["weights"]
            layers.append(
                {
                    "layer": layer,
                    "bits": self._bits(self._source.targets_of(layer)),
                    "state_error": self._state_error(exact, found),
                    "weights": weights,
                }
            )
        self._progress.begin("comparing next tokens")
        measured = summary(self._texts.judged, self._compare(outer, rounded_outer, exact, found))
        if not math.isfinite(measured["kl_mean"]):
            raise CheckpointError(
                f"{self._source.checkpoint.path}: the model gives numbers that are not finite on this text; try "
                "model.dtype float32"
            )
        ranges = CacheRanges(keys=_above_zero(keys), values=_above_zero(values)) if self._cache_modules else None
        if ranges is not None:
            outer_tensors |= self._cache_tensors(ranges)
        self._progress.begin("writing")
        self._work.write(depth, outer_tensors, outer_notes)
        report = self._report(measured, layers, outer_notes)
        self._finish(report, ranges, tokens)
        return report

    # The choice of schemes.

    def _within_budget(self, outer: Arrays, budget: float) -> dict[str, Choice]:
        """The choices, with some of int4 raised: measured with each unit alone rounded, in float layers."""
        units = units_of(list(self._source.targets.values()), self._choices)
        errors: dict[str, float] | None = self._work.get(ERRORS)
        if errors is None:
            errors, hidden = {}, self._streams.embed(outer, self._calibration)
            for layer in range(self._source.config.num_layers):
                self._say(layer, "measuring what int4 costs each of its weights")
                floats = self._source.arrays(layer, _F32)
                after, _ = self._streams.advance(layer, floats, self._calibration, hidden)
                of_layer = [unit for unit in units if unit.layer == layer]
                for number, unit in enumerate(of_layer):
                    arrays = self._with_unit_rounded(floats, unit)
                    changed, _ = self._streams.advance(layer, arrays, self._calibration, hidden)
                    errors[unit.key] = self._state_error(after, changed, self._calibration)
                    self._progress.count(number + 1, len(of_layer), unit.param)
                hidden = after
            self._work.put(ERRORS, errors)
        measured = [dataclasses.replace(unit, error=errors[unit.key]) for unit in units]
        return spend(budget, self._source.targets, self._choices, measured)

    def _with_unit_rounded(self, floats: Arrays, unit: Unit) -> Arrays:
        tensors = self._source.tensors_of(unit.layer, floats)
        replaced = {
            target.source: to_nearest(
                tensors[target.source],
                self._choices[target.source].storage,
                self._choices[target.source].scale_dtype,
            ).numbers()
            for target in unit.targets
        }
        return self._source.arrays(unit.layer, _F32, replaced)

    # Rounding.

    def _round_layer(self, layer: int, arrays: Arrays, hidden: Hidden) -> None:
        targets = [target for target in self._source.targets_of(layer) if target.source in self._choices]
        names = list(dict.fromkeys(target.param for target in targets if not target.is_expert))
        self._say(layer, "measuring what its products take in")
        inputs = self._streams.measure(layer, arrays, self._calibration, hidden, names, count=self._progress.count)
        grams = {name: np.asarray(found.gram, np.float32) for name, found in inputs.items()}
        stored = self._source.stored(layer)
        if self._options.method == "awq":
            self._say(layer, "searching for scales of inputs")
            arrays, grams = self._scaled(layer, arrays, inputs, grams, stored)
        tensors = self._source.tensors_of(layer, arrays)
        written: dict[str, np.ndarray] = {}
        notes: dict[str, Any] = {}
        self._say(layer, f"rounding ({self._options.method})")
        for number, (name, tensor) in enumerate(tensors.items()):
            if name in self._choices:
                target = self._source.targets[name]
                found, notes[target.module.name] = self._rounded(target, tensor, grams.get(target.param))
                written |= found
            elif np.array_equal(tensor, to_float32(stored[name])):
                written[name] = stored[name]
            else:
                written[name] = tensor.astype(stored[name].dtype)
            self._progress.count(number + 1, len(tensors), name)
        self._work.write(layer, written, {"weights": notes})

    def _rounded(
        self, target: Target, matrix: np.ndarray, gram: np.ndarray | None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The tensors of one weight, and what is to be said of it."""
        choice = self._choices[target.source]
        by_gptq = self._options.method == "gptq" and gram is not None
        if by_gptq:
            assert gram is not None
            rounded = gptq.solve(matrix, gram, choice.storage, choice.scale_dtype, damping=self._options.damping)
        else:
            rounded = to_nearest(matrix, choice.storage, choice.scale_dtype)
        error = None if gram is None else output_error(matrix, rounded.numbers(), gram)
        said = {
            "scheme": choice.scheme,
            "group": choice.storage.group,
            "method": "gptq" if by_gptq else "awq" if self._options.method == "awq" and gram is not None else "rtn",
            "bits": choice.bits(target.shape) / target.size,
            "error": error,
        }
        return tensors_of_weight(target.source, rounded, choice), said

    def _scaled(
        self,
        layer: int,
        arrays: Arrays,
        inputs: Mapping[str, Inputs],
        grams: Mapping[str, np.ndarray],
        stored: Mapping[str, np.ndarray],
    ) -> tuple[Arrays, dict[str, np.ndarray]]:
        """The layer with its inputs scaled by AWQ, where its structure lets it, and the inputs that it has then."""
        grams, config = dict(grams), self._source.config
        storages = {
            target.param: self._choices[target.source].storage
            for target in self._source.targets_of(layer)
            if target.source in self._choices
        }
        folds = folding.folds_of(config.layers[layer])
        for number, fold in enumerate(folds):
            consumers = [name for name in fold.consumers if name in grams]
            if not consumers:
                continue
            gram = grams[consumers[0]]
            magnitude = np.asarray(inputs[consumers[0]].magnitude) / max(1.0, float(inputs[consumers[0]].tokens))
            weights = [(arrays[name].reshape(-1, len(gram)), storages[name]) for name in consumers]
            scales = awq.search_scales(weights, gram, folding.shared_magnitude(fold, config, magnitude))
            dtype = next(iter(stored.values())).dtype
            for piece in self._source.plan.get(("layers", layer, fold.producer, "weight"), []):
                dtype = stored[piece.source].dtype
            arrays, scales = folding.apply(fold, config, arrays, scales, dtype)
            for name in consumers:
                grams[name] = grams[name] / scales / scales[:, None]
            self._progress.count(number + 1, len(folds), ", ".join(consumers))
        return arrays, grams

    def _round_outer(self, outer: Arrays) -> tuple[Arrays, dict[str, np.ndarray], dict[str, Any]]:
        """What is beside the layers: its parameters as they will be, their tensors, and notes."""
        stored, written, notes, replaced = self._source.stored(None), {}, {}, {}
        for name, tensor in stored.items():
            if name not in self._choices:
                written[name] = tensor
                continue
            choice = self._choices[name]
            matrix = to_float32(tensor)
            rounded = to_nearest(matrix, choice.storage, choice.scale_dtype)
            replaced[name] = rounded.numbers()
            written |= tensors_of_weight(name, rounded, choice)
            target = self._source.targets[name]
            notes[target.module.name] = {"scheme": choice.scheme, "bits": choice.bits(target.shape) / target.size}
        arrays = self._source.arrays(None, _F32, replaced) if replaced else outer
        return arrays, written, notes

    def _read_layer(self, layer: int) -> Arrays:
        """The parameters of a layer that is done, as its file has them."""
        tensors = self._work.tensors(layer)
        replaced = {}
        for path in self._source.paths(layer):
            for piece in self._source.plan[path]:
                name = piece.source
                if name in self._choices:
                    replaced[name] = read_back(name, self._choices[name], tensors)
                else:
                    tensor = tensors[name]
                    replaced[name] = tensor.read(tuple(slice(0, size) for size in tensor.shape))
        return self._source.arrays(layer, _F32, replaced)

    def _rounded_inputs(self, layer: int) -> frozenset[str]:
        """Parameters whose inputs are rounded to int8: those all of whose weights say so."""
        by_param: dict[str, list[bool]] = {}
        for target in self._source.targets_of(layer):
            choice = self._choices.get(target.source)
            by_param.setdefault(target.param, []).append(choice is not None and choice.how.rounds_inputs)
        return frozenset(name for name, found in by_param.items() if all(found))

    @property
    def _has_stale_ranges(self) -> bool:
        """The source says how large values are, which AWQ changes, and nothing measures them again."""
        of_source = self._source.checkpoint.path / FILE_NAME
        return self._options.method == "awq" and not self._cache_modules and of_source.is_file()

    # Measuring.

    def _steps(self, texts: Sequence[Text]) -> list[Step]:
        return list(whole_batches([text.ids for text in texts], self._setting.page_size))

    def _state_error(self, exact: Hidden, found: Hidden, steps: Sequence[Step] | None = None) -> float:
        """Of hidden states: the squared error over the squares."""
        difference = squares = 0.0
        for (batch, _), x, y in zip(self._judged if steps is None else steps, exact, found, strict=True):
            size = int(batch.q_starts[-1])
            wide = x[:size].astype(np.float64)
            difference += float(np.square(wide - y[:size].astype(np.float64)).sum())
            squares += float(np.square(wide).sum())
        return difference / squares if squares > 0 else 0.0

    def _compare(self, outer: Arrays, rounded_outer: Arrays, exact: Hidden, found: Hidden) -> list[np.ndarray]:
        """[T, 6] of each text."""
        left = list(self._texts.judged)
        columns = []
        for number, ((batch, tokens), x, y) in enumerate(zip(self._judged, exact, found, strict=True)):
            starts = np.asarray(batch.q_starts)
            rows = int((np.asarray(batch.context_lens) > 0).sum())
            texts, left = left[:rows], left[rows:]
            targets = np.zeros(len(tokens), np.int32)
            for row, text in enumerate(texts):
                targets[starts[row] : starts[row + 1]] = next_tokens(text)
            of_step = self._streams.compare((outer, rounded_outer), (x, y), batch, targets)
            columns += [of_step[starts[row] : starts[row + 1]] for row in range(rows)]
            self._progress.count(number + 1, len(self._judged))
        return columns

    def _bits(self, targets: Sequence[Target]) -> float:
        """Of a layer's weights, those that stay floats counted."""
        float_bits = {t.source: 8 * np.dtype(self._source.tensors[t.source].dtype).itemsize * t.size for t in targets}
        total = sum(
            self._choices[t.source].bits(t.shape) if t.source in self._choices else float_bits[t.source]
            for t in targets
        )
        return total / max(1, sum(t.size for t in targets))

    # Writing.

    def _cache_tensors(self, ranges: CacheRanges) -> dict[str, np.ndarray]:
        """One scale for the keys of a layer, and one for its values, as vLLM takes them; heads have theirs in
        cache_scales.json."""
        largest = np.float32(LARGEST["float8_e4m3fn"])
        found = {}
        for layer, module in enumerate(self._cache_modules):
            found[f"{module}.k_scale"] = np.asarray(ranges.keys[layer].max() / largest, np.float32).reshape(1)
            found[f"{module}.v_scale"] = np.asarray(ranges.values[layer].max() / largest, np.float32).reshape(1)
        return found

    def _report(
        self, measured: Mapping[str, Any], layers: list[dict[str, Any]], outer: Mapping[str, Any]
    ) -> dict[str, Any]:
        config, notes = self._source.config, []
        if self._source.kept_float:
            notes.append(
                f"{len(self._source.kept_float)} tensors of whole experts stay floats: no format here has them"
            )
        if self._options.method != "rtn" and any(
            target.is_expert for name, target in self._source.targets.items() if name in self._choices
        ):
            notes.append(f"experts are rounded to nearest: {self._options.method} needs the inputs of each expert")
        if self._has_stale_ranges:
            notes.append(f"{FILE_NAME} of the source is left out, since awq changes values; --kv measures them again")
        if self._options.method == "awq":
            kept = sorted(
                {
                    target.param
                    for name, target in self._source.targets.items()
                    if name in self._choices and target.layer is not None and not target.is_expert
                    if all(target.param not in fold.consumers for fold in folding.folds_of(config.layers[target.layer]))
                }
            )
            if kept:
                notes.append(f"inputs of {', '.join(kept)} are not scaled: nothing before them could take it back")
        return {
            "scheme": self._options.scheme,
            "method": self._options.method,
            "bits_per_weight": average_bits(self._source.targets, self._choices),
            "budget_bits": self._options.budget_bits,
            "tokens": sum(len(text.ids) for text in self._texts.calibration),
            "held_out": self._texts.held_out,
            "quality": dict(measured),
            "layers": layers,
            "beside_layers": dict(outer),
            "notes": notes,
        }

    def _finish(self, report: Mapping[str, Any], ranges: CacheRanges | None, tokens: int) -> None:
        table = quantization_config(self._source.targets.values(), self._choices, cache_scales=ranges is not None)
        others: dict[str, Any] = {QUALITY_NAME: report}
        checkpoint = self._source.checkpoint
        if ranges is not None:
            others[FILE_NAME] = ranges_table(ranges, {"tokens": tokens, "quantile": self._setting.quantile})
        self._work.finish(
            checkpoint.path,
            checkpoint.config | {"quantization_config": table},
            others,
            left_out=[FILE_NAME] if self._has_stale_ranges else [],
        )

    def _say(self, layer: int, doing: str) -> None:
        self._progress.begin(f"layer {layer + 1} of {self._source.config.num_layers}: {doing}")


def _above_zero(by_layer: Sequence[np.ndarray]) -> np.ndarray:
    """Ranges [L, K]; a head that is always 0 gets 1."""
    ranges = np.stack(by_layer).astype(np.float32)
    return np.where(ranges == 0, np.float32(1), ranges)
