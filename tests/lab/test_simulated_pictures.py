"""Simulated requests with pictures: found again by their ids, encoded at the cost of their bucket, refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import load_config
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.lab.roofline import Assumptions
from jaxserve.lab.simulation.requests import Trace
from jaxserve.lab.simulation.roofline import Roofline
from jaxserve.lab.simulation.simulate import SimulationResult, simulate
from jaxserve.lab.simulation.world import World, world_of_device
from jaxserve.lab.tower_work import TowerWork
from jaxserve.lab.workloads.custom import read_custom
from jaxserve.lab.workloads.datasets import DatasetOptions, make_samples
from jaxserve.lab.workloads.prompts import IdPrompts

VISION = Path(__file__).parents[1] / "fixtures" / "vision"


def world(**settings: Any) -> World:
    overrides = {
        "model.path": str(VISION / "qwen2_vl"),
        "cache.num_pages": 64,
        "cache.page_size": 16,
        "vision.max_pixels": 45 * 28 * 28,
        "vision.pool_tokens": 128,
        **settings,
    }
    return world_of_device(load_config(None, overrides, environ={}).config, "cpu:1")


def picture(name: str, at: int = 4, **fields: Any) -> dict[str, Any]:
    return {"id": name, "at": at, "patches": 160, "tokens": 40, **fields}


def trace(path: Path, *requests: list[dict[str, Any]]) -> Trace:
    """Requests a second apart, of the same 24 tokens of text."""
    lines = [
        {"prompt": list(range(24)), "pictures": pictures, "arrival_s": float(number), "max_tokens": 2}
        for number, pictures in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Trace(dataset=DatasetOptions(name="custom", path=path, num_prompts=None))


def run(found: World, requests: Trace) -> SimulationResult:
    return simulate("fcfs", requests, found.cost_model, found.limits, options=found.options, keep_plans=True)


def test_a_picture_is_encoded_once_and_its_prefix_found(tmp_path: Path) -> None:
    found = world()
    cat, dog = picture("cat"), picture("dog")
    later = picture("cat", 20)
    result = run(found, trace(tmp_path / "t.jsonl", [cat], [cat], [dog], [later], [cat, picture("dog", 9)]))
    requests = sorted(result.requests, key=lambda one: one.arrival_s)
    assert [one.error for one in requests] == [""] * 5
    assert [one.prompt_tokens for one in requests] == [64, 64, 64, 64, 104]
    # The same prompt but for its last page; nothing with another picture, or at another place; and the first picture.
    assert [one.cached_tokens for one in requests] == [0, 48, 0, 0, 48]
    assert (result.encodes, result.encoded_patches) == (2, 320)
    digests = {encode.digest for plan in result.plans for encode in plan.encodes}
    assert len(digests) == 2


def test_a_step_takes_as_much_longer_as_its_pictures(tmp_path: Path) -> None:
    found = world()
    assert isinstance(found.cost_model, Roofline) and found.cost_model.tower is not None
    result = run(found, trace(tmp_path / "t.jsonl", [picture("cat")], [picture("dog", patches=20, tokens=5)]))
    for plan in (plan for plan in result.plans if plan.encodes):
        [encode] = plan.encodes
        bucket = next(size for size in found.cost_model.encode_s if encode.picture.num_patches <= size)
        shape = found.limits.bucket_of(plan)
        text = found.cost_model.step_seconds(dataclasses.replace(plan, encodes=()), shape)
        cost = found.cost_model.step_seconds(plan, shape)
        assert cost.device_s - text.device_s == pytest.approx(found.cost_model.encode_s[bucket])
    with pytest.raises(ConfigError, match=r"a picture of 9000 patches .* encodes up to \d+"):
        run(found, trace(tmp_path / "t.jsonl", [picture("wide", patches=9000)]))


def test_the_work_of_a_tower_counts_what_its_products_do() -> None:
    """Against a loop over the products of Qwen2.5-VL's tower, as its file says them."""
    found = world(**{"model.path": str(VISION / "qwen2_5_vl")}).cost_model
    assert isinstance(found, Roofline) and found.tower is not None
    width, size, out, patches, merge = 32, 44, 48, 256, 4
    full = [False, True, False]
    flops = 2 * patches * 3 * 14 * 14 * width
    for layer in full:
        flops += 2 * patches * (4 * width * width + 3 * size * width)
        flops += 4 * patches * (patches if layer else 3 * 64) * width
    flops += 2 * patches // merge * ((merge * width) ** 2 + merge * width * out)
    assert found.tower.flops(256) == flops
    assert found.tower.seconds(256, found.topology, Assumptions(), "float32") > 0
    assert dataclasses.replace(found.tower, num_bytes=0).moved_bytes(256) < found.tower.moved_bytes(256)


def test_a_tower_takes_the_room_of_pages() -> None:
    cost = world().cost_model
    assert isinstance(cost, Roofline) and cost.tower is not None
    before = cost.num_pages(16)
    cost.tower = dataclasses.replace(cost.tower, num_bytes=cost.tower.num_bytes + 2**30)
    assert before - cost.num_pages(16) == pytest.approx(2**30 / cost.page_bytes(16, 2), abs=1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pictures": [{"id": "a"}]}, r"pictures\[0\] must have at, id, patches, tokens"),
        ({"pictures": [picture("a", 30)]}, "at is 30, behind the prompt of 24 tokens"),
        ({"pictures": [picture("a", 9), picture("b", 3)]}, r"pictures\[1\]\.at is 3, but must be a number from 9"),
        ({"pictures": [picture("a", patches=0)]}, "patches is 0"),
        ({"pictures": "a"}, "must be a list"),
    ],
)
def test_trace_files_that_are_wrong(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"prompt": list(range(24)), **fields}))
    with pytest.raises(ConfigError, match=said):
        read_custom(file, 2, None)


def test_what_has_no_pictures_says_so(tmp_path: Path) -> None:
    """A client that sends, a model that takes text alone, and a directory that does not describe pictures."""
    requests = trace(tmp_path / "t.jsonl", [picture("cat")])
    with pytest.raises(ConfigError, match="pictures without pixels, which can only be simulated"):
        make_samples(requests.dataset, IdPrompts(100, 0))
    [refused] = run(world(**{"model.path": str(VISION.parent / "llama")}), requests).requests
    assert "but the pool of the encoder holds 0" in refused.error
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((VISION / "qwen2_vl" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="needs it to know their sizes"):
        world(**{"model.path": str(bare)})


def test_towers_of_every_family_can_be_counted() -> None:
    for name in ("qwen2_vl", "llava"):
        found = world(**{"model.path": str(VISION / name), "vision.max_pixels": None, "vision.pool_tokens": None})
        assert isinstance(found.cost_model, Roofline)
        assert isinstance(found.cost_model.tower, TowerWork) and found.cost_model.encode_s
