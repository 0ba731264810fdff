"""The commands `jaxserve bench serve | throughput | latency | startup`.

Each command only turns its options into values. JAX is loaded by the commands that run a model in this process, and by
no other.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.progress
import typer

from jaxserve.cli.options import Command, ConfigOption, Group, SetOption
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.lab.bench.plot import plot_serve
from jaxserve.lab.bench.rates import machine_rates
from jaxserve.lab.bench.report import OfflineReport, check_writable, write_json
from jaxserve.lab.bench.serve import bench_serve
from jaxserve.lab.bench.serve_options import BACKENDS, Endpoint, PromptOptions, ServeOptions, check_has_no_sessions
from jaxserve.lab.bench.show import show_offline, show_serve
from jaxserve.lab.bench.startup import StartupOptions, bench_startup
from jaxserve.lab.workloads.arrivals import ArrivalOptions, Diurnal, Ramp
from jaxserve.lab.workloads.datasets import DatasetOptions, check_dataset
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
    parse_counts,
    parse_numbers,
)
from jaxserve.lab.workloads.metrics import Goodput
from jaxserve.lab.workloads.pictures import check_plot
from jaxserve.lab.workloads.tables import make_console
from jaxserve.offline.console import complain, set_up_logging
from jaxserve.serve.keys import read_keys

ALL_FAILED = 3

app = typer.Typer(cls=Group, add_completion=False, help="Measure an endpoint, or a model in this process.")

VocabOption = Annotated[int | None, typer.Option("--vocab-size", min=1, help="Send token ids below this.")]


@app.command("serve", cls=Command)
def serve_command(
    url: Annotated[str, typer.Option(help="http://HOST:PORT of an OpenAI server, or HOST:PORT for grpc.")],
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(BACKENDS)}.")] = "openai",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server names.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of authorities; with grpc, turns TLS on.")] = None,
    dataset: DatasetOption = "random",
    dataset_path: PathOption = None,
    num_prompts: NumPromptsOption = None,
    input_len: InputLenOption = 256,
    output_len: OutputLenOption = 128,
    range_ratio: RangeOption = 0.0,
    length_cv: CvOption = 1.0,
    num_prefixes: PrefixesOption = 10,
    prefix_len: PrefixLenOption = 256,
    length_scale: ScaleOption = 1.0,
    speed: SpeedOption = 1.0,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory; send text of exact lengths.")] = None,
    vocab_size: VocabOption = None,
    rate: RateOption = None,
    burstiness: BurstinessOption = 1.0,
    ramp: RampOption = None,
    diurnal: DiurnalOption = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at once.")] = None,
    sweep_rate: Annotated[str | None, typer.Option(help="Rates, such as 1,2,4,inf: a run for each.")] = None,
    sweep_concurrency: Annotated[str | None, typer.Option(help="Requests at once, such as 1,4,16.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; nan: not sent.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to the full length.")] = False,
    extra_body: Annotated[str | None, typer.Option(help="JSON object, merged into every request.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.")] = 600.0,
    goodput: GoodputOption = None,
    percentiles: PercentilesOption = "90,95,99",
    seed: SeedOption = 0,
    json_: JsonOption = None,
    save_requests: Annotated[bool, typer.Option("--save-requests", help="Times of each request in the file.")] = False,
    plot: PlotOption = None,
) -> int:
    """Send a load to an endpoint and measure it. Exit code 3: every request failed."""
    if save_requests and json_ is None:
        raise ConfigError("--save-requests needs --json FILE")
    options = ServeOptions(
        endpoint=Endpoint(
            backend=backend,
            url=url,
            model=model,
            api_key=read_keys(str(api_key_file), "--api-key-file")[0] if api_key_file is not None else None,
            ca_file=ca_file,
            temperature=None if math.isnan(temperature) else temperature,
            ignore_eos=ignore_eos,
            extra=_read_object(extra_body),
        ),
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
            length_scale=length_scale,
            speed=speed,
            seed=seed,
        ),
        prompts=PromptOptions(tokenizer=tokenizer, vocab_size=vocab_size),
        arrivals=ArrivalOptions(
            rate=rate,
            burstiness=burstiness,
            ramp=None if ramp is None else Ramp.parse(ramp),
            diurnal=None if diurnal is None else Diurnal.parse(diurnal),
        ),
        max_concurrency=max_concurrency,
        sweep_rates=tuple(parse_numbers(sweep_rate, "--sweep-rate")),
        sweep_concurrencies=tuple(parse_counts(sweep_concurrency, "--sweep-concurrency")),
        warmup=warmup,
        timeout_s=timeout,
        goodput=Goodput.parse(goodput or ()),
        percentiles=tuple(parse_numbers(percentiles, "--percentiles")),
    )
    return _serve(options, json_, plot, save_requests)


def _serve(options: ServeOptions, json_: Path | None, plot: Path | None, save_requests: bool) -> int:
    check_writable(json_, "--json")
    check_writable(plot, "--plot")
    if plot is not None:
        check_plot("bench")
    bar = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)
    with bar:
        report = bench_serve(
            options,
            complain,
            lambda label, done, total: bar.update(task, description=label, completed=done, total=total),
        )
    show_serve(report, make_console())
    if json_ is not None:
        _write(json_, report.as_json(with_requests=save_requests))
    if plot is not None:
        plot_serve(report, plot)
    return 0 if any(run.metrics.completed for run in report.runs) else ALL_FAILED


@app.command("throughput", cls=Command)
def throughput_command(
    config: ConfigOption = None,
    set_: SetOption = None,
    dataset: DatasetOption = "random",
    dataset_path: PathOption = None,
    num_prompts: NumPromptsOption = None,
    input_len: InputLenOption = 256,
    output_len: OutputLenOption = 128,
    range_ratio: RangeOption = 0.0,
    length_cv: CvOption = 1.0,
    num_prefixes: PrefixesOption = 10,
    prefix_len: PrefixLenOption = 256,
    length_scale: ScaleOption = 1.0,
    vocab_size: VocabOption = None,
    seed: SeedOption = 0,
    json_: JsonOption = None,
) -> int:
    """Run a dataset through a model in this process, all at once."""
    check_writable(json_, "--json")
    options = DatasetOptions(
        name=dataset,
        path=dataset_path,
        num_prompts=default_count(num_prompts, dataset_path),
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        length_cv=length_cv,
        num_prefixes=num_prefixes,
        prefix_len=prefix_len,
        length_scale=length_scale,
        seed=seed,
    )
    check_has_no_sessions(options)
    check_dataset(options)  # a wrong option is reported before a model is loaded
    from jaxserve.lab.bench.offline import bench_throughput

    return _finish(bench_throughput(_load(config, set_), options, vocab_size), json_)


@app.command("latency", cls=Command)
def latency_command(
    config: ConfigOption = None,
    set_: SetOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    iterations: Annotated[int, typer.Option(min=1, help="Batches that count.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Batches before.")] = 2,
    vocab_size: VocabOption = None,
    seed: SeedOption = 0,
    json_: JsonOption = None,
) -> int:
    """Time a single batch in this process, again and again."""
    check_writable(json_, "--json")
    from jaxserve.lab.bench.offline import LatencyOptions, bench_latency

    options = LatencyOptions(
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        iterations=iterations,
        warmup=warmup,
        seed=seed,
    )
    return _finish(bench_latency(_load(config, set_), options, vocab_size), json_)


@app.command("startup", cls=Command)
def startup_command(
    config: ConfigOption = None,
    set_: SetOption = None,
    cold: Annotated[int, typer.Option(min=0, help="Starts with an empty cache of executables.")] = 1,
    warm: Annotated[int, typer.Option(min=0, help="Starts with a filled one.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, max=1e6, help="Seconds for one start.")] = 3600.0,
    json_: JsonOption = None,
) -> int:
    """Time the way from the start of a process to its first token."""
    check_writable(json_, "--json")
    load_config(config, set_ or ())  # a wrong setting is reported before processes are started
    options = StartupOptions(config=config, overrides=tuple(set_ or ()), cold=cold, warm=warm, timeout_s=timeout)
    return _finish(bench_startup(options, complain), json_)


def _load(config: Path | None, overrides: list[str] | None) -> Any:
    """The LLM of a config, with all its step shapes from the start; loading JAX takes seconds."""
    from jaxserve.offline.llm import LLM

    set_up_logging(load_config(config, overrides or ()).config.runtime)
    return LLM.from_config(config, [*(overrides or ()), "runtime.background_buckets=false"])


def _finish(report: OfflineReport, json_: Path | None) -> int:
    show_offline(report, make_console())
    if json_ is not None:
        _write(json_, report.as_json())
    return 0


def _write(path: Path, tree: dict[str, Any]) -> None:
    """With the rates of this machine, taken when all else is done."""
    write_json(path, tree | {"about": tree["about"] | {"rates": machine_rates()}})


def _read_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text}")
    return value
