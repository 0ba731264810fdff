"""One process of two that loads its share of a checkpoint, and says what that took. Run by `test_loading_memory`.

Arguments: directory, dtype, port of the coordinator, process number. Prints JSON: bytes of the share, and how much the
memory of the process grew at most while loading. On a CPU the share itself is part of that.
"""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np

from jaxserve.config.schema import HostsConfig, ParallelConfig
from jaxserve.hosts.distributed import join_processes, leave_processes
from jaxserve.models import load_model
from jaxserve.runtime.mesh import make_meshes

_STATUS = Path("/proc/self/status")


def memory_bytes(name: str) -> int:
    """A line of /proc/self/status."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024


def main() -> None:
    directory, dtype, port, process_id = sys.argv[1:]
    hosts = HostsConfig(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=int(process_id))
    join_processes(hosts)
    ((mesh,),) = make_meshes(ParallelConfig(tensor=2), jax.devices())
    jax.block_until_ready(jax.device_put(np.ones(2**20, np.float32), jax.local_devices()[0]))  # pools of threads
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    base_bytes = memory_bytes("VmRSS")
    loaded = load_model(directory, dtype=dtype, mesh=mesh)
    jax.block_until_ready(loaded.state)
    shard_bytes = sum(s.data.nbytes for leaf in jax.tree.leaves(loaded.state) for s in leaf.addressable_shards)
    print(json.dumps({"shard": shard_bytes, "peak": memory_bytes("VmHWM") - base_bytes}), flush=True)
    leave_processes()


if __name__ == "__main__":
    main()
