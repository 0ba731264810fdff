"""Block sizes by device kind, in the files `tuned/<device kind>.json`: measured ones, and counted ones.

Each implementation has its own heuristic for cases that are in no file, and its own checks of sizes that fit.

The commit is in the file because a size is a fact about one version of a kernel, and would outlive it in silence.
Counted sizes have the shortest time by the compiler's own schedule (`scripts/tune_kernels.py --by-count`), for devices
that nobody has measured yet.
"""

import dataclasses
import importlib.resources
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxserve.kernels.paged_attention import AttentionUse

Blocks = Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """The best sizes of one device kind.

    Attributes:
      device_kind: JAX's name of it.
      entries: `entry_name(...)` to the sizes, by the names the implementation gives them; measured.
      commit: the version of the kernels that was measured; '' for an empty table.
      counted: entries that were counted, which give way to measured ones.
      compilers: of each counted entry, the compiler whose schedule was counted, such as 'libtpu 0.0.42.1'.
    """

    device_kind: str
    entries: Mapping[str, Blocks]
    commit: str = ""
    counted: Mapping[str, Blocks] = dataclasses.field(default_factory=dict)
    compilers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def get(self, implementation: str, variant: str, use: AttentionUse) -> Blocks | None:
        """The sizes for one variant of an implementation, measured or else counted, or None."""
        name = entry_name(implementation, variant, use)
        return self.entries.get(name, self.counted.get(name))

    def origin(self, implementation: str, variant: str, use: AttentionUse) -> str:
        """Where the sizes come from, for a log line."""
        name = entry_name(implementation, variant, use)
        if name in self.entries:
            return f"measured at {self.commit or 'an unknown commit'}"
        if name in self.counted:
            return f"by count, {self.compilers.get(name, 'of an unknown compiler')}, never measured"
        return "by the heuristic"


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
    return read_table(source.read_text()) if source.is_file() else TunedTable(device_kind=device_kind, entries={})


def read_table(text: str) -> TunedTable:
    """The table of a file's text. A counted entry without sizes says that the heuristic's were not beaten."""
    found: dict[str, Any] = json.loads(text)
    counted = {name: about for name, about in found.get("counted", {}).items() if about["blocks"] is not None}
    return TunedTable(
        device_kind=found["device_kind"],
        entries=found["entries"],
        commit=found["commit"],
        counted={name: about["blocks"] for name, about in counted.items()},
        compilers={name: about["compiler"] for name, about in counted.items()},
    )
