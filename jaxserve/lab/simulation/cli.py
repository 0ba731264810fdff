"""The command `jaxserve simulate`: its options, and the way from them to printed results."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli.options import ConfigOption, ModelOption, SetOption, with_model
from jaxserve.config import load_config, policy_of
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.lab.bench.about import about_machine
from jaxserve.lab.bench.report import check_writable, write_json
from jaxserve.lab.simulation.client_costs import ClientCosts, measure_client_costs
from jaxserve.lab.simulation.cluster_values import Apart, Autoscale
from jaxserve.lab.simulation.compare import compare_policies
from jaxserve.lab.simulation.fleet import Fleet
from jaxserve.lab.simulation.plots import plot_overview
from jaxserve.lab.simulation.requests import ClientOptions, Trace
from jaxserve.lab.simulation.results import CLOCK_NOTE, LabResult, show_results
from jaxserve.lab.simulation.store import StoreLink
from jaxserve.lab.simulation.world import World, about_fleet, world_of_log, worlds_of_devices
from jaxserve.lab.workloads.arrivals import ArrivalOptions, Diurnal, Ramp
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.lab.workloads.flags import (
    BurstinessOption,
    CvOption,
    DatasetOption,
    DiurnalOption,
    GoodputOption,
    InputLenOption,
    JsonOption,
    NumPromptsOption,
    OutputLenOption,
    PathOption,
    PercentilesOption,
    PlotOption,
    PrefixesOption,
    PrefixLenOption,
    RampOption,
    RangeOption,
    RateOption,
    ScaleOption,
    SeedOption,
    SpeedOption,
    default_count,
    parse_numbers,
)
from jaxserve.lab.workloads.metrics import Goodput, check_percentiles
from jaxserve.lab.workloads.pictures import check_plot, save_figure
from jaxserve.lab.workloads.tables import make_console, make_title
from jaxserve.offline.console import complain
from jaxserve.progress import show_progress
from jaxserve.sched.record import read_header

ALL_FAILED = 3
_DEFAULT_DEVICE = "cpu:1"

PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Name, entry point, module:Class or ./file.py:Class (?NAME=VALUE); default: sched.policy. Repeatable.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Of a server, by published peaks: v5e:2x2, FILE.yaml:1, …; of several: h200:1*2,a100:1. Default: cpu:1.",
    ),
]
TensorOption = Annotated[
    int | None,
    typer.Option("--tensor", min=1, help="Default: parallel.tensor; where that is 1, the devices of a replica."),
]
StepLogOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--step-log", help="In place of --device: learn costs from steps that an engine ran. Repeatable: several runs."
    ),
]
ClientCostsOption = Annotated[
    Path | None,
    typer.Option(
        "--client-costs",
        help="A --json of bench serve --save-requests, of the server of --step-log: adds what its client waited more.",
    ),
]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance", help="Share of drafts that are right, by place: 0.8 or 0.8,0.7,0.6. Default: the --step-log's."
    ),
]
StoreLatencyOption = Annotated[
    float | None, typer.Option("--store-latency-ms", min=0, help="Of a call to store.kind. Default: see docs/tiers.md.")
]
StoreBandwidthOption = Annotated[
    float | None, typer.Option("--store-bandwidth", help="Of store.kind in each direction, GB/s; with the latency.")
]
PrefillOption = Annotated[
    list[int] | None,
    typer.Option(
        "--prefill", min=0, help="Of --replicas, those that compute prompts for the others; 0: all do both. Repeatable."
    ),
]
HandoffBandwidthOption = Annotated[
    float, typer.Option("--handoff-bandwidth", help="Of pages from one such server, GB/s; gRPC has about 0.5.")
]
ReplicasOption = Annotated[
    int, typer.Option("--replicas", min=1, help="Servers behind one router; parallel.data: inside one.")
]
AutoscaleOption = Annotated[
    str | None,
    typer.Option(
        "--autoscale", help="MIN:MAX:LOAD[:SECONDS]: servers with LOAD requests each; a new one needs SECONDS (60)."
    ),
]
RouterOption = Annotated[
    list[str] | None,
    typer.Option("--router", help="prefix, least_load, power_of_two, …; default: route.policy. Repeatable."),
]
SessionRateOption = Annotated[float, typer.Option("--session-rate", help="agent: sessions that begin in a second.")]
TurnsOption = Annotated[float, typer.Option("--turns", help="agent: turns of a session, on average.")]
ThinkOption = Annotated[float, typer.Option("--think", help="agent: seconds between answer and next turn, on average.")]
SessionLenOption = Annotated[int, typer.Option("--max-session-len", help="agent: tokens at which a session ends.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", help="All ask for so many, and may stop earlier; default: what they get."),
]
TenantsOption = Annotated[int, typer.Option("--tenants", help="Tenants, the first with the largest share of requests.")]
OwnersOption = Annotated[
    str | None,
    typer.Option(
        "--owner-weights", help="Of owners, as 1,4: fair shares tokens by them; the first sends most requests."
    ),
]
PrioritiesOption = Annotated[int, typer.Option("--priorities", help="Levels of priority, drawn evenly.")]
ClientsOption = Annotated[
    int | None,
    typer.Option("--clients", min=1, help="A closed loop: each client sends its next request after its last answer."),
]
ClientThinkOption = Annotated[
    float, typer.Option("--client-think", help="--clients: seconds between answer and next request, on average.")
]
TurnsWaitOption = Annotated[
    bool, typer.Option("--turns-wait", help="agent: turns arrive after the real answer, not after an assumed one.")
]
LightOption = Annotated[
    bool, typer.Option("--light", help="Keep no times of single tokens and steps, no requests in --json: for millions.")
]


def simulate_command(
    policy: PolicyOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    tensor: TensorOption = None,
    step_log: StepLogOption = None,
    client_costs: ClientCostsOption = None,
    acceptance: AcceptanceOption = None,
    store_latency_ms: StoreLatencyOption = None,
    store_bandwidth: StoreBandwidthOption = None,
    replicas: ReplicasOption = 1,
    autoscale: AutoscaleOption = None,
    router: RouterOption = None,
    prefill: PrefillOption = None,
    handoff_bandwidth: HandoffBandwidthOption = 0.5,
    dataset: DatasetOption = "random",
    dataset_path: PathOption = None,
    num_prompts: NumPromptsOption = None,
    input_len: InputLenOption = 256,
    output_len: OutputLenOption = 128,
    range_ratio: RangeOption = 0.0,
    length_cv: CvOption = 1.0,
    num_prefixes: PrefixesOption = 10,
    prefix_len: PrefixLenOption = 256,
    session_rate: SessionRateOption = 0.1,
    turns: TurnsOption = 6.0,
    think: ThinkOption = 8.0,
    max_session_len: SessionLenOption = 32768,
    length_scale: ScaleOption = 1.0,
    speed: SpeedOption = 1.0,
    rate: RateOption = None,
    burstiness: BurstinessOption = 1.0,
    ramp: RampOption = None,
    diurnal: DiurnalOption = None,
    max_tokens: MaxTokensOption = None,
    tenants: TenantsOption = 1,
    owner_weights: OwnersOption = None,
    priorities: PrioritiesOption = 1,
    clients: ClientsOption = None,
    client_think: ClientThinkOption = 0.0,
    turns_wait: TurnsWaitOption = False,
    goodput: GoodputOption = None,
    percentiles: PercentilesOption = "90,95,99",
    seed: SeedOption = 0,
    light: LightOption = False,
    json_: JsonOption = None,
    plot: PlotOption = None,
) -> int:
    """Run scheduling policies on paper: a load, a device that need not be here, one table. Exit code 3: all failed."""
    trace = Trace(
        dataset=DatasetOptions(
            name=dataset,
            path=dataset_path,
            num_prompts=default_count(num_prompts, dataset_path),
            input_len=input_len,
            output_len=output_len,
            range_ratio=range_ratio,
            length_cv=length_cv,
            num_prefixes=num_prefixes,
            prefix_len=prefix_len,
            session_rate=session_rate,
            turns=turns,
            think_s=think,
            max_session_len=max_session_len,
            length_scale=length_scale,
            speed=speed,
            seed=seed,
        ),
        arrivals=ArrivalOptions(
            rate=rate,
            burstiness=burstiness,
            ramp=None if ramp is None else Ramp.parse(ramp),
            diurnal=None if diurnal is None else Diurnal.parse(diurnal),
        ),
        clients=ClientOptions(
            max_tokens=max_tokens,
            tenants=tenants,
            owner_weights=tuple(parse_numbers(owner_weights, "--owner-weights")),
            priorities=priorities,
            clients=clients,
            client_think_s=client_think,
            turns_wait=turns_wait,
        ),
    )
    resolved = load_config(config, with_model(set_, model)).config
    options = _Options(
        policies=tuple(policy or (policy_of(resolved),)),
        device=device,
        tensor=tensor,
        step_log=tuple(step_log or ()),
        client_costs=client_costs,
        acceptance=tuple(parse_numbers(acceptance, "--acceptance")),
        store_link=_link(store_latency_ms, store_bandwidth),
        replicas=replicas,
        autoscale=None if autoscale is None else Autoscale.parse(autoscale),
        routers=tuple(router or ()),
        prefill=tuple(prefill or ()),
        handoff_bandwidth=handoff_bandwidth * 1e9,
        goodput=Goodput.parse(goodput or ()),
        percentiles=tuple(parse_numbers(percentiles, "--percentiles")),
        light=light,
        json=json_,
        plot=plot,
    )
    return _simulate(options, resolved, trace)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options beside the trace and the config; names as on the command line."""

    policies: Sequence[str]
    device: str | None
    tensor: int | None
    step_log: Sequence[Path]
    client_costs: Path | None
    acceptance: Sequence[float]
    store_link: StoreLink | None
    replicas: int
    autoscale: Autoscale | None
    routers: Sequence[str]
    prefill: Sequence[int]
    handoff_bandwidth: float
    goodput: Goodput | None
    percentiles: Sequence[float]
    light: bool
    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        check_percentiles(self.percentiles)
        if not 0 < self.handoff_bandwidth < math.inf:
            raise ConfigError(
                f"--handoff-bandwidth is {self.handoff_bandwidth / 1e9:g} GB/s, but must be a number above 0"
            )
        check_writable(self.json, "--json")
        check_writable(self.plot, "--plot")
        if self.plot is not None:
            check_plot("lab")
        if self.plot is not None and self.light:
            raise ConfigError("--plot draws the steps that --light does not keep: leave one of them out")
        if self.step_log and (self.device is not None or self.tensor is not None):
            raise ConfigError("--step-log takes the place of --device and --tensor: leave them out")
        if self.client_costs is not None and not self.step_log:
            raise ConfigError(
                "--client-costs are of a server that wrote a step log (runtime.step_log); give --step-log FILE, too"
            )


def _link(latency_ms: float | None, bandwidth: float | None) -> StoreLink | None:
    if latency_ms is None and bandwidth is None:
        return None
    if latency_ms is None or bandwidth is None:
        raise ConfigError("--store-latency-ms and --store-bandwidth describe one link: give both, or none")
    return StoreLink(latency_ms / 1e3, bandwidth * 1e9)


def _simulate(options: _Options, config: Config, trace: Trace) -> int:
    with show_progress(write=complain) as progress:
        progress.begin("reading the costs of steps")
        worlds = _worlds(options, config)
        world = worlds[0]
        one = len(worlds) == options.replicas == config.parallel.data == 1
        if options.routers and one and options.autoscale is None:
            raise ConfigError("--router chooses between replicas: give --replicas 2 or more, too, or parallel.data")
        costs = _client_costs(options, worlds)
        results = compare_policies(
            options.policies,
            trace,
            worlds,
            replicas=options.replicas,
            autoscale=options.autoscale,
            client_costs=costs,
            routers=options.routers or (config.route.policy,),
            apart=[_apart(count, options, config, world) for count in options.prefill or (0,)],
            goodput=options.goodput,
            percentiles=options.percentiles,
            keep_steps=options.plot is not None,
            keep_token_times=not options.light,
            say=complain,
            progress=progress,
        )
    console = make_console()
    title = about_fleet(worlds) if options.replicas == 1 else f"{options.replicas} replicas of {world.about}"
    console.print(make_title(title))
    show_results(results, console)
    console.print(CLOCK_NOTE if costs is None else f"times are those of a client, with {costs}")
    if options.json is not None:
        write_json(options.json, _as_json(results, worlds, trace, options, costs))
    if options.plot is not None:
        drawn = [result for result in results if result.simulation.steps]
        if drawn:
            save_figure(plot_overview(drawn, title), options.plot)
        else:
            complain(f"no step was computed, so there is nothing to draw: {options.plot} was not written")
    return 0 if any(result.metrics.completed for result in results) else ALL_FAILED


def _client_costs(options: _Options, worlds: Sequence[World]) -> ClientCosts | None:
    """Measured against one server of the policy that wrote the first log, however many are simulated."""
    if options.client_costs is None:
        return None
    return measure_client_costs(options.client_costs, Fleet.of(worlds), read_header(options.step_log[0]).policy)


def _worlds(options: _Options, config: Config) -> list[World]:
    """One for each server of a fleet; one alone where all are alike."""
    if options.step_log:
        logs = list(options.step_log)
        return [world_of_log(logs, config, acceptance=options.acceptance, store_link=options.store_link)]
    return worlds_of_devices(
        config,
        _DEFAULT_DEVICE if options.device is None else options.device,
        options.tensor,
        acceptance=options.acceptance,
        store_link=options.store_link,
    )


def _apart(count: int, options: _Options, config: Config, world: World) -> Apart | None:
    if not count:
        return None
    if not world.limits.slots.num_slots:
        raise ConfigError("--prefill: pages arrive in slots of host memory; set cache.host_bytes")
    return Apart(
        prefill=count,
        above=config.route.prefill_above,
        bandwidth=options.handoff_bandwidth,
        token_bytes=world.limits.slots.page_bytes / world.limits.page_size,
    )


def _as_json(
    results: Sequence[LabResult],
    worlds: Sequence[World],
    trace: Trace,
    options: _Options,
    costs: ClientCosts | None,
) -> dict[str, Any]:
    """`world` has the figures of the first server; `fleet` says what each of several is."""
    world = worlds[0]
    limits = dataclasses.asdict(world.limits)
    return {
        "about": about_machine(),
        "world": {
            "about": world.about,
            "limits": limits,
            "options": dataclasses.asdict(world.options),
            "store": None if world.store is None else dataclasses.asdict(world.store),
            "acceptance": None if world.drafts is None else list(world.drafts.rates),
        },
        "fleet": [one.about for one in worlds],
        "autoscale": None if options.autoscale is None else dataclasses.asdict(options.autoscale),
        "client_costs": None if costs is None else dataclasses.asdict(costs),
        "apart": {"prefill": list(options.prefill), "bandwidth": options.handoff_bandwidth},
        "load": {
            **trace.dataset.as_json(),
            **trace.arrivals.as_json(),
            **trace.clients.as_json(),
        },
        "runs": [
            result.as_json() | ({"requests": result.requests_json()} if not options.light else {}) for result in results
        ],
    }
