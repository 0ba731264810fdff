"""`Scheme` and `Format`: which weights of a checkpoint are quantised, and how each is stored.

A scheme is read from the config; a format names the sidecar tensors of a weight and opens them.
"""

import abc
import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.kernels.storage import Storage
from jaxserve.models.hf_config import INERT, HfConfig
from jaxserve.models.quantised.slices import QuantisedTensor
from jaxserve.models.safetensors_files import TensorSource

_WEIGHT = ".weight"


class ModuleKind(enum.Enum):
    """What a weight does, as far as the tools that quantise distinguish it."""

    LAYER = "a linear map of a layer"
    OUTER = "a linear map beside the layers, such as the output projection"
    ROUTER = "the gate of experts"
    EMBEDDING = "a table of embeddings"
    EXPERTS = "all experts of a layer in one tensor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One weight that could be quantised. `name`: of the module, as `model.layers.0.self_attn.q_proj`."""

    name: str
    kind: ModuleKind

    @property
    def torch_class(self) -> str:
        """The class that a config may name in place of the module."""
        by_kind = {ModuleKind.EMBEDDING: "Embedding", ModuleKind.EXPERTS: "Experts"}
        return by_kind.get(self.kind, "Linear")


class Format(abc.ABC):
    """How one weight is stored. Names below are of the float tensor that the weight would be: `X.weight`.

    Attributes:
      bits: of one code.
      in_major: the weight rules ask for inputs before outputs; every weight else is [out, in].
      may_add_bias: the tool writes biases of zeros for modules without one.
    """

    bits: int
    in_major = False
    may_add_bias = False

    @property
    @abc.abstractmethod
    def storage(self) -> Storage | None:
        """What holds the same numbers in memory as codes; None: nothing does, and the weight is widened."""

    @abc.abstractmethod
    def required(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that must be there in place of `name`; `name` is among them where codes have it."""

    def optional(self, name: str) -> tuple[str, ...]:
        """Names of tensors that may be there, too."""
        del name
        return ()

    @abc.abstractmethod
    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> QuantisedTensor:
        """The weight. All required tensors are in `tensors`.

        Raises CheckpointError when element types or shapes disagree.
        """


class Scheme(abc.ABC):
    """How one checkpoint is quantised.

    Attributes:
      label: the method and its settings in a few words.
      notes: sentences about what of the checkpoint is not used.
      ignored: regular expressions of tensor names that carry no weights.
      kv_dtype: the type of a KV cache that scales in the files would be made for; None: they are not used.
    """

    def __init__(
        self, label: str, notes: Iterable[str] = (), ignored: Iterable[str] = (), kv_dtype: str | None = None
    ) -> None:
        self.label, self.notes, self.ignored, self.kv_dtype = label, tuple(notes), tuple(ignored), kv_dtype

    @abc.abstractmethod
    def format_of(self, module: Module) -> Format | None:
        """The format of a module; None: it is not quantised."""

    @property
    @abc.abstractmethod
    def formats(self) -> tuple[Format, ...]:
        """All that a module may have."""

    def check_modules(self, modules: Iterable[Module]) -> None:
        """Raises CheckpointError for rules of the config that match none of the modules."""
        del modules


class MethodConfig(HfConfig):
    """The table of a quantisation method in a config."""

    def check_all_read(self, architecture: str, inert: Iterable[str]) -> None:
        unread = sorted(self._values.keys() - self._read - INERT - set(inert))
        if unread:
            said = ", ".join(f"{name} = {self._values[name]!r}" for name in unread)
            self.fail(
                f"{said}: no reader of {architecture} knows what this changes; if it changes nothing, give "
                "model.overrides a quantization_config without it"
            )

    def one_of(self, name: str, default: Any, *allowed: Any) -> Any:
        """The value of a field that must be one of `allowed`; `default` where it is absent."""
        value = self.get(name, default)
        if value not in allowed:
            self.fail(f"{name} is {value!r}, which is not supported; known: {', '.join(map(repr, allowed))}")
        return value

    def group_size(self, name: str, default: int) -> int | None:
        """Inputs of a group; None, written -1: all."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            self.fail(f"{name} is {value!r}, but must be a whole number of at least 1, or -1 for one group")
        return None if value == -1 else value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty where the field is absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(f"{name} is {value!r}, but must be a list of names")
        return tuple(value)


def beside(name: str, suffix: str) -> str:
    """The name of a sidecar: `X.weight` and 'qzeros' are `X.qzeros`."""
    return f"{module_name(name)}.{suffix}"


def module_name(name: str) -> str:
    """`X` of `X.weight`."""
    return name.removesuffix(_WEIGHT)
