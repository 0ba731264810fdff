"""The choice of what each parameter of a model is kept as: codes of its checkpoint, codes rounded at load, or floats.

`model.quantization` and its rules name a scheme for each weight. A checkpoint's own codes are kept where the products
take them. Weights that are fused into one parameter are kept in what holds all of them exactly: int4 beside int8 in
int8, groups of 128 beside groups of 96 in groups of 32. Where nothing does, or one of them is a float, the parameter is
one of floats. None of it needs more than the config.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jaxserve.config.schema import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage
from jaxserve.models.quantised.choosing import modules_of
from jaxserve.models.quantised.scheme import Module, ModuleKind, Scheme
from jaxserve.models.sharding import Axes
from jaxserve.models.weights import Path, Piece

_GROUP = 128  # of codes of four bits that are rounded at load
_LEAST_GROUP = 16  # smaller groups have more bytes of scales than they save in codes
_INTEGERS = ("int4", "int8")  # each fits into the next
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
    """

    rounded: Storage | None
    storage: Storage | None
    arithmetic: Arithmetic


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
    kept = {}
    for path, pieces in plan.items():
        of_path = [modules.get(piece.source) for piece in pieces]
        if not of_path or None in of_path or "experts" in axes[path]:
            continue
        chosen = [_storage(module, rules.scheme_of(module.name), scheme) for module in of_path if module is not None]
        common = _common([storage for storage, _ in chosen])
        if common is None:
            continue
        rounded = common if scheme is None else None
        if rounded is not None:
            rounded = common = common.refined(sizes[path].whole)
        storage = common.refined(math.gcd(sizes[path].whole, sizes[path].local))
        if storage.group is not None and storage.group < _LEAST_GROUP:
            if rounded is None or (rounded.group or _LEAST_GROUP) < _LEAST_GROUP:
                continue
            storage = None
        kept[path] = Kept(rounded=rounded, storage=storage, arithmetic=_arithmetic(chosen, backend))
    return kept


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


def _storage(module: Module, named: tuple[str, bool], scheme: Scheme | None) -> tuple[Storage | None, Arithmetic]:
    """Of one weight; None: floats."""
    name, by_rule = named
    recipe = RECIPES.get(name)
    arithmetic = FLOAT if recipe is None else recipe.activations
    if name == "none" or module.kind is ModuleKind.ROUTER:
        return None, FLOAT
    if scheme is not None:
        found = scheme.format_of(module)
        storage = None if found is None else found.storage
        if module.kind is ModuleKind.EMBEDDING and storage is not None and storage.group is not None:
            storage = None  # rows of a table are looked up with one scale each
        return storage, arithmetic
    if recipe is None:
        return None, FLOAT
    if module.kind is ModuleKind.EMBEDDING:
        return (recipe.head if by_rule else None), arithmetic
    return (recipe.head if module.kind is ModuleKind.OUTER else recipe.layers), arithmetic


def _common(storages: Iterable[Storage | None]) -> Storage | None:
    """What holds all of them exactly; None: nothing does."""
    found = list(storages)
    some = [storage for storage in found if storage is not None]
    codes = {storage.code for storage in some}
    if len(some) < len(found) or (len(codes) > 1 and not codes <= set(_INTEGERS)):
        return None
    groups = [storage.group for storage in some if storage.group is not None]
    return Storage(
        code=max(codes, key=lambda code: _INTEGERS.index(code) if code in _INTEGERS else 0),
        group=math.gcd(*groups) if groups else None,
        zeros=any(storage.zeros for storage in some),
    )


def _arithmetic(chosen: Iterable[tuple[Storage | None, Arithmetic]], backend: str) -> Arithmetic:
    """Of a parameter: floats, unless all its weights are integers whose activations are rounded."""
    arithmetics = {arithmetic for _, arithmetic in chosen}
    is_integer = all(storage is not None and storage.code in _INTEGERS for storage, _ in chosen)
    if len(arithmetics) > 1 or FLOAT in arithmetics or not is_integer:
        return FLOAT
    return Arithmetic(activations="int8", block=_CPU_BLOCK if backend == "cpu" else None)
