"""The choice of what each parameter of a model is kept as: codes of its checkpoint, codes rounded at load, or floats.

`model.quantization` and its rules name a scheme for each weight. A checkpoint's own codes are kept where the products
take them. Weights that are fused into one parameter and have the same codes are kept as one, groups of 128 beside
groups of 96 in groups of 32; others run side by side, each in its own form, floats among them. Experts are in one
array: int4 beside int8 is int8 there, and where nothing holds all of them exactly, they are floats. None of it needs
more than the config.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jaxserve.config.schema import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.kernels.block_codes import SPAN
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage
from jaxserve.models.quantised.choosing import modules_of
from jaxserve.models.quantised.scheme import Module, ModuleKind, Scheme
from jaxserve.models.sharding import Axes
from jaxserve.models.weight_rules import Part
from jaxserve.models.weights import Path, Piece

_GROUP = 128  # of codes of four bits that are rounded at load
_LEAST_GROUP = 16  # smaller groups have more bytes of scales than they save in codes
_INTEGERS = ("int4", "int8")  # each fits into the next
_MOST_PARTS = 8  # of a fused weight
_WHOLE_NUMBERS = (*_INTEGERS, "float4_e2m1fn")
_CPU_BLOCK = 128  # inputs of a scale of activations on CPUs; elsewhere all of a token's: blocks would be slow products


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a scheme of `model.quantization` makes of a weight: of the layers, and of the output projection."""

    layers: Storage
    head: Storage
    activations: Arithmetic


_ROW_INT8, _ROW_FP8 = Storage(code="int8"), Storage(code="float8_e4m3fn")
_GROUP_INT4, _ROUNDED = Storage(code="int4", group=_GROUP), Arithmetic(activations="int8")
RECIPES: dict[str, Recipe] = {
    "int8": Recipe(layers=_ROW_INT8, head=_ROW_INT8, activations=FLOAT),
    "int8-a8": Recipe(layers=_ROW_INT8, head=_ROW_INT8, activations=_ROUNDED),
    "int4": Recipe(layers=_GROUP_INT4, head=_ROW_INT8, activations=FLOAT),
    "int4-a8": Recipe(layers=_GROUP_INT4, head=_ROW_INT8, activations=_ROUNDED),
    "fp8": Recipe(layers=_ROW_FP8, head=_ROW_FP8, activations=FLOAT),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """What the user asks for.

    Attributes:
      scheme: 'auto', 'none' or one of `RECIPES`.
      rules: regular expressions of whole names of modules (`model.layers.0.mlp.down_proj`), with 'none' or a scheme.
        The first that matches counts; weights that none matches have `scheme`.
    """

    scheme: str = "auto"
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)


def configured_quantisation(config: ModelConfig) -> Quantisation:
    """What a config asks for."""
    return Quantisation(scheme=config.quantization, rules=config.quantization_rules)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one parameter is kept as.

    Attributes:
      rounded: of the whole parameter, whose floats are rounded at load; None: the checkpoint has codes.
      storage: of the arrays on devices: the same numbers, in groups that divide a device's share. None: such groups
        would be too small, and the rounded numbers are kept as floats.
      arithmetic: of products.
      is_experts: the parameter has the matrices of all experts.
      parts: of a parameter whose weights run side by side, which has nothing of the above.
    """

    rounded: Storage | None
    storage: Storage | None
    arithmetic: Arithmetic
    is_experts: bool = False
    parts: "tuple[KeptPart, ...]" = ()

    @property
    def each(self) -> "tuple[Kept, ...]":
        """Itself, or its parts that are no floats."""
        return tuple(part.kept for part in self.parts if part.kept is not None) if self.parts else (self,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptPart:
    """One of the weights that run side by side in a parameter.

    Attributes:
      window: its slice of an axis of the parameter.
      kept: what it is kept as; None: floats.
      sources: names of its tensors in the files.
    """

    window: Part
    kept: Kept | None
    sources: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths of the last axis of one parameter: of the checkpoint's, and of one device's share."""

    whole: int
    local: int


def choose_kept(
    wanted: Quantisation,
    scheme: Scheme | None,
    plan: Mapping[Path, Sequence[Piece]],
    axes: Mapping[Path, Axes],
    sizes: Mapping[Path, Sizes],
    backend: str,
) -> dict[Path, Kept]:
    """What each parameter that is not kept in floats is kept as. `scheme`: of the checkpoint, None for floats.

    Raises ConfigError for a scheme that cannot be had of a quantised checkpoint, and for rules that match nothing.
    """
    modules = modules_of(plan)
    if scheme is not None and wanted.scheme not in ("auto", "none", "int8-a8"):
        raise ConfigError(
            f"model.quantization is {wanted.scheme!r}, but the checkpoint is quantised ({scheme.label}); set it to "
            "auto, which keeps the codes, to none, which widens them, to int8-a8, which rounds activations as well, "
            "or take the checkpoint without quantisation"
        )
    rules = Rules(
        wanted, [module.name for module in modules.values()], known=("none", *RECIPES), label="model.quantization_rules"
    )
    kept: dict[Path, Kept] = {}
    for path, pieces in plan.items():
        of_path = [modules.get(piece.source) for piece in pieces]
        if not of_path or None in of_path:
            continue
        named = [(module, rules.scheme_of(module.name)) for module in of_path if module is not None]
        chosen = [_storage(module, name, scheme, backend) for module, name in named]
        if "experts" not in axes[path]:
            chosen = [(_in_bytes(storage), arithmetic) for storage, arithmetic in chosen]
        else:  # products of experts have no codes in blocks
            chosen = [(_without_blocks(storage), arithmetic) for storage, arithmetic in chosen]
        found = _kept_of(pieces, chosen, sizes[path], is_rounded=scheme is None, axes=axes[path], backend=backend)
        if found is not None:
            kept[path] = found
    return kept


def _kept_of(
    pieces: Sequence[Piece],
    chosen: Sequence["_Chosen"],
    sizes: Sizes,
    *,
    is_rounded: bool,
    axes: Axes,
    backend: str,
) -> Kept | None:
    """What one parameter of these pieces is kept as."""
    is_experts = "experts" in axes
    if is_experts or all(piece.part is None for piece in pieces):
        return _kept_as_one(chosen, sizes, is_rounded=is_rounded, is_experts=is_experts, backend=backend)
    runs: list[list[int]] = []
    for place in sorted(range(len(pieces)), key=lambda at: _start_of(pieces[at])):
        own = chosen[place]
        if runs and _are_one(pieces[runs[-1][-1]], chosen[runs[-1][-1]], pieces[place], own):
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = []
    for run in runs:
        of_run = [chosen[place] for place in run]
        found = _kept_as_one(of_run, sizes, is_rounded=is_rounded, is_experts=False, backend=backend)
        first, last = (pieces[place].part for place in (run[0], run[-1]))
        assert first is not None and last is not None
        window = dataclasses.replace(first, stop=last.stop)
        parts.append(KeptPart(window=window, kept=found, sources=frozenset(pieces[place].source for place in run)))
    if len(parts) == 1:
        return parts[0].kept
    return (
        Kept(rounded=None, storage=None, arithmetic=FLOAT, parts=tuple(parts)) if any(p.kept for p in parts) else None
    )


def _start_of(piece: Piece) -> int:
    """Where its part begins, of any that are fused; counted from the end it comes after what is counted from 0."""
    assert piece.part is not None
    return piece.part.start if piece.part.start >= 0 else piece.part.start + _MOST_PARTS


def _are_one(last: Piece, before: "_Chosen", piece: Piece, own: "_Chosen") -> bool:
    """Whether two weights that follow one another are kept as one: the same codes, or floats."""
    (storage, arithmetic), (other, of_other) = own, before
    if storage is None or other is None:
        return storage is other
    if storage.ordered or other.ordered:
        return storage == other and arithmetic == of_other and last.source == piece.source
    same = (storage.code, storage.offsets, arithmetic) == (other.code, other.offsets, of_other)
    same = same and storage.blocks == other.blocks
    return same and (not storage.offsets or storage == other)


def _kept_as_one(
    chosen: Sequence["_Chosen"],
    sizes: Sizes,
    *,
    is_rounded: bool,
    is_experts: bool,
    backend: str,
) -> Kept | None:
    """What holds all of these weights. None: floats."""
    common = _common(chosen)
    if common is None or (is_experts and common.ordered):
        return None
    rounded = None
    if is_rounded:
        rounded = common = common.refined(sizes.whole)
    storage = common.refined(math.gcd(sizes.whole, sizes.local))
    if storage.group is not None and storage.group < _LEAST_GROUP:
        if rounded is None or (rounded.group or _LEAST_GROUP) < _LEAST_GROUP:
            return None
        storage = None
    return Kept(
        rounded=rounded, storage=storage, arithmetic=_arithmetic(chosen, storage, backend), is_experts=is_experts
    )


_Chosen = tuple[Storage | None, Arithmetic]  # of one weight; None: floats


class Rules:
    """The scheme of each module by its name: of the first pattern that is the whole name, or that of all others.

    Raises ConfigError for a pattern that is none, or matches no name, and for a scheme that is none of `known`.
    `label`: where the rules stand.
    """

    def __init__(self, wanted: Quantisation, names: Sequence[str], *, known: Sequence[str], label: str) -> None:
        self._default, self._label = wanted.scheme, label
        self._rules = [(self._compiled(pattern), name) for pattern, name in wanted.rules.items()]
        for pattern, name in self._rules:
            if name not in known:
                raise ConfigError(f"{label}: {pattern.pattern!r} has {name!r}; known: {', '.join(known)}")
            if not any(pattern.fullmatch(found) for found in names):
                near = difflib.get_close_matches(pattern.pattern, names, n=3, cutoff=0.0)
                raise ConfigError(
                    f"{label}: {pattern.pattern!r} is the whole name of no weight; near it are {', '.join(near)}"
                )

    def scheme_of(self, name: str) -> tuple[str, bool]:
        """The scheme of a module, and whether a rule names it."""
        for pattern, scheme in self._rules:
            if pattern.fullmatch(name):
                return scheme, True
        return self._default, False

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{self._label}: {pattern!r} is no regular expression: {error}") from error


def _storage(
    module: Module, named: tuple[str, bool], scheme: Scheme | None, backend: str
) -> tuple[Storage | None, Arithmetic]:
    """Of one weight; None: floats."""
    name, by_rule = named
    recipe = RECIPES.get(name)
    arithmetic = FLOAT if recipe is None else recipe.activations
    if name == "none" or module.kind is ModuleKind.ROUTER:
        return None, FLOAT
    if scheme is not None:
        found = scheme.format_of(module)
        storage = None if found is None else found.storage
        if module.kind is ModuleKind.EMBEDDING and storage is not None:
            # Rows of a table are looked up in the order of the hidden states, on accelerators with one scale each.
            storage = None if storage.ordered or (storage.group is not None and backend != "cpu") else storage
        return storage, arithmetic
    if recipe is None:
        return None, FLOAT
    if module.kind is ModuleKind.EMBEDDING:
        return (recipe.head if by_rule else None), arithmetic
    return (recipe.head if module.kind is ModuleKind.OUTER else recipe.layers), arithmetic


def _in_bytes(storage: Storage | None) -> Storage | None:
    """float4 as whole numbers of eight bits, twice its values: dense products have no float4."""
    if storage is None or storage.code != "float4_e2m1fn":
        return storage
    return dataclasses.replace(storage, code="int8")


def _without_blocks(storage: Storage | None) -> Storage | None:
    return None if storage is None else dataclasses.replace(storage, blocks=None)


def _common(chosen: Iterable[_Chosen]) -> Storage | None:
    """What holds all of them exactly; None: nothing does."""
    found = [storage for storage, _ in chosen]
    some = [storage for storage in found if storage is not None]
    codes = {storage.code for storage in some}
    if len(some) < len(found) or (len(codes) > 1 and not codes <= set(_INTEGERS)):
        return None
    groups = [storage.group for storage in some if storage.group is not None]
    return Storage(
        code=max(codes, key=lambda code: _INTEGERS.index(code) if code in _INTEGERS else 0),
        group=math.gcd(*groups) if groups else None,
        zeros=any(storage.zeros for storage in some),
        offsets=any(storage.offsets for storage in some),
        ordered=any(storage.ordered for storage in some),
        blocks=some[0].blocks if len({(storage.blocks, storage.group) for storage in some}) == 1 else None,
    )


def _arithmetic(chosen: Iterable[_Chosen], kept: Storage | None, backend: str) -> Arithmetic:
    """Of a parameter: floats, unless all its weights are whole numbers, as float4 is, whose activations are rounded.

    On CPUs, products with codes in blocks round them as llama.cpp does, with a scale for each 32 inputs
    (`scripts/bench_gguf_quality.py` measures what that costs).
    """
    if kept is not None and kept.blocks is not None and backend == "cpu":
        return Arithmetic(activations="int8", block=SPAN)
    arithmetics = {arithmetic for _, arithmetic in chosen}
    is_integer = all(storage is not None and storage.code in _WHOLE_NUMBERS for storage, _ in chosen)
    if len(arithmetics) > 1 or FLOAT in arithmetics or not is_integer:
        return FLOAT
    return Arithmetic(activations="int8", block=_CPU_BLOCK if backend == "cpu" else None)
