"""Whether memory stays flat over many loads of LoRA adapters, and what a load takes.

    python scripts/bench_adapter_loads.py [--loads 10000] [--json benchmarks/lora_loads.json]

The demo model in float32, with one slot and memory of the host for two adapters. Random adapters of rank 4, in all
modules, are loaded in turn under four names, so that each load puts another one in the place of what its name had. A
token is drawn with each, and every tenth time with the adapter of another name, whose weights have given way by then
and are read again. Memory is what the process has after a tenth of the loads, and after each further tenth.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import write_record
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.lab.bench.rates import machine_rates
from jaxserve.lab.workloads.tables import make_console
from jaxserve.models import Partition, decoder_config
from jaxserve.models.adapters.placing import AdapterReader
from jaxserve.models.checkpoint import read_checkpoint, resolve_model_path

RANK, MAX_RANK, NAMES, SOURCES, AGAIN = 4, 8, 4, 7, 10
OVERRIDES = {
    "model.path": "demo",
    "model.dtype": "float32",
    "model.max_len": 64,
    "cache.num_pages": 16,
    "sched.max_rows": 1,
    "sched.max_step_tokens": 16,
    "adapters.slots": 1,
    "adapters.max_rank": MAX_RANK,
}


def write_adapter(directory: Path, seed: int) -> Path:
    """Of all projections of the demo model."""
    rng, tensors = np.random.default_rng(seed), {}
    for file in sorted(Path(resolve_model_path("demo")).glob("*.safetensors")):
        for name, array in load_file(file).items():
            if array.ndim == 2 and name.endswith("_proj.weight"):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, array.shape[1]), np.float32) * 0.02
                tensors[f"{module}.lora_B.weight"] = rng.standard_normal((array.shape[0], RANK), np.float32) * 0.02
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def resident_mib() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(num_loads: int, root: Path) -> dict[str, Any]:
    paths = [write_adapter(root / f"{number}", number) for number in range(SOURCES)]
    family, model = decoder_config(read_checkpoint(resolve_model_path("demo")))
    num_bytes = AdapterReader(family, Partition.of(model, 1), np.dtype(np.float32), MAX_RANK).num_bytes
    llm = LLM.from_config(None, {**OVERRIDES, "adapters.host_bytes": 2 * num_bytes}, progress=False)
    llm.wait_until_built()
    sampling = SamplingParams(max_tokens=1, temperature=0)
    mib, load_s, begin_s = [], 0.0, time.perf_counter()
    for number in range(num_loads):
        name, other = f"many-{number % NAMES}", f"many-{(number + 1) % NAMES}"
        before_s = time.perf_counter()
        llm.load_adapter(name, paths[number % SOURCES], replace=number >= NAMES)
        load_s += time.perf_counter() - before_s
        llm.generate([[5, 6, 7]], sampling, adapter=name, use_tqdm=False)
        if number >= NAMES and number % AGAIN == 0:
            llm.generate([[5, 6, 7]], sampling, adapter=other, use_tqdm=False)
        if (number + 1) % max(num_loads // 10, 1) == 0:
            mib.append(resident_mib())
    return {
        "loads": num_loads,
        "adapter_bytes": num_bytes,
        "load_ms": 1000 * load_s / num_loads,
        "minutes": (time.perf_counter() - begin_s) / 60,
        "resident_mib": mib,
        "growth_mib": mib[-1] - mib[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = measure(args.loads, Path(root))
    make_console().print(result)
    if args.json is not None:
        write_record(args.json, result, rates=machine_rates(), repeats=1)


if __name__ == "__main__":
    main()
