"""Makes tests/fixtures/written: what transformers reads of the checkpoints that `jaxserve quantize` writes.

    python scripts/make_written_fixtures.py --write CHECKPOINTS          in the environment of jaxserve
    python3 -m venv oracle && oracle/bin/pip install torch transformers safetensors compressed-tensors
    oracle/bin/python scripts/make_written_fixtures.py --read CHECKPOINTS [--out DIRECTORY]

The first writes a checkpoint for each scheme, of the tiny Llama of the tests. The second loads each with
transformers and compressed-tensors, and stores two of the weights that they unpack, and the logits of a prompt.
Nothing else here needs these: the tests read the files that are checked in.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

SCHEMES = {
    "int8": {},
    "int8-a8": {},
    "fp8": {},
    "int4": {"group": 16},
    "mixed": {"scheme": "int4", "group": 16, "rules": {r".*\.down_proj": "int8", r"model\.layers\.0\.mlp\..*": "fp8"}},
}
MODULES = ("model.layers.1.self_attn.k_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj")
PROMPT = np.arange(3, 43)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures/written"))
    options = parser.parse_args()
    if options.write is not None:
        write(options.write)
    if options.read is not None:
        read(options.read, options.out)


def write(directory: Path) -> None:
    """Rounded to nearest, which is the same to the bit on every machine."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/quantise"))
    from quantise_parts import llama, run, write_texts

    with tempfile.TemporaryDirectory() as work:
        data, source = write_texts(Path(work) / "texts.jsonl", 128, count=2), llama(Path(work) / "source")
        for name, changes in SCHEMES.items():
            run(source, directory / name, data, **({"scheme": name} | changes))


def read(directory: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    for name in SCHEMES:
        model = AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(torch.from_numpy(PROMPT[None])).logits[0].float().numpy()
        found = {module: _weight(model.get_submodule(module)) for module in MODULES}
        np.savez_compressed(out / f"{name}.npz", logits=logits, **found)
        kinds = {type(model.get_submodule(module)).__name__ for module in MODULES}
        print(name, json.dumps({"logits": float(np.abs(logits).max()), "modules": sorted(kinds)}))


def _weight(module: object) -> np.ndarray:
    """The numbers that a module multiplies with."""
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weight = module.weight
    if weight.dtype.is_floating_point and weight.dtype.itemsize > 1:
        return weight.detach().float().numpy()
    return dequantize(weight, module.weight_scale, args=module.quantization_scheme.weights).detach().float().numpy()


if __name__ == "__main__":
    main()
