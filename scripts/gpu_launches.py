"""What the host does in a step of GPUs that are not here, with the flags of `runtime.xla_flags` and without.

    python scripts/gpu_launches.py --json benchmarks/gpu_launches.json

Each step is compiled for the card, with two layers of the model, embedding and sampling whole; XLA's list of thunks
says what the host launches one after the other, and where it waits for the device. Needs the extra `aot`. Some minutes.
"""

import argparse
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from record import write_record

from jaxserve.config import load_config
from jaxserve.lab.compiled.ahead import place_ahead
from jaxserve.lab.compiled.launches import WAITS, count_launches
from jaxserve.lab.workloads.tables import make_console
from jaxserve.models.checkpoint import configured_checkpoint
from jaxserve.models.loading import decoder_config

CONFIGS = Path(__file__).parents[1] / "configs"
LAYERS, ROWS, TOKENS = 2, 64, 256
CASES = (
    ("llama3.1-8b-h200", "h100:1", {}),
    ("llama3.1-8b-h200", "a100:1", {}),
    ("llama3.1-8b-h200", "b200:1", {}),
    ("llama3.1-8b-h200", "l40s:1", {}),
    ("llama3.1-8b-h200", "h100:1", {"speculation.method": "ngram"}),
    ("llama3.1-8b-h200", "h100:1", {"cache.dtype": "float8_e4m3fn"}),
    ("qwen3-30b-a3b-h200", "a100:1", {}),
    ("qwen3-30b-a3b-h200", "h200:1", {}),
    ("gpt-oss-20b-h200", "h200:1", {}),
    ("llama3.3-70b-h200-2", "h200:2", {}),
)


def measure(name: str, topology: str, settings: dict[str, Any], step: str, *, flags: bool) -> Counter[str]:
    """Thunks of one step by kind, with the table's flags or with XLA's defaults."""
    overrides = {
        "sched.max_rows": ROWS,
        "sched.max_step_tokens": TOKENS,
        "runtime.token_buckets": [TOKENS],
        "runtime.row_buckets": [ROWS],
        "model.max_len": 4096,
        **settings,
    }
    config = load_config(CONFIGS / f"{name}.yaml", overrides, environ={}).config
    model = decoder_config(configured_checkpoint(config.model))[1]
    absent = place_ahead(config, dataclasses.replace(model, layers=model.layers[:LAYERS]), topology=topology)
    return count_launches(absent, step, num_pages=1024, flags=flags)


def main() -> None:
    """Measures all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    console = make_console()
    for name, topology, settings in CASES:
        for step in (f"decode {ROWS}x{ROWS}", f"mixed {TOKENS}x{ROWS}"):
            if settings and step.startswith("decode"):
                continue  # a speculating step has another name, and codes of the cache change no loop
            found = {
                word: measure(name, topology, settings, step, flags=flags)
                for word, flags in (("default", False), ("flags", True))
            }
            results.append(
                {
                    "config": name,
                    "topology": topology,
                    "settings": settings,
                    "step": step,
                    **{word: dict(sorted(kinds.items())) for word, kinds in found.items()},
                }
            )
            words = [
                f"{word}: {sum(kinds.values())} launches, {sum(kinds[kind] for kind in WAITS)} that wait"
                for word, kinds in found.items()
            ]
            console.print(f"{name} on {topology}, {step} {settings or ''}: {'; '.join(words)}")
    if options.json is not None:
        write_record(options.json, {"layers": LAYERS, "results": results})


if __name__ == "__main__":
    main()
