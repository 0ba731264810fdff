"""The schemes that a weight can have in a file, and the choice of one for each weight from what the user asks for."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.kernels.storage import CODES, Storage
from jaxserve.models.quantised.scheme import ModuleKind
from jaxserve.models.quantised.storing import Quantisation, Rules
from jaxserve.quantise.source import Source, Target

METHODS = ("rtn", "gptq", "awq")
GROUPS = (128, 64, 32)  # of int4 where none is given: the first that divides the inputs of all its weights
_LEAST = 16  # smaller groups have more bits of scales than they save; vLLM's kernels end at 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a weight lies in a file of compressed-tensors.

    Attributes:
      format: of compressed-tensors.
      code: of `kernels.storage.CODES`.
      grouped: a scale for each group of inputs, and not for each row.
      rounds_inputs: products round what they take in to int8, each token by its largest magnitude.
    """

    format: str
    code: str
    grouped: bool = False
    rounds_inputs: bool = False


# vLLM reads weights of 8 bits without rounded inputs in pack-quantized alone, and those with rounded inputs in
# int-quantized alone.
SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(format="pack-quantized", code="int8"),
    "int8-a8": Scheme(format="int-quantized", code="int8", rounds_inputs=True),
    "int4": Scheme(format="pack-quantized", code="int4", grouped=True),
    "fp8": Scheme(format="float-quantized", code="float8_e4m3fn"),
}
RAISED = "int8"  # what a budget raises weights of int4 to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asks for.

    Attributes:
      scheme: of the linear maps of layers, a name of `SCHEMES`.
      method: of `METHODS`.
      group: inputs of a scale of int4; None: the first of `GROUPS` that divides the inputs of all such weights.
      rules: regular expressions of whole names of modules, with a scheme or 'none'; the first that matches counts.
      head: of the output projection; 'none' or 'int8'.
      embedding: of the table of embeddings; 'none' or 'int8', a scale for each row.
      budget_bits: bits of a rounded weight on average, scales counted; None: as the scheme has them.
      cache_scales: scales of keys and values are measured and written, too.
      damping: of GPTQ: what is added to the diagonal of the Hessian, of its mean.
    """

    scheme: str
    method: str = "rtn"
    group: int | None = None
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    head: str = "none"
    embedding: str = "none"
    budget_bits: float | None = None
    cache_scales: bool = False
    damping: float = 0.01

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name, value, known in (
            ("--scheme", self.scheme, tuple(SCHEMES)),
            ("--method", self.method, METHODS),
            ("--head", self.head, ("none", "int8")),
            ("--embedding", self.embedding, ("none", "int8")),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; known: {', '.join(known)}")
        if self.group is not None and self.group < 1:
            raise ConfigError(f"--group is {self.group}, but a group has at least one input")
        if not 0 < self.damping < 1:
            raise ConfigError(f"--damping is {self.damping}, but must lie between 0 and 1, such as 0.01")
        if self.budget_bits is not None and self.scheme != "int4":
            raise ConfigError(
                f"--budget-bits raises weights of int4 to {RAISED}, but --scheme is {self.scheme}; set it to int4, or "
                "leave the budget out"
            )


def read_rules(given: Sequence[str]) -> dict[str, str]:
    """Rules as they are written, NAME=SCHEME. Raises ConfigError."""
    rules = {}
    for text in given:
        pattern, equals, scheme = text.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"--rule is {text!r}, but must be NAME=SCHEME, such as '.*\\.down_proj=int8'")
        rules[pattern] = scheme
    return rules


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one weight becomes.

    Attributes:
      scheme: a name of `SCHEMES`.
      storage: of its codes.
      scale_dtype: of its scales in the file.
    """

    scheme: str
    storage: Storage
    scale_dtype: str

    @property
    def how(self) -> Scheme:
        return SCHEMES[self.scheme]

    def bits(self, shape: tuple[int, int]) -> int:
        """Of a weight [out, in] in a file, its scales counted."""
        num_scales = shape[0] * (shape[1] // self.storage.group if self.storage.group else 1)
        return shape[0] * shape[1] * CODES[self.storage.code][0] + num_scales * 8 * np.dtype(self.scale_dtype).itemsize


def choose(source: Source, options: Options) -> dict[str, Choice]:
    """What each weight becomes, by its name in the files; those that stay floats are not there.

    Raises ConfigError for rules that match nothing, groups that do not divide, and options that would have no effect.
    """
    wanted = Quantisation(scheme=options.scheme, rules=options.rules)
    names = [target.module.name for target in source.targets.values()]
    rules = Rules(wanted, names, known=("none", *SCHEMES), label="--rule")
    schemes: dict[str, str] = {}
    for name, target in source.targets.items():
        scheme, by_rule = rules.scheme_of(target.module.name)
        if not by_rule:
            scheme = _by_kind(target, scheme, options)
        elif target.module.kind is ModuleKind.ROUTER and scheme != "none":
            raise ConfigError(f"--rule: {target.module.name} is the gate of experts, which stays a float")
        elif target.module.kind is ModuleKind.EMBEDDING and scheme not in ("none", "int8"):
            raise ConfigError(f"--rule: {target.module.name} is a table of embeddings, which can be int8 or none")
        if scheme != "none":
            schemes[name] = scheme
    kinds = {target.module.kind for target in source.targets.values()}
    if options.head != "none" and source.config.tied_embeddings:
        raise ConfigError(
            f"--head is {options.head}, but the output projection of this model is its table of embeddings; use "
            "--embedding, which rounds both"
        )
    assert ModuleKind.EMBEDDING in kinds, kinds
    if not schemes:
        raise ConfigError("no weight would be rounded: --rule gives all of them none")
    grouped = [source.targets[name] for name, scheme in schemes.items() if SCHEMES[scheme].grouped]
    group = _group(grouped, options.group)
    return {name: choice_of(scheme, group, _scale_dtype(source, name, scheme)) for name, scheme in schemes.items()}


def choice_of(scheme: str, group: int | None, scale_dtype: str) -> Choice:
    how = SCHEMES[scheme]
    return Choice(
        scheme=scheme, storage=Storage(code=how.code, group=group if how.grouped else None), scale_dtype=scale_dtype
    )


def _by_kind(target: Target, scheme: str, options: Options) -> str:
    """Of a weight that no rule names."""
    if target.module.kind is ModuleKind.EMBEDDING:
        return options.embedding if target.param == "embedding" else "none"
    if target.module.kind is ModuleKind.OUTER:
        return options.head if target.param == "lm_head" else "none"
    return scheme if target.module.kind is ModuleKind.LAYER else "none"


def _scale_dtype(source: Source, name: str, scheme: str) -> str:
    """Engines keep the scales of packed words in the dtype of activations, and others in float32."""
    return source.tensors[name].dtype if SCHEMES[scheme].format == "pack-quantized" else "float32"


def _group(targets: list[Target], given: int | None) -> int | None:
    """Inputs of a scale of int4; None: no weight has groups. Raises ConfigError."""
    if not targets:
        if given is not None:
            raise ConfigError(f"--group is {given}, but no weight is int4; leave it out")
        return None
    fits = [group for group in (*GROUPS, _LEAST) if not any(target.shape[1] % group for target in targets)]
    if given is None and fits and fits[0] != _LEAST:
        return fits[0]
    group = GROUPS[-1] if given is None else given
    undivided = [target for target in targets if target.shape[1] % group]
    if not undivided:
        return group
    first = undivided[0]
    others = f", and {len(undivided) - 1} weights more" if len(undivided) > 1 else ""
    remedy = f"take --group {fits[0]}" if fits else "no group of 16 or more does for all weights"
    raise ConfigError(
        f"groups of {group} inputs do not divide the {first.shape[1]} of {first.module.name}{others}; {remedy}, or "
        "give such weights int8 by a --rule"
    )
