"""Simulations of devices with drafts: costs by hand, and a world learned from the step log of an engine with drafts."""

import json
from pathlib import Path

import pytest

from jaxserve.api import Request, SamplingParams
from jaxserve.cli import main
from jaxserve.config import load_config
from jaxserve.engine import Engine, ModelInfo
from jaxserve.engine.step_log import StepLogWriter
from jaxserve.errors import ConfigError
from jaxserve.lab import SimRequest, SimulatedDrafts, simulate, world_of_device, world_of_log
from jaxserve.lab.simulation.fitted import Fitted
from jaxserve.lab.simulation.roofline import LLAMA_3_8B, Roofline
from jaxserve.sched import (
    Bucket,
    InFlight,
    Limits,
    SchedulerOptions,
    SpeculationOptions,
    StepPlan,
    StepResult,
    create_scheduler,
)
from jaxserve.sched.plan import Drafted
from jaxserve.sched.record import LogHeader, StepRecord, read_records, rounds_run
from jaxserve.testing import FakeRunner, ManualClock, make_limits, with_shapes

SHAPE = str(Path(__file__).parents[2] / "configs" / "shapes" / "llama3.1-8b")
ROUND_MS = {(1, 1): 10.0, (2, 1): 11.0, (4, 2): 14.0}


class TimedDevice:
    """A fake device whose rounds take their time: 20 ms with prompts, else ROUND_MS."""

    def __init__(self, inner: FakeRunner, clock: ManualClock) -> None:
        self.limits = inner.limits
        self.clock = clock
        self._inner = inner

    def dispatch(self, plan: StepPlan) -> InFlight:
        return _OnDevice(self.clock, plan, self._inner.dispatch(plan))


class _OnDevice:
    def __init__(self, clock: ManualClock, plan: StepPlan, handle: InFlight) -> None:
        self._clock, self._plan, self._handle = clock, plan, handle

    def result(self) -> StepResult:
        result = self._handle.result()
        round_ms = 20.0 if self._plan.chunks else ROUND_MS[self._plan.width, 2 if self._plan.width == 4 else 1]
        self._clock.advance(round_ms * rounds_run(result) / 1000)
        return result


def device_limits(*, timed: bool = True) -> Limits:
    limits = with_shapes(make_limits(max_rows=4, num_pages=200, max_model_len=200), (2, 1), (4, 2))
    times = {b: ROUND_MS[b.width, b.rounds] for b in limits.buckets if b.decode_only}
    return limits.with_buckets(limits.buckets, times if timed else None)


def requests() -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=100, detokenize=False)
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=(i + 1,) * (3 + i % 9),
            sampling=sampling,
            max_tokens=20 + 17 * i % 90,
            seed=0,
            stop_token_ids=frozenset({999}),
            arrival_s=0.0,
        )
        for i in range(60)
    ]


def write_log(path: Path, rates: tuple[float, ...], *, timed: bool = True, adaptive: bool = True) -> None:
    """The log of an engine whose drafts are right at `rates`. `timed`: its limits tell the times of rounds."""
    options = SchedulerOptions(speculation=SpeculationOptions(adaptive=adaptive))
    clock = ManualClock()
    limits = device_limits()
    header_limits = device_limits(timed=timed)
    runner = TimedDevice(FakeRunner(limits, accept=SimulatedDrafts(rates=rates, seed=5), keep_plans=False), clock)
    engine = Engine(
        runner=runner,
        scheduler=create_scheduler("fcfs", limits, options=options, clock=clock),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=200, eos_token_ids=(999,)),
        clock=clock,
        observers=[
            StepLogWriter(
                path, LogHeader(limits=header_limits, model="fake", policy="fcfs", vocab_size=256), start_s=0.0
            )
        ],
    )
    for request in requests():
        engine.submit(request, lambda update: None)
    engine.run_until_idle()
    engine.stop()


@pytest.mark.parametrize(("timed", "adaptive"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("rates", [(0.9, 0.8, 0.7), (0.5, 0.2)])
def test_a_world_learned_from_a_log_draws_as_many_tokens_in_a_step(
    tmp_path: Path, rates: tuple[float, ...], timed: bool, adaptive: bool
) -> None:
    write_log(tmp_path / "log", rates, timed=timed, adaptive=adaptive)
    records = list(read_records(tmp_path / "log"))
    assert {(r.plan.width, r.plan.rounds) for r in records} > {(1, 1)}
    real_rows = sum(len(r.plan.decode_rows) for r in records)
    real = sum(sum(r.counts) if r.counts else len(r.plan.decode_rows) for r in records) / real_rows
    real_s = records[-1].start_s
    world = world_of_log(tmp_path / "log", load_config(None, {"speculation.adaptive": adaptive}).config)
    assert world.drafts is not None
    assert world.drafts.rates[0] == pytest.approx(rates[0], abs=0.06)
    trace = [SimRequest(request=r, arrival_s=0.0, output_len=r.max_tokens) for r in requests()]
    found = simulate(
        "fcfs", trace, world.cost_model, world.limits, options=world.options, accept=world.drafts, keep_plans=True
    )
    # Where two shapes are about as good, luck decides which one is chosen.
    assert found.row_tokens / found.row_steps == pytest.approx(real, rel=0.15 if adaptive else 0.05)
    assert found.duration_s == pytest.approx(real_s, rel=0.05)
    assert real > 1.5 or rates[0] < 0.9


def test_a_place_without_a_draft_counts_as_a_wrong_one() -> None:
    """Two rows with room for six tokens, in rounds of three: the second row's drafter finds nothing at first."""
    plan = StepPlan(step_id=1, decode_rows=(0, 1), decode_positions=(9, 9), row_tokens=(6, 6), width=3, rounds=3)
    drafts = ((Drafted(2, 2), Drafted(2, 2)), (Drafted(0, 0), Drafted(2, 1), Drafted(1, 0)))
    times = {"schedule_ms": 1.0, "pack_ms": 2.0, "device_ms": 9.0, "wait_ms": 5.0, "commit_ms": 3.0}
    bucket = Bucket(12, 4, True, 3, 3)
    record = StepRecord(
        plan=plan, bucket=bucket, token_ids=(1,) * 10, start_s=0.0, counts=(6, 4), drafts=drafts, **times
    )
    found = Fitted([record] * 12).drafts
    # Five rounds, all with room for two drafts: 6, 5 and 3 tokens are left to the second row when its rounds begin.
    assert (found.reached, found.drawn) == ((5 * 12, 3 * 12), (3 * 12, 2 * 12))


def test_a_config_may_ask_for_less_than_the_log_has_and_not_for_more(tmp_path: Path) -> None:
    write_log(tmp_path / "log", (0.9,))

    def world_of(*settings: str, acceptance: tuple[float, ...] = ()):
        return world_of_log(tmp_path / "log", load_config(None, settings).config, acceptance=acceptance)

    for settings in (("speculation.method=ngram", "speculation.width=8"), ("speculation.rounds=16",)):
        with pytest.raises(ConfigError, match=r"enough steps of up to \d and \d; leave it out"):
            world_of(*settings)
    narrow = world_of("speculation.method=ngram", "speculation.width=2", "speculation.adaptive=false")
    assert (narrow.options.speculation.width, narrow.options.speculation.adaptive) == (2, False)
    assert world_of(acceptance=(0.25,)).drafts == SimulatedDrafts(rates=(0.25,))


def test_a_log_without_wide_steps_has_none_in_its_world(tmp_path: Path) -> None:
    clock, limits = ManualClock(), device_limits()
    plain = limits.with_buckets(b for b in limits.buckets if b.plain)
    runner = TimedDevice(FakeRunner(plain, keep_plans=False), clock)
    header = LogHeader(limits=limits, model="fake", policy="fcfs", vocab_size=256)
    engine = Engine(
        runner=runner,
        scheduler=create_scheduler("fcfs", plain, clock=clock),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=200, eos_token_ids=(999,)),
        clock=clock,
        observers=[StepLogWriter(tmp_path / "log", header, start_s=0.0)],
    )
    for request in requests():
        engine.submit(request, lambda update: None)
    engine.run_until_idle()
    engine.stop()
    world = world_of_log(tmp_path / "log", load_config(None, []).config)
    assert world.limits.max_row_tokens == 1 and world.drafts is None
    with pytest.raises(ConfigError, match=r"asks for 4 tokens .* up to 1 and 1"):
        world_of_log(tmp_path / "log", load_config(None, ["speculation.method=ngram"]).config)
    with pytest.raises(ConfigError, match="a rate of acceptance was given, but no step"):
        world_of_log(tmp_path / "log", load_config(None, []).config, acceptance=(0.5,))


def test_a_wide_step_costs_weights_once_and_tokens_by_their_number() -> None:
    roofline = Roofline("v5e:1", LLAMA_3_8B, dtype="bfloat16", cache_dtype="bfloat16")

    def seconds(width: int, rounds: int = 1, rows: int = 16, position: int = 1000) -> float:
        several = {} if width * rounds == 1 else {"row_tokens": (width * rounds,) * rows}
        plan = StepPlan(
            step_id=0,
            decode_rows=tuple(range(rows)),
            decode_positions=(position,) * rows,
            width=width,
            rounds=rounds,
            **several,
        )
        return roofline.step_seconds(plan, Bucket(rows * width, rows, True, width, rounds)).device_s

    # Reading 16 GB of weights is nearly all of it until the arithmetic of rows x width tokens takes longer.
    assert 1.0 < seconds(4) / seconds(1) < 1.1
    assert seconds(16, rows=64) / seconds(1, rows=64) > 2
    assert seconds(2, rounds=3) == pytest.approx(3 * seconds(2))
    # Twice the arithmetic of attention, once the bytes: each row reads its keys and values once for all its tokens.
    more, plain = (seconds(w, position=3000) - seconds(w, position=1000) for w in (2, 1))
    assert more == pytest.approx(plain, rel=1e-6)
    limits = roofline.step_ms(make_limits(max_rows=16).with_buckets([Bucket(16, 16, True), Bucket(64, 16, True, 4)]))
    assert limits.step_ms == pytest.approx([1e3 * seconds(1, position=-1), 1e3 * seconds(4, position=-1)])


def test_a_simulated_chip_draws_more_tokens_in_a_step() -> None:
    config = load_config(None, [f"model.path={SHAPE}", "speculation.method=ngram", "speculation.width=4"]).config
    world = world_of_device(config, "v5e:2x2", acceptance=(0.7, 0.6))
    assert world.drafts == SimulatedDrafts(rates=(0.7, 0.6))
    widths = {b.width for b in world.limits.buckets}
    assert widths == {1, 2, 4} and len(world.limits.step_ms) == len(world.limits.buckets)

    trace = [SimRequest(request=r, arrival_s=0.0, output_len=r.max_tokens) for r in requests()]
    found = simulate("fcfs", trace, world.cost_model, world.limits, options=world.options, accept=world.drafts)
    assert found.row_tokens > 1.6 * found.row_steps


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--set speculation.method=ngram", "give --acceptance, such as 0.8"),
        ("--acceptance 0.8", "no step of the simulated server has drafts; set speculation.method"),
        ("--set speculation.method=ngram --acceptance 0.8,1.5", "a rate of acceptance is 1.5"),
        ("--set speculation.method=ngram --acceptance x", "--acceptance is 'x'"),
        ("--set speculation.method=ngrams --acceptance 0.5", "ngrams"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--device", "v5e:2x2", "--model", SHAPE, "--num-prompts", "4", *arguments.split(" ")]
    assert main(command) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in line


def test_the_command_tells_tokens_of_a_step_and_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--device", "v5e:2x2", "--model", SHAPE, "--num-prompts", "8", "--rate", "1"]
    command += ["--set", "speculation.method=ngram", "--acceptance", "0.9,0.8", "--json", str(tmp_path / "run.json")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "tokens a step" in out and "accepted" in out
    tree = json.loads((tmp_path / "run.json").read_text())
    assert tree["world"]["acceptance"] == [0.9, 0.8]
    [run] = tree["runs"]
    assert run["tokens_per_step"] > 2 and run["drafts"]["drawn"][0] > 0.8 * run["drafts"]["reached"][0]
