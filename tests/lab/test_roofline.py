"""The roofline of the simulator against the planner's, and against arithmetic done by hand."""

import dataclasses

import pytest

from jaxserve.errors import CapacityError, ConfigError
from jaxserve.lab.roofline import Assumptions, Work, roofline_seconds
from jaxserve.lab.simulation.roofline import LLAMA_3_8B, LLAMA_3_70B, DecoderShape, HostCost, Roofline, local_shape
from jaxserve.sched import Bucket, Chunk, StepPlan
from jaxserve.values.chips import CHIPS, parse_topology

ALL = Assumptions(memory_share=1.0, compute_share=1.0, link_share=1.0)


def decode_plan(rows: int, context: int) -> tuple[StepPlan, Bucket]:
    plan = StepPlan(step_id=0, decode_rows=tuple(range(rows)), decode_positions=(context - 1,) * rows)
    return plan, Bucket(rows, rows, True)


def prefill_plan(start: int, length: int) -> tuple[StepPlan, Bucket]:
    plan = StepPlan(step_id=0, chunks=(Chunk(0, start, (0,) * length, True),))
    return plan, Bucket(length, 1, False)


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_takes_the_time_of_the_shared_arithmetic(name: str) -> None:
    topology = CHIPS[name].topology(CHIPS[name].shapes[0])
    model = Roofline(topology, LLAMA_3_8B, tensor=1)
    work = Work(model=LLAMA_3_8B, weight_size=2 if name != "cpu" else 4, cache_size=2 if name != "cpu" else 4)
    for rows, context in ((1, 1), (64, 2048), (256, 300)):
        seconds = roofline_seconds(
            topology,
            Assumptions(),
            model.dtype,
            flops=work.flops(rows, rows, rows * context),
            moved_bytes=work.cache_bytes(rows, rows, context) + work.other_bytes(rows, rows),
            collectives=0,
            sent_bytes=0.0,
            group=1,
        )
        assert model.step_seconds(*decode_plan(rows, context)).device_s == pytest.approx(seconds.total, rel=1e-9)


def test_one_decoding_row_reads_the_weights_once() -> None:
    model = Roofline("h100:1", LLAMA_3_8B, assumed=ALL)
    params = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 128256 * 4096
    assert model.step_seconds(*decode_plan(1, 1)).device_s == pytest.approx(2 * params / 3350e9, rel=0.01)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    model = Roofline("h100:1", LLAMA_3_8B, assumed=ALL)
    pairs = 4096 * 4097 / 2
    flops = 2 * 4096 * 32 * (4096 * 128 * 80 + 3 * 4096 * 14336) + 2 * 4096 * 128256 + 4 * 32 * 32 * 128 * pairs
    assert model.step_seconds(*prefill_plan(0, 4096)).device_s == pytest.approx(flops / 989e12, rel=1e-9)
    # The same piece behind 4096 cached tokens attends those, too.
    more = 4 * 32 * 32 * 128 * 4096 * 4096 / 989e12
    later, first = (model.step_seconds(*prefill_plan(start, 4096)).device_s for start in (4096, 0))
    assert later - first == pytest.approx(more, rel=1e-9)


def test_padding_costs_and_context_is_read() -> None:
    model = Roofline("v5e:1x1", LLAMA_3_8B)
    plan, bucket = decode_plan(65, 1000)
    padded = model.step_seconds(plan, Bucket(128, 128, True)).device_s
    assert padded > model.step_seconds(plan, bucket).device_s
    longer = model.step_seconds(*decode_plan(65, 2000)).device_s - model.step_seconds(*decode_plan(65, 1000)).device_s
    assert longer == pytest.approx(65 * 1000 * 32 * 2 * 8 * 128 * 2 / (0.8 * 819e9), rel=1e-6)


def test_windows_cap_what_is_read() -> None:
    shape = {name: getattr(LLAMA_3_8B, name) for name in DecoderShape.__dataclass_fields__}
    windowed = Roofline("h100:1", DecoderShape(**{**shape, "layer_windows": (512,) * 32}))
    full = Roofline("h100:1", LLAMA_3_8B)
    assert windowed.step_seconds(*decode_plan(64, 512)) == pytest.approx(full.step_seconds(*decode_plan(64, 512)))
    assert windowed.step_seconds(*decode_plan(64, 8000)) == pytest.approx(windowed.step_seconds(*decode_plan(64, 512)))
    # Each row by itself: a long one does not read the windows of short ones.
    mixed, capped = (
        StepPlan(step_id=0, decode_rows=tuple(range(64)), decode_positions=(*(99,) * 63, last)) for last in (7999, 511)
    )
    bucket = Bucket(64, 64, True)
    assert windowed.step_seconds(mixed, bucket) == pytest.approx(full.step_seconds(capped, bucket))
    # A piece of a prompt in a larger step: each of its tokens sees a window, and padding sees nothing.
    fast = Assumptions(memory_share=1e3)
    windowed, full = (Roofline("h100:1", model.work.model, assumed=fast) for model in (windowed, full))
    (plan, _), bucket = prefill_plan(8000, 256), Bucket(4096, 8, False)
    seen = 4 * 32 * 32 * 128 * 256 * (8000 + 257 / 2 - 512)
    more = full.step_seconds(plan, bucket).device_s - windowed.step_seconds(plan, bucket).device_s
    assert more == pytest.approx(seen / (0.5 * 989e12), rel=1e-9)


def test_more_devices_share_the_work_and_pay_for_talking() -> None:
    plan, bucket = decode_plan(64, 2048)
    one, eight = (Roofline(t, LLAMA_3_8B, host=HostCost()).step_seconds(plan, bucket) for t in ("h200:1", "h200:8"))
    assert one.device_s / 8 < eight.device_s < one.device_s
    assert one.host_s == eight.host_s == pytest.approx(300e-6 + 64e-6)
    sums = 2 * 32  # all-reduces
    wire = 2 * 7 / 8 * sums * 64 * 4096 * 2 / (0.5 * 450e9) + sums * 10e-6
    local = Roofline("h200:1", local_shape(LLAMA_3_8B, 8)).step_seconds(plan, bucket).device_s
    assert eight.device_s == pytest.approx(local + wire, rel=1e-9)


def test_pages_beside_the_weights() -> None:
    model = Roofline("h200:1", LLAMA_3_8B)
    params = 32 * (4096 * 128 * 80 + 3 * 4096 * 14336) + 2 * 128256 * 4096
    room = int(0.9 * parse_topology("h200:1").chip.allocatable_bytes) - 2**30 - 2 * params
    assert model.num_pages(16) == room // (16 * 2 * 32 * 8 * 128 * 2)
    with pytest.raises(CapacityError, match="v5e:2x4"):
        Roofline("v5e:8", LLAMA_3_70B).num_pages(16)
    assert Roofline("v5e:8", LLAMA_3_70B, dtype="int8").num_pages(16) > 0


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 devices"):
        Roofline("h200:2", LLAMA_3_8B, tensor=4)
    with pytest.raises(ConfigError, match="bfloat16"):
        Roofline("v5e:1x1", LLAMA_3_8B, dtype="float8")
    with pytest.raises(ConfigError, match="v99"):
        Roofline("v99:1", LLAMA_3_8B)
    with pytest.raises(ConfigError, match=r"links between them; take a tensor of 1"):
        Roofline("cpu:2", LLAMA_3_8B)
    with pytest.raises(ConfigError, match="computes int8, but 'float32' was asked for"):
        Roofline(dataclasses.replace(CHIPS["v5e"], flops={"int8": 1e12}).topology((1, 1)), LLAMA_3_8B)
