"""Vision models beside Hugging Face transformers: pixels, grids and positions equal, embeddings and logits within 1e-4.

Chunks end at every place of a picture, and the decoder is cut over devices.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import hf_oracle
import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from jaxserve.config.schema import ParallelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models import load_model, load_trainable, load_trainable_tower
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder import PictureInputs
from jaxserve.models.loading import one_device_mesh
from jaxserve.models.tower_loading import PlannedTower, plan_tower, tower_of
from jaxserve.runtime.mesh import make_meshes
from jaxserve.values.content import Picture
from jaxserve.vision import PictureLimits, PictureProcessor, find_processor, read_preprocessor

VISION = hf_oracle.FIXTURES / "vision"
NAMES = ("qwen2_vl", "qwen2_5_vl", "llava")
STRIDE = 23  # TOWER_STRIDE of scripts/make_vision_fixtures.py
TOLERANCE = 1e-4
LARGE = 600  # patches; each bucket of more is a compile


def picture(width: int, height: int) -> Image.Image:
    """As scripts/make_vision_fixtures.py makes it."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * a + y * b + (x * y) // c + (x ^ y) * 3) % 256 for a, b, c in ((3, 5, 7), (2, 9, 11), (7, 1, 5))]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


class Vision:
    """A fixture: its processor, its tower, and what transformers said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoint = read_checkpoint(directory)
        found = find_processor(self.checkpoint.config, read_preprocessor(directory), PictureLimits(), str(directory))
        assert found is not None
        self.processor: PictureProcessor = found
        with np.load(directory / "oracle.npz") as file:
            self.oracle: Mapping[str, np.ndarray] = dict(file)

    @functools.cached_property
    def tower(self) -> PlannedTower:
        planned = plan_tower(
            self.checkpoint,
            mean=self.processor.mean,
            std=self.processor.std,
            dtype=np.dtype("float32"),
            mesh=one_device_mesh(jax.local_devices()[0]),
        )
        assert planned is not None
        return planned

    def weights(self) -> tuple[jax.Array, ...]:
        return self.tower.fill(one_device_mesh(jax.local_devices()[0]))

    @functools.cached_property
    def _encode(self):
        planned = self.tower
        weights = self.weights()
        encode = jax.jit(lambda w, pixels, arrays: tower_of(planned.graphdef, planned.state, w)(pixels, arrays))
        return functools.partial(encode, weights)

    def picture(self, number: int) -> Picture:
        return self.processor.process(picture(*self.oracle["sizes"][number].tolist()))

    def embed(self, one: Picture, room: int = 0) -> np.ndarray:
        """Embeddings of a picture in the smallest bucket, or in one with `room` for more patches."""
        config = self.tower.config
        bucket = one.num_patches if config.grid is not None else -(-(one.num_patches + room) // 256) * 256
        pixels = np.zeros((bucket, config.num_values), np.uint8)
        pixels[: one.num_patches] = np.frombuffer(one.pixels, np.uint8).reshape(one.num_patches, -1)
        found = np.asarray(self._encode(pixels, config.module.inputs(config, one.grid, bucket)))
        assert found.shape == (config.num_tokens(bucket), config.out_size)
        assert np.isfinite(found).all()
        return found[: one.num_tokens]

    def prompt(self, number: int) -> tuple[np.ndarray, list[Picture], tuple[np.ndarray, int] | None]:
        """Expanded tokens of a prompt, its pictures, and positions."""
        pictures = [self.picture(n) for n in self.oracle[f"pictures_{number}"]]
        token_ids, placed = self.processor.expand(self.oracle[f"prompt_{number}"].tolist(), pictures)
        return np.asarray(token_ids, np.int32), pictures, self.processor.positions(len(token_ids), placed)


@functools.cache
def vision(name: str) -> Vision:
    return Vision(VISION / name)


def as_floats(made: Vision, one: Picture) -> np.ndarray:
    """Pixels as the processor of transformers returns them: scaled, normalised, and in its order."""
    config, processor = made.tower.config, made.processor
    values = np.frombuffer(one.pixels, np.uint8).reshape(one.num_patches, 3, -1)
    values = (values.astype(np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.asarray(numbers, np.float32)[:, None] for numbers in (processor.mean, processor.std))
    values = (values - mean) / std
    if config.grid is None:
        return np.repeat(values[:, :, None], config.frames, axis=2)
    rows, columns = config.grid
    return values.reshape(rows, columns, 3, config.patch_size, config.patch_size).transpose(2, 0, 3, 1, 4)


@pytest.mark.parametrize("name", NAMES)
def test_pixels_and_grids_equal_transformers(name: str) -> None:
    made = vision(name)
    for number, expected in enumerate(made.oracle["pixels"]):
        one = made.picture(number)
        found = hashlib.sha256(np.ascontiguousarray(as_floats(made, one)).tobytes()).hexdigest()
        assert found == str(expected), made.oracle["sizes"][number]
        if "grids" in made.oracle:
            assert list(one.grid) == made.oracle["grids"][number].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_embeddings_equal_transformers(name: str, large: bool) -> None:
    made = vision(name)
    for number in made.oracle["towers"]:
        one = made.picture(number)
        if (one.num_patches > LARGE) is large:
            error = np.abs(made.embed(one)[::STRIDE] - made.oracle[f"embeds_{number}"]).max()
            assert error < TOLERANCE, (made.oracle["sizes"][number], error)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_padding_changes_no_embedding(name: str) -> None:
    made = vision(name)
    one = made.picture(1)
    assert np.abs(made.embed(one) - made.embed(one, room=256)).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("qwen2_vl", 3),
        ("qwen2_5_vl", 8),
        ("llava", 2),
    ],
)
def test_whole_models_equal_transformers(name: str, devices: int) -> None:
    """Logits at every position and 64 greedy tokens; chunks of one prompt end at every place of its picture."""
    made = vision(name)
    mesh = make_meshes(ParallelConfig(tensor=devices), jax.devices())[0][0]
    model = load_model(made.directory, dtype="float32", mesh=mesh)
    numbers = range(sum(key.startswith("prompt_") for key in made.oracle))
    prompts, rows, pool = [], [], [np.zeros((0, model.config.hidden_size), np.float32)]
    for number in numbers:
        token_ids, pictures, positions = made.prompt(number)
        if positions is not None:
            np.testing.assert_array_equal(positions[0], made.oracle[f"positions_{number}"])
            assert positions[1] == made.oracle[f"delta_{number}"]
        slots, first = np.full(len(token_ids), -1, np.int32), sum(map(len, pool))
        is_picture = token_ids == made.processor.placeholder_id
        slots[is_picture] = first + np.arange(is_picture.sum())
        pool += [made.embed(one) for one in pictures]
        prompts.append(token_ids)
        rows.append((slots, positions))
    whole = np.concatenate(pool)
    pictures = [hf_oracle.RowPictures(pool=whole, slots=slots, positions=at) for slots, at in rows]
    driver = hf_oracle.Driver(model, num_rows=len(prompts), max_len=256, page_size=16, pictures=pictures)
    lens = [len(prompt) for prompt in prompts]
    single = 2  # cut at every token, before, behind and in its picture
    for cuts in (
        [[] for _ in prompts],
        [[13, 26, 31] for _ in prompts],
        [list(range(1, n)) if number == single else [] for number, n in enumerate(lens)],
    ):
        got = driver.prefill(prompts, cuts)
        for number, logits in enumerate(got):
            expected = made.oracle[f"logits_{number}"]
            tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()) / 8)
            assert np.abs(logits - expected).max() < tolerance, (number, cuts[number])
    tokens = driver.greedy(lens, [int(logits[-1].argmax()) for logits in got], 64)
    for number, row in enumerate(tokens):
        np.testing.assert_array_equal(row, made.oracle[f"greedy_{number}"])


def changed(tmp_path: Path, tensors: Mapping[str, np.ndarray | None] = {}, **fields: object) -> Vision:
    """The first fixture with other tensors (None: without), and other fields of its tower in config.json."""
    directory = tmp_path / "changed"
    shutil.copytree(VISION / "qwen2_vl", directory)
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] |= fields
    (directory / "config.json").write_text(json.dumps(config))
    if tensors:
        file = directory / "model.safetensors"
        found = {name: value for name, value in {**load_file(file), **tensors}.items() if value is not None}
        save_file(found, file)
    return Vision(directory)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 64}, "embeddings have 64 numbers, but hidden_size is 48"),
        ({"num_heads": 3}, "no multiple of 4 times"),
        ({"something": 1}, "something = 1"),
        ({"in_channels": 1}, "in_channels is 1"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "axial"),
    ],
)
def test_towers_that_are_not_implemented_are_refused(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        _ = changed(tmp_path, {}, **fields).tower


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"visual.blocks.1.mlp.fc1.bias": None}, r"1 weights are missing: visual\.blocks\.1\.mlp\.fc1\.bias"),
        ({"visual.other": np.zeros(3, np.float32)}, r"unknown to the vision tower of Qwen2VL.*: visual\.other"),
        ({"visual.merger.ln_q.bias": np.zeros(3, np.float32)}, r"has the shape \[3\], but .* says \[32\]"),
        ({"visual.merger.ln_q.bias": np.zeros(32, np.int32)}, "element type int32"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray | None], said: str) -> None:
    made = changed(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=said):
        made.weights()


def test_names_as_transformers_has_them_in_memory(tmp_path: Path) -> None:
    """Some published files have kept them."""
    file = load_file(VISION / "qwen2_vl" / "model.safetensors")
    renamed: dict[str, np.ndarray | None] = dict.fromkeys(file)
    for name, value in file.items():
        text = name.replace("model.", "model.language_model.", 1)
        renamed[f"model.{name}" if name.startswith("visual.") else text] = value
    made, same = changed(tmp_path, renamed), vision("qwen2_vl")
    one = same.picture(0)
    np.testing.assert_array_equal(made.embed(one), same.embed(one))
    load_model(made.directory, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_what_is_trained_is_what_is_served(name: str) -> None:
    """Tensors of the checkpoint come back; pictures through the tower and the decoder under `jax.grad` give the logits
    of transformers (where positions are counted), and slopes that reach the pixels' weights."""
    made = vision(name)
    tower, params = load_trainable_tower(
        made.directory, mean=made.processor.mean, std=made.processor.std, dtype="float32"
    )
    stored = load_file(made.directory / "model.safetensors")
    tensors = tower.to_hf(params)
    for source, array in tensors.items():
        name = source if source in stored else source.replace("vision_model.", "")  # of newer files
        np.testing.assert_array_equal(array, stored[name].astype(np.float32))
    token_ids, pictures, _ = made.prompt(1)
    one = pictures[0]
    pixels = np.frombuffer(one.pixels, np.uint8).reshape(1, one.num_patches, -1)
    decoder, of_decoder = load_trainable(made.directory, dtype="float32")
    is_picture = token_ids == made.processor.placeholder_id
    slots = np.where(is_picture, np.cumsum(is_picture) - 1, -1).astype(np.int32)

    def logits(params):
        embeds = tower.embed(params, pixels, one.grid)
        module, hidden = decoder.hidden(of_decoder, token_ids[None], None, PictureInputs(embeds[0], slots))
        found = module.logits(hidden)
        return found.sum(), (found, embeds[0])

    (_, (found, embeds)), slopes = jax.jit(jax.value_and_grad(logits, has_aux=True))(params)
    assert np.abs(np.asarray(embeds)[::STRIDE] - made.oracle["embeds_0"]).max() < TOLERANCE
    if made.tower.config.grid is not None:
        assert np.abs(np.asarray(found) - made.oracle["logits_1"]).max() < TOLERANCE
    assert all(np.isfinite(slope).all() for slope in slopes.values())
    assert np.abs(slopes["patches.kernel"]).max() > 0


def test_a_text_model_has_no_tower_to_train() -> None:
    with pytest.raises(CheckpointError, match="takes text alone"):
        load_trainable_tower("demo", mean=(0, 0, 0), std=(1, 1, 1))
