"""Fits to logs of machines whose prices are known."""

import dataclasses
import random

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.fitted import Fitted, device_features, nonnegative_least_squares
from jaxserve.sched import Bucket, Chunk, StepPlan
from jaxserve.sched.plan import Encode
from jaxserve.sched.record import StepRecord

PRICES = {
    True: (2e-3, 0.0, 5e-5, 1e-7, 0.0, 0.0, 0.0),
    False: (3e-3, 2e-5, 1e-5, 1e-7, 4e-9, 5e-3, 2e-5),
}


def make_plan(rng: random.Random, number: int, mixed: bool, pictures: int = 2) -> tuple[StepPlan, Bucket]:
    """A step; a mixed one encodes up to so many pictures, and loads another, which costs nothing here."""
    rows = rng.randint(1, 32)
    positions = tuple(rng.randint(1, 4000) for _ in range(rows))
    chunks, encodes = (), []
    if mixed:
        for place in range(rng.randint(0, pictures)):
            grid = (1, 2, rng.randint(1, 500))
            encodes.append(Encode(digest=f"{place:064x}", grid=grid, num_tokens=9, page_ids=(place + 1,)))
        if encodes:
            loaded = Encode(digest="f" * 64, grid=(1, 2, 9), num_tokens=9, page_ids=(9,), host_id=1, load=True)
            encodes.append(loaded)
        chunks = tuple(
            Chunk(rows + i, rng.randint(0, 900), (0,) * rng.randint(1, 90), True) for i in range(rng.randint(1, 4))
        )
    plan = StepPlan(
        step_id=number,
        decode_rows=tuple(range(rows)),
        decode_positions=positions,
        chunks=chunks,
        encodes=tuple(encodes),
    )
    sizes = (16, 32, 64, 128, 256, 512)
    if mixed:
        edge = next(s for s in sizes if s >= plan.num_tokens)
        return plan, Bucket(edge, min(edge, 64), False)
    edge = next(s for s in (1, 2, 4, 8, 16, 32) if s >= rows)
    return plan, Bucket(edge, edge, True)


def make_records(count: int, noise: float, kinds=(False, True), seed: int = 0, pictures: int = 2) -> list[StepRecord]:
    rng = random.Random(seed)
    records = []
    for number in range(count):
        plan, bucket = make_plan(rng, number, rng.choice(kinds), pictures)
        device = sum(p * f for p, f in zip(PRICES[plan.decode_only], device_features(plan, bucket), strict=True))
        device *= rng.lognormvariate(-noise * noise / 2, noise)
        records.append(
            StepRecord(
                plan=plan,
                bucket=bucket,
                token_ids=(0,) * len(plan.sampled_rows),
                start_s=0.0,
                schedule_ms=0.1 + 0.001 * plan.num_rows,
                pack_ms=0.05,
                device_ms=1e3 * device,
                wait_ms=0.9e3 * device,
                commit_ms=0.02 * plan.num_rows,
            )
        )
    return records


def test_prices_of_a_machine_without_noise_are_found() -> None:
    fitted = Fitted(make_records(600, 0.0))
    rng = random.Random(9)
    for number in range(50):
        plan, bucket = make_plan(rng, number, number % 2 == 0)
        real = sum(p * f for p, f in zip(PRICES[plan.decode_only], device_features(plan, bucket), strict=True))
        host_s, device_s, commit_s = fitted.step_seconds(plan, bucket)
        assert device_s == pytest.approx(real, rel=1e-3)
        assert host_s == pytest.approx(150e-6 + 1e-6 * plan.num_rows, rel=1e-3)
        assert commit_s == pytest.approx(20e-6 * plan.num_rows, rel=1e-3)
    assert fitted.errors["device"]["mixed"].p90 < 1e-3
    assert fitted.errors["device"]["decode"].steps > 50


def test_the_reported_error_is_that_of_the_noise_and_the_sum_stays_right() -> None:
    fitted = Fitted(make_records(2000, 0.2))
    for kind in ("decode", "mixed"):
        error = fitted.errors["device"][kind]
        assert 0.09 < error.median < 0.19, error  # the median of |N(0, 0.2)| is 0.135
        assert 0.25 < error.p90 < 0.45, error
        assert error.sum_ratio == pytest.approx(1.0, abs=0.05)


def test_a_bucket_may_be_out_of_line() -> None:
    records = []
    for record in make_records(1500, 0.0):
        slow = 3.0 if record.bucket == Bucket(8, 8, True) else 1.0
        fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
        records.append(StepRecord(**{**fields, "device_ms": slow * record.device_ms}))
    fitted = Fitted(records)
    slow = [r for r in records if r.bucket == Bucket(8, 8, True)]
    predicted = sum(fitted.step_seconds(r.plan, r.bucket).device_s for r in slow)
    assert predicted == pytest.approx(sum(r.device_ms for r in slow) / 1e3, rel=1e-6)


def test_steps_that_nobody_waited_for_do_not_count_as_device_time() -> None:
    good = make_records(300, 0.0)
    fields = [{name: getattr(r, name) for name in r.__dataclass_fields__} for r in make_records(300, 0.0, seed=5)]
    late = [StepRecord(**{**f, "device_ms": 10 * f["device_ms"], "wait_ms": 0.0}) for f in fields]
    assert Fitted(good + late).prices("device", "mixed") == pytest.approx(Fitted(good).prices("device", "mixed"))


def test_each_of_several_logs_is_predicted_from_the_others() -> None:
    """The error that is told for shapes that a fit has not seen, of a machine whose costs are sums, and of another."""
    small, large = make_records(300, 0.0, seed=1), make_records(300, 0.0, seed=2)
    same = Fitted(small, large)
    assert same.num_records == 600
    assert len(same.left_out) == 2
    assert all(error.p90 < 1e-3 for log in same.left_out for error in log.values())
    slower = [dataclasses.replace(one, device_ms=1.5 * one.device_ms, wait_ms=1.5 * one.wait_ms) for one in large]
    first, second = Fitted(small, slower).left_out
    assert first["decode"].median == pytest.approx(0.5, abs=0.01)  # 1.5 times what it was
    assert second["mixed"].sum_ratio == pytest.approx(1 / 1.5, abs=0.01)
    # A kind that the other log lacks has no error to tell.
    assert set(Fitted(small, make_records(60, 0.0, kinds=(False,), seed=3)).left_out[0]) == {"decode"}


def test_what_the_log_lacks_is_refused() -> None:
    decode_only = Fitted(make_records(60, 0.0, kinds=(False,)))
    plan, bucket = make_plan(random.Random(0), 0, mixed=True)
    with pytest.raises(ConfigError, match="0 mixed steps"):
        decode_only.step_seconds(plan, bucket)
    text = Fitted(make_records(600, 0.0, pictures=0))
    plan, bucket = next(p for n in range(99) if (p := make_plan(random.Random(n), 0, mixed=True))[0].encodes)
    with pytest.raises(ConfigError, match="0 steps that encode pictures, and 10 are needed"):
        text.step_seconds(plan, bucket)
    assert text.step_seconds(dataclasses.replace(plan, encodes=plan.encodes[-1:]), bucket).device_s > 0, "a load"
    with pytest.raises(ConfigError, match="too few"):
        Fitted(make_records(8, 0.0))


def test_least_squares_stay_above_zero_and_are_optimal() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        a, b = rng.normal(size=(30, 6)), rng.normal(size=30)
        x = nonnegative_least_squares(a, b)
        gradient = a.T @ (b - a @ x)
        assert (x >= 0).all()
        assert (gradient <= 1e-8).all(), gradient  # nothing is gained by more of any
        assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-8
