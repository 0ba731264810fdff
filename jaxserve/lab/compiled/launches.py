"""What the host does in a step of a GPU that is not here, as XLA writes it down when it compiles.

XLA's program for the host is a list of thunks. What stands at its top is done by the host one after the other: a
launch of a CUDA graph or a kernel, a collective, or, for a conditional and each turn of a loop, a wait for the device.
"""

import dataclasses
import re
import tempfile
from collections import Counter
from pathlib import Path

from jaxserve.lab.compiled.ahead import AbsentModel
from jaxserve.runtime.compile import compile_all
from jaxserve.runtime.executables import make_jobs

_KIND = re.compile(r"\bk[A-Z]\w*")
WAITS = frozenset({"kConditional", "kWhile"})  # kinds for which the host reads a value that the device computes


def count_launches(absent: AbsentModel, name: str, *, num_pages: int, flags: bool = True) -> Counter[str]:
    """Thunks by kind at the top level of one executable, such as 'decode 64x64', of the first stage.

    Args:
      absent: a model on GPUs that are not here (`place_ahead`).
      num_pages: of the cache.
      flags: those of `runtime.xla_flags`; False: XLA's defaults.
    """
    assert absent.device.backend == "gpu", absent.device
    [job] = [j for j in make_jobs(absent.stages[0], absent.sizes, absent.attention, num_pages) if j.name == name]
    with tempfile.TemporaryDirectory(prefix="jaxserve-thunks-") as folder:
        options = {**(job.options if flags else {}), "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compile_all([dataclasses.replace(job, options=options)], 1, lambda *_: None, absent.stages[0].devices)
        [written] = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        lines = written.read_text().splitlines()
    found = [_KIND.search(line) for line in lines if line and not line[0].isspace()]
    return Counter(kind.group() for kind in found if kind is not None)
