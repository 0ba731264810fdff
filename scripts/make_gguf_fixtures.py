"""Makes tests/fixtures/gguf: files as llama.cpp's own library writes them, and what it reads in them.

    python3 -m venv oracle && oracle/bin/pip install gguf==0.19.0
    oracle/bin/python scripts/make_gguf_fixtures.py [--out DIRECTORY]

    blocks.gguf   each element type: X.weight in it, X.expected the float32 numbers of gguf's `dequantize`
    llama.gguf    a model of one layer with grouped heads, in llama.cpp's order of rows; llama.npz has q and k in
                  Hugging Face's order
    names.json    for each architecture the names of its tensors, from Hugging Face's to GGUF's

Nothing else here needs the library: the tests read the files that are checked in.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

PACKED = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4)  # types that the library packs
RANDOM = (Type.Q4_K, Type.Q5_K, Type.Q6_K)  # types that it only unpacks: random bytes
HALVES = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}  # their bytes that are float16
FIXTURES = {  # those of Hugging Face's names, by architecture
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3",),
    "gpt-oss": ("gpt_oss",),
    "llama": ("llama", "llama_mha_tied_bias", "mixtral"),
    "olmo2": ("olmo2",),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
    "starcoder2": ("starcoder2",),
}
# Experts of a layer in one tensor, by the names that the converter asks for.
STACKED = {
    "model.layers.0.mlp.experts.": ("model.layers.0.mlp.experts.", ("gate_proj", "up_proj", "down_proj")),
    "model.layers.0.block_sparse_moe.experts.": ("layers.0.feed_forward.experts.", ("w1", "w2", "w3")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures/gguf"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    write_blocks(options.out / "blocks.gguf", rng)
    write_llama(options.out, rng)
    names = {name: {k: v for f in made for k, v in names_of(name, f).items()} for name, made in FIXTURES.items()}
    (options.out / "names.json").write_text(json.dumps(names, indent=1, sort_keys=True) + "\n")


def write_blocks(path: Path, rng: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_custom_alignment(64)
    for kind in (*PACKED, *RANDOM):
        if kind in PACKED:
            packed = gguf.quantize(rng.normal(size=(3, 96)).astype(np.float32), kind)
        else:
            packed = rng.integers(0, 256, (2, 2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
            for start in HALVES[kind]:
                scales = rng.normal(size=packed.shape[:2]).astype(np.float16)
                packed[..., start : start + 2] = scales[..., None].view(np.uint8)
            packed = packed.reshape(2, -1)
        add(writer, f"{kind.name}.weight", packed, kind)
        writer.add_tensor(f"{kind.name}.expected", gguf.dequantize(packed, kind).astype(np.float32))
    for kind in (Type.F16, Type.BF16):
        packed = gguf.quantize(rng.normal(size=(3, 40)).astype(np.float32), kind)
        add(writer, f"{kind.name}.weight", packed, kind)
        writer.add_tensor(f"{kind.name}.expected", gguf.dequantize(packed, kind).astype(np.float32))
    finish(writer)


def write_llama(out: Path, rng: np.random.Generator) -> None:
    """Two key/value heads for four query heads of 12: rows of q and k are reordered by heads, v is as it was."""
    hidden, size, vocab, head, heads, kv_heads = 32, 64, 40, 12, 4, 2
    writer = gguf.GGUFWriter(str(out / "llama.gguf"), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    shapes = {
        "token_embd": (vocab, hidden),
        "output": (vocab, hidden),
        "blk.0.attn_q": (heads * head, hidden),
        "blk.0.attn_k": (kv_heads * head, hidden),
        "blk.0.attn_v": (kv_heads * head, hidden),
        "blk.0.attn_output": (hidden, heads * head),
        "blk.0.ffn_gate": (size, hidden),
        "blk.0.ffn_up": (size, hidden),
        "blk.0.ffn_down": (hidden, size),
    }
    original = {}
    for name, shape in shapes.items():
        weight = (rng.normal(size=shape) * 0.1).astype(np.float32)
        kind = Type.F16 if name == "blk.0.attn_k" or shape[1] % 32 else Type.Q8_0
        weight = gguf.dequantize(gguf.quantize(weight, kind), kind).astype(np.float32)
        if name in ("blk.0.attn_q", "blk.0.attn_k"):
            original[name.removeprefix("blk.0.")] = weight
            weight = in_pairs(weight, head)
        add(writer, f"{name}.weight", gguf.quantize(weight, kind), kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, hidden).astype(np.float32))
    finish(writer)
    np.savez_compressed(out / "llama.npz", **original)


def in_pairs(weight: np.ndarray, head: int) -> np.ndarray:
    """llama.cpp's order of rows: row i of a head, then row i + head / 2."""
    rows = [
        start + i + half * head // 2
        for start in range(0, len(weight), head)
        for i in range(head // 2)
        for half in range(2)
    ]
    return weight[rows]


def add(writer: gguf.GGUFWriter, name: str, packed: np.ndarray, kind: Type) -> None:
    if kind == Type.F16:
        writer.add_tensor(name, packed.view(np.float16))
    else:
        writer.add_tensor(name, packed.view(np.uint8), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def names_of(architecture: str, fixture: str) -> dict[str, str]:
    """Of the tensors of the first layer that has each, and of those outside the layers."""
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, 1)
    names = set()
    for file in Path("tests/fixtures", fixture).glob("*.safetensors"):
        with file.open("rb") as opened:
            names |= json.loads(opened.read(int.from_bytes(opened.read(8), "little"))).keys() - {"__metadata__"}
    inner = {".".join(["model.layers.0", *name.split(".")[3:]]) if ".layers." in name else name for name in names}
    asked = {name: f"{name}.weight" if name.endswith(".sinks") else name for name in inner if ".experts." not in name}
    for start, (asked_start, leaves) in STACKED.items():
        if any(name.startswith(start) for name in inner):
            ends = [f"{leaf}.weight" for leaf in leaves]
            ends += [f"{leaf}.bias" for leaf in leaves] if architecture == "gpt-oss" else []
            asked |= {f"{start}{end}": f"{asked_start}{end}" for end in ends}
    found = {name: table.get_name(to, try_suffixes=(".weight", ".bias")) for name, to in sorted(asked.items())}
    # Qwen 3's fixture has a layer without experts, whose maps GGUF has no name for.
    assert all(given for name, given in found.items() if architecture != "qwen3moe" or "_proj" not in name), found
    return {name: given for name, given in found.items() if given is not None}


if __name__ == "__main__":
    main()
