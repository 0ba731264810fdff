"""Measured block sizes by device kind, in the files `tuned/<device kind>.json`.

Each implementation has its own heuristic for cases that were not measured, and its own checks of sizes that fit.

The commit is in the file because a size is a fact about one version of a kernel, and would outlive it in silence.
"""

import dataclasses
import importlib.resources
import json
import re
from collections.abc import Mapping

from jaxserve.kernels.paged_attention import AttentionUse

Blocks = Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """The best sizes of one device kind.

    Attributes:
      device_kind: JAX's name of it.
      entries: `entry_name(...)` to the sizes, by the names the implementation gives them.
      commit: the version of the kernels that was measured; '' for an empty table.
    """

    device_kind: str
    entries: Mapping[str, Blocks]
    commit: str = ""

    def get(self, implementation: str, variant: str, use: AttentionUse) -> Blocks | None:
        """The sizes for one variant of an implementation, or None when it was not measured."""
        return self.entries.get(entry_name(implementation, variant, use))


def entry_name(implementation: str, variant: str, use: AttentionUse) -> str:
    """The name of an entry: all that block sizes depend on, e.g. 'mosaic_tpu/decode/32x8x128/page128/bfloat16'."""
    spec = use.spec
    heads = f"{spec.num_query_heads}x{spec.num_kv_heads}x{spec.head_dim}"
    return f"{implementation}/{variant}/{heads}/page{use.page_size}/{use.cache_dtype}"


def file_name(device_kind: str) -> str:
    """The file of a device kind: 'NVIDIA H200' has nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


def load_table(device_kind: str) -> TunedTable:
    """The table that ships for this device kind; an empty one if there is none."""
    source = importlib.resources.files("jaxserve.kernels") / "tuned" / file_name(device_kind)
    if not source.is_file():
        return TunedTable(device_kind=device_kind, entries={})
    found = json.loads(source.read_text())
    return TunedTable(device_kind=found["device_kind"], entries=found["entries"], commit=found["commit"])
