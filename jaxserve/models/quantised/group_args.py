"""The `weights` table of one group of a compressed-tensors config."""

import dataclasses
from typing import NoReturn

from jaxserve.models.quantised.scheme import MethodConfig

_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_INERT = ("observer", "observer_kwargs", "is_mx", "scale_dtype", "zp_dtype")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupArgs:
    """How the weights of a group are quantised.

    Attributes:
      config: the table, for messages.
      format: name of the format.
      type: int or float.
      bits: of one code.
      symmetric: there are no zeros.
      strategy: what has a scale of its own.
      group: inputs of a scale, for the strategies group and tensor_group.
      block: outputs and inputs of a scale, for the strategy block.
      by_activation: inputs are in groups by their activations, and `weight_g_idx` says in which.
    """

    config: MethodConfig
    format: str
    type: str
    bits: int
    symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    by_activation: bool

    @classmethod
    def read(cls, config: MethodConfig, name: str) -> "GroupArgs":
        """Raises CheckpointError for a field that is unknown or out of range."""
        strategy = config.one_of("strategy", "tensor", *_STRATEGIES)
        block = config.get("block_structure")
        if isinstance(block, str):
            block = [int(size) for size in block.split("x") if size.isdigit()]
        sizes = [size for size in block if type(size) is int and size > 0] if isinstance(block, list) else []
        if strategy == "block" and len(sizes) != 2:
            config.fail(f"block_structure is {block!r}, but must be two whole numbers, such as [128, 128]")
        group = config.group_size("group_size", -1)
        if strategy in ("group", "tensor_group") and group is None:
            config.fail(
                f"group_size is {config.get('group_size')!r}, but strategy {strategy!r} needs one of at least 1"
            )
        config.require("dynamic", False, None)
        actorder = config.one_of("actorder", None, None, False, True, "group", "weight", "static", "dynamic")
        config.get("zp_dtype")
        read = cls(
            config=config,
            format=name,
            type=config.one_of("type", "int", "int", "float"),
            bits=config.integer("num_bits"),
            symmetric=config.flag("symmetric", True),
            strategy=strategy,
            group=group,
            block=(sizes[0], sizes[1]) if strategy == "block" else None,
            by_activation=actorder in ("group", "dynamic", True),
        )
        config.check_all_read("compressed-tensors", _INERT)
        return read

    def fail(self, message: str) -> NoReturn:
        self.config.fail(f"format {self.format!r}: {message}")

    def require(self, *, type: str, bits: tuple[int, ...], strategy: tuple[str, ...], group: int | None = None) -> None:
        """Raises CheckpointError where the group has other settings than these; `group` None: any group size."""
        if self.type != type:
            self.fail(f"type is {self.type!r}, but must be {type!r}")
        if self.bits not in bits:
            self.fail(f"num_bits is {self.bits}, which is not supported; known: {', '.join(map(str, bits))}")
        if self.strategy not in strategy:
            self.fail(f"strategy is {self.strategy!r}, which is not supported; known: {', '.join(strategy)}")
        if group is not None and self.group != group:
            self.fail(f"group_size is {self.group}, but must be {group}")

    @property
    def grid(self) -> tuple[int | None, int | None]:
        """Outputs and inputs of one scale; None: all."""
        if self.strategy == "block":
            assert self.block is not None, self
            return self.block
        return {"tensor": (None, None), "channel": (1, None)}.get(self.strategy, (1, self.group))
