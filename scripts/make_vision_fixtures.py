"""Makes the tiny checkpoints of tests/fixtures/vision and the answers of Hugging Face transformers to pictures.

    python3 -m venv oracle && oracle/bin/pip install torch transformers safetensors pillow
    oracle/bin/python scripts/make_vision_fixtures.py [--out tests/fixtures/vision] [NAME ...]

The tests read the files that are checked in. Each directory is a Hugging Face checkpoint plus `oracle.npz`:

    sizes         int32 [P, 2]      width and height of each picture, which `picture` makes
    pixels        str [P]           SHA-256 of the processor's float32 patches
    grids         int32 [P, 3]
    towers        int32 [K]         pictures that went through the tower
    embeds_<k>    float32 [M, D]    every TOWER_STRIDE-th of its tokens
    prompt_<i>    int32 [S]         token ids, with one placeholder for each picture
    pictures_<i>  int32 [N]         its pictures
    positions_<i> int32 [3, S']     once placeholders are repeated; families with three positions
    delta_<i>     int32             likewise
    logits_<i>    float32 [S', V]
    greedy_<i>    int32 [64]
    versions      str

The margins are those of make_fixtures.py.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from make_fixtures import MIN_MARGIN, NUM_GREEDY, SIZES, fill
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TOWER_STRIDE = 23
IMAGE = 120
# Pictures of the prompts, then those of the processor and the tower: from one token to the largest, thin ones.
SIZES_OF_PICTURES = (
    *((56, 56), (100, 60), (37, 91), (2, 400), (200, 140)),
    *((28, 28), (29, 27), (13, 13), (1, 1), (1, 200), (200, 1), (5600, 28), (28, 5600), (300, 300), (301, 299)),
    *((640, 480), (1023, 769), (1568, 1568), (1568, 28), (33, 1568), (700, 701), (2000, 1500)),
)
TOWERS = (0, 1, 2, 3, 4, 5, 9, 11, 12, 13, 15, 17, 19)
PROMPTS: tuple[tuple[list[int], list[int]], ...] = (
    ([5, 17, 33, 8, 60, 99, 3], []),
    ([IMAGE, 121, 7, 44, 15], [0]),
    ([9, 31, 80, 14, 121, IMAGE, 122], [1]),  # `generate` counts on from a last picture as from its corner
    ([11, 121, IMAGE, 122, 121, IMAGE, 122, 70, 4], [2, 4]),
    ([21, 5, IMAGE, 66, IMAGE, 40, IMAGE, 12], [1, 3, 1]),
)


def picture(width: int, height: int) -> Image.Image:
    """A picture that is nothing but whole numbers, so that every machine makes the same."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * a + y * b + (x * y) // c + (x ^ y) * 3) % 256 for a, b, c in ((3, 5, 7), (2, 9, 11), (7, 1, 5))]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixture:
    """One checkpoint. `rewrite`: makes config.json look as published ones do."""

    model: type[transformers.PreTrainedModel]
    config: transformers.PretrainedConfig
    processor: Any
    rewrite: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config


TEXT = SIZES | {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 3]}
QWEN = {"image_token_id": IMAGE, "vision_start_token_id": 121, "vision_end_token_id": 122, "video_token_id": 123}
VISION = {"depth": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen2-VL's published files have the fields of the text beside `vision_config`, and an old name of the rope."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "dtype", "layer_types"):
        text.pop(name, None)
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    config["vision_config"].pop("rope_parameters", None)
    config["torch_dtype"] = config.pop("dtype")
    return text | config


FIXTURES = {
    "qwen2_vl": Fixture(
        model=Qwen2VLForConditionalGeneration,
        config=Qwen2VLConfig(
            text_config=TEXT | {"rope_parameters": MROPE},
            vision_config=VISION | {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
            tie_word_embeddings=True,
            **QWEN,
        ),
        processor=Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=1568 * 1568),
        rewrite=flat,
    ),
    "qwen2_5_vl": Fixture(
        model=Qwen2_5_VLForConditionalGeneration,
        config=Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": MROPE},
            vision_config=VISION
            | {"hidden_size": 32, "intermediate_size": 44, "out_hidden_size": 48, "fullatt_block_indexes": [1]}
            | {"window_size": 112},
            **QWEN,
        ),
        processor=Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=1568 * 1568),
    ),
    "llava": Fixture(
        model=LlavaForConditionalGeneration,
        config=LlavaConfig(
            text_config=LlamaConfig(**(TEXT | {"rms_norm_eps": 1e-5})),
            vision_config=CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=2,
                image_size=56,
                patch_size=14,
                projection_dim=24,
            ),
            image_token_id=IMAGE,
            image_seq_length=16,
        ),
        processor=CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
    ),
}


def write_checkpoint(fixture: Fixture, directory: Path, seed: int) -> None:
    """Saves the checkpoint and the settings of its processor."""
    shutil.rmtree(directory, ignore_errors=True)
    model = fixture.model._from_config(fixture.config, dtype=torch.float32)
    fill(model, seed)
    for name, weight in model.named_parameters():
        if "patch_embed" in name:  # the kernel of a convolution sums over more than its last axis
            weight.data.mul_((weight[0, 0, 0].numel() / weight[0].numel()) ** 0.5 * 4).copy_(weight.bfloat16())
    model.generation_config.eos_token_id = [2]
    model.to(torch.bfloat16).save_pretrained(directory)
    file = directory / "config.json"
    config = fixture.rewrite(json.loads(file.read_text()))
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    fixture.processor.save_pretrained(directory)


class Oracle:
    """A checkpoint as transformers runs it."""

    def __init__(self, fixture: Fixture, directory: Path) -> None:
        self.processor = fixture.processor
        self.model = fixture.model.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        self.has_grid = "grid" in " ".join(self.processor.model_input_names)

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Patches, and grids where the family has them."""
        return dict(self.processor(list(pictures), return_tensors="pt")) if pictures else {}

    @torch.no_grad()
    def embed(self, one: Image.Image) -> np.ndarray:
        """Embeddings of the tokens of a picture."""
        found = self.model.model.get_image_features(**self.inputs([one]))
        found = getattr(found, "pooler_output", found)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in found]).float().numpy()

    @torch.no_grad()
    def ask(self, token_ids: list[int], pictures: list[Image.Image]) -> dict[str, Any]:
        """Logits, greedy tokens, positions, and the least margin."""
        counts = iter([len(self.embed(one)) for one in pictures])
        expanded = [t for token in token_ids for t in [token] * (next(counts) if token == IMAGE else 1)]
        tokens = torch.tensor(expanded)[None]
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs |= self.inputs(pictures)
        found: dict[str, Any] = {}
        if self.has_grid:
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
            positions, delta = self.model.model.get_rope_index(
                tokens, inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
            )
            found |= {"positions": positions[:, 0].numpy().astype(np.int32), "delta": np.int32(int(delta))}
        found["logits"] = self.model(**inputs).logits[0].numpy().astype(np.float32)
        result = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=NUM_GREEDY,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.stack(result.logits)[:, 0].topk(2).values
        found["greedy"] = result.sequences[0, len(expanded) :].numpy().astype(np.int32)
        found["margin"] = float((top[:, 0] - top[:, 1]).min())
        return found


def hash_of(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels, np.float32).tobytes()).hexdigest()


def make(name: str, out: Path) -> None:
    """Makes one fixture, trying seeds until every greedy choice is clear."""
    fixture, directory = FIXTURES[name], out / name
    pictures = [picture(*size) for size in SIZES_OF_PICTURES]
    for seed in range(100):
        write_checkpoint(fixture, directory, seed)
        oracle = Oracle(fixture, directory)
        margin, answers = 1.0, {}
        for i, (token_ids, used) in enumerate(PROMPTS):
            found = oracle.ask(token_ids, [pictures[n] for n in used])
            margin = min(margin, found.pop("margin"))
            answers |= {f"prompt_{i}": np.int32(token_ids), f"pictures_{i}": np.int32(used)}
            answers |= {f"{key}_{i}": value for key, value in found.items()}
            if margin < MIN_MARGIN:
                break
        if margin >= MIN_MARGIN:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps every greedy choice {MIN_MARGIN} ahead")
    inputs = [oracle.inputs([one]) for one in pictures]
    answers |= {
        "sizes": np.int32(SIZES_OF_PICTURES),
        "pixels": np.array([hash_of(found["pixel_values"].numpy()) for found in inputs]),
        "towers": np.int32(TOWERS),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, pillow {PIL.__version__}",
    }
    if oracle.has_grid:
        answers["grids"] = np.int32([found["image_grid_thw"][0].tolist() for found in inputs])
    for k in TOWERS:
        answers[f"embeds_{k}"] = oracle.embed(pictures[k])[::TOWER_STRIDE]
    np.savez_compressed(directory / "oracle.npz", **answers)
    size = sum(f.stat().st_size for f in directory.iterdir())
    distinct = len({int(t) for i in range(len(PROMPTS)) for t in answers[f"greedy_{i}"]})
    print(f"{name}: seed {seed}, margin {margin:.4f}, {distinct} distinct tokens, {size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FIXTURES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures/vision"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in args.names or FIXTURES:
        make(name, args.out)


if __name__ == "__main__":
    main()
