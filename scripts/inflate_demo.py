"""The demo model in the shape of a larger one: the same answers at the cost of 125 million parameters.

    python scripts/inflate_demo.py DIR

Benchmarks of speculation need real text, whose next tokens can be guessed, and a step that takes as long as that of a
model somebody would serve. So the demo model's matrices are put into larger ones (hidden 256 -> 768, layers 5 -> 12,
query heads 4 -> 12, vocabulary 1160 -> 32000) so that nothing new reaches the output:

* New hidden features are zero everywhere: tables and output projections have zero rows for them. Root mean squares are
  then taken over three times as many numbers, so norms have weights and epsilon of 1/sqrt(3) and 1/3.
* New heads, feed-forward columns and layers have random inputs and outputs of zero.
* New tokens repeat rows of the table. Their logits equal those of the token that they repeat, and the least index of
  equal logits is chosen, so they are never answered. This holds for greedy answers alone.

Greedy answers are those of the demo model, but for the rounding of sums. Its EAGLE-3 head is inflated in the same way.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxserve.models.safetensors_files import open_tensors

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "jaxserve/demo_model"
HEAD = ROOT / "benchmarks/draft_eagle3_demo"
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _FFN, _VOCAB = 768, 12, 12, 4, 2048, 32000
_STD = 0.02
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def ensure_inflated(folder: Path) -> Path:
    """A checkpoint directory in `folder`, float32, with the head in its folder "draft"; made first if it is not there.

    Its name has a digest of this file and of what it is made from, so that none of another model is taken for it.
    """
    copied = [DEMO / name for name in _COPIED]
    sources = [Path(__file__), DEMO / "config.json", DEMO / "model.safetensors", *copied, *sorted(HEAD.iterdir())]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    path = folder / f"inflated-demo-{digest}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / path.name
        (made / "draft").mkdir(parents=True)
        _write_model(made)
        _write_head(made / "draft")
        os.rename(made, path)
    return path


def _write_model(folder: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    old, rng = _Old(DEMO), np.random.default_rng(0)
    group, old_group = _HEADS // _KV_HEADS, config["num_attention_heads"] // config["num_key_value_heads"]
    head_dim = config["head_dim"]
    # A query head belongs to the key head at its place over the size of a group.
    heads = [head // old_group * group + head % old_group for head in range(config["num_attention_heads"])]
    query_rows = np.concatenate([np.arange(head * head_dim, (head + 1) * head_dim) for head in heads])

    def random(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, _STD, (rows, columns)).astype(np.float32)

    def inputs(name: str, rows: int, places: np.ndarray | None = None) -> np.ndarray:
        """A matrix that reads hidden states: old rows at `places`, by default the first ones, random ones elsewhere."""
        new = random(rows, _HIDDEN)
        found = old.get(name)
        if found is not None:
            new[np.arange(len(found)) if places is None else places] = np.pad(
                found, ((0, 0), (0, _HIDDEN - found.shape[1]))
            )
        return new

    def outputs(name: str, columns: int, places: np.ndarray | None = None) -> np.ndarray:
        """A matrix whose rows are hidden features: zero but for the old ones, whose inputs are at `places`."""
        new = np.zeros((_HIDDEN, columns), np.float32)
        found = old.get(name)
        if found is not None:
            new[: len(found), np.arange(found.shape[1]) if places is None else places] = found
        return new

    def norm(name: str) -> np.ndarray:
        found = old.get(name)
        new = np.zeros(_HIDDEN, np.float32)
        if found is not None:
            new[: len(found)] = found / math.sqrt(_HIDDEN / len(found))
        else:
            new[:] = 1.0
        return new

    table = old["model.embed_tokens.weight"]
    rows = table[np.arange(_VOCAB) % len(table)]
    tensors = {
        "model.embed_tokens.weight": np.pad(rows, ((0, 0), (0, _HIDDEN - table.shape[1]))),
        "model.norm.weight": norm("model.norm.weight"),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        tensors |= {
            f"{name}.weight": norm(f"{name}.weight")
            for name in (f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
        }
        tensors |= {
            f"{attention}.q_proj.weight": inputs(f"{attention}.q_proj.weight", _HEADS * head_dim, query_rows),
            f"{attention}.k_proj.weight": inputs(f"{attention}.k_proj.weight", _KV_HEADS * head_dim),
            f"{attention}.v_proj.weight": inputs(f"{attention}.v_proj.weight", _KV_HEADS * head_dim),
            f"{attention}.o_proj.weight": outputs(f"{attention}.o_proj.weight", _HEADS * head_dim, query_rows),
            f"{mlp}.gate_proj.weight": inputs(f"{mlp}.gate_proj.weight", _FFN),
            f"{mlp}.up_proj.weight": inputs(f"{mlp}.up_proj.weight", _FFN),
            f"{mlp}.down_proj.weight": outputs(f"{mlp}.down_proj.weight", _FFN),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "intermediate_size": _FFN,
        "vocab_size": _VOCAB,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / _HIDDEN,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in _COPIED:
        shutil.copyfile(DEMO / name, folder / name)


def _write_head(folder: Path) -> None:
    """Products that read hidden states read each of them from its new place; those that write them add zeros behind.

    Its vocabulary stays that of the demo model: the first tokens of the new one.
    """
    old = _Old(HEAD)
    config = json.loads((HEAD / "config.json").read_text())
    layer = config["transformer_layer_config"]
    width = layer["hidden_size"]

    def wider(array: np.ndarray, *axes: int) -> np.ndarray:
        """Each run of `width` features along these axes becomes one of the new width."""
        for axis in axes:
            runs = np.moveaxis(array, axis, 0)
            runs = runs.reshape(-1, width, *runs.shape[1:])
            runs = np.pad(runs, ((0, 0), (0, _HIDDEN - width), *(((0, 0),) * (runs.ndim - 2))))
            array = np.moveaxis(runs.reshape(-1, *runs.shape[2:]), 0, axis)
        return np.ascontiguousarray(array)

    axes = {"fc": (0, 1), "o_proj": (0,), "down_proj": (0,)}
    tensors: dict[str, np.ndarray] = {}
    for name in old.names:
        array = old[name]
        if array.ndim == 1:
            tensors[name] = wider(array, 0) / np.float32(math.sqrt(_HIDDEN / width))
        else:
            tensors[name] = wider(array, *axes.get(name.split(".")[-2], (1,)))
    tensors |= {"d2t": np.zeros(config["draft_vocab_size"], np.int64), "t2d": np.zeros(_VOCAB, np.bool_)}
    tensors["t2d"][: config["draft_vocab_size"]] = True
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"target_hidden_size": _HIDDEN, "torch_dtype": "float32"}
    layer |= {"hidden_size": _HIDDEN, "vocab_size": _VOCAB, "rms_norm_eps": layer["rms_norm_eps"] * width / _HIDDEN}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


class _Old:
    """Tensors of a directory by name, in float32."""

    def __init__(self, folder: Path) -> None:
        self._tensors = open_tensors(folder)
        self.names = sorted(self._tensors)

    def get(self, name: str) -> np.ndarray | None:
        return self[name] if name in self._tensors else None

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return tensor.read((slice(None),) * len(tensor.shape)).astype(np.float32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    print(ensure_inflated(parser.parse_args().directory))
    sys.exit(0)
