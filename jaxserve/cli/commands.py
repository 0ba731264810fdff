"""The small commands of `jaxserve`: each is a few lines around a function of the package.

`cli` imports this file when one of them is called, and nothing else does.
"""

import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from jaxserve import __version__
from jaxserve.cli.options import DEFECT, ConfigOption, ModelOption, SetOption, flag_settings, one_line, with_model
from jaxserve.config import format_config, load_config, refuse_settings_of_others
from jaxserve.config.json_schema import config_json_schema
from jaxserve.errors import ConfigError, Status
from jaxserve.files.new_directory import new_directory
from jaxserve.offline.console import complain, log_environment, set_up_logging
from jaxserve.progress import show_progress

_ASK_AGAIN_S = 0.2
_LOGGING = ("runtime.log_level", "runtime.log_format")
_ROUTER_READS = ("route", "serve", "sched.max_waiting", *_LOGGING)
_SERVERS_ALONE = (
    *("serve.tenants", "serve.export_s", "serve.grpc.refuse_special_text"),
    *(f"serve.http.{name}" for name in ("web_page", "vllm_metrics", "profile_dir", "weights_dir")),
    *(f"serve.http.batch_{name}" for name in ("dir", "dir_bytes", "file_bytes", "lines")),
)


def config_command(
    what: Annotated[
        Literal["schema"] | None, typer.Argument(help="schema: the JSON Schema of config files instead, for editors.")
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Print the resolved config, each value with where it came from."""
    if what is not None:
        if config is not None or set_:
            raise ConfigError("the schema is that of every config: leave out --config and --set")
        print(json.dumps(config_json_schema(), indent=1, ensure_ascii=False))
        return
    print(format_config(load_config(config, set_ or ())), end="")


def convert_command(
    source: Annotated[Path, typer.Argument(help="Hugging Face style or Orbax directory.")],
    target: Annotated[Path, typer.Argument(help="New directory, of the other kind.")],
    here: Annotated[bool, typer.Option("--here", hidden=True, help="In this process; the command starts it.")] = False,
) -> int:
    """Convert a checkpoint: Hugging Face to Orbax, or back."""
    if not here:
        return _convert_apart(source, target.expanduser())
    with show_progress(write=complain) as progress:
        progress.begin("importing JAX")
        from jaxserve.assemble.devices import settle_platform  # JAX and Orbax take seconds to import
        from jaxserve.models.orbax_io import convert

        set_up_logging(load_config().config.runtime)
        settle_platform()
        convert(source, target, progress=progress)
    return 0


def calibrate_cache_command(
    source: Annotated[Path, typer.Argument(help="Directory of the model, or demo.")],
    target: Annotated[Path, typer.Argument(help="New file, for cache.scales.")],
    data: Annotated[Path, typer.Option(help="Text, or JSONL with text, prompt or messages in each line.")],
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Measure the keys and values of a model on a text, for caches of eight bits."""
    resolved = load_config(config, with_model(set_, source, "SOURCE"))
    set_up_logging(resolved.config.runtime)
    with show_progress(write=complain) as progress:
        progress.begin("importing JAX")
        from jaxserve.assemble.calibrate import calibrate_cache  # JAX takes seconds to import

        num_tokens = calibrate_cache(resolved.config, data, target.expanduser(), progress=progress)
    print(f"wrote {target}, measured on {num_tokens:,} tokens")
    return 0


def quantize_command(
    source: Annotated[Path, typer.Argument(help="Directory of a float model, or demo.")],
    target: Annotated[Path, typer.Argument(help="New directory; an unfinished job is in TARGET.partial.")],
    scheme: Annotated[str, typer.Option(help="int8, int8-a8, int4 or fp8: what linear maps of layers become.")],
    data: Annotated[Path, typer.Option(help="To calibrate on: text, or JSONL with text, prompt or messages.")],
    method: Annotated[str, typer.Option(help="rtn (to nearest), gptq or awq.")] = "rtn",
    judge: Annotated[
        Path | None, typer.Option(help="To measure the quality on; default: an eighth of --data, held out.")
    ] = None,
    group: Annotated[int | None, typer.Option(help="Inputs of a scale of int4; default: 128, 64 or 32.")] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="NAME=SCHEME: a pattern of whole names; none: float. Repeatable.")
    ] = None,
    head: Annotated[str, typer.Option(help="The output projection: none or int8.")] = "none",
    embedding: Annotated[str, typer.Option(help="The table of embeddings: none or int8; vLLM reads none.")] = "none",
    budget_bits: Annotated[
        float | None, typer.Option(help="Bits of a rounded weight on average: int4, some of it raised to int8.")
    ] = None,
    kv: Annotated[bool, typer.Option("--kv", help="Scales of keys and values, too.")] = False,
    damping: Annotated[float, typer.Option(help="Of gptq: share of the mean that is added to the diagonal.")] = 0.01,
    tokens: Annotated[int, typer.Option(min=2, help="To calibrate on, at most.")] = 131_072,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Write a checkpoint of fewer bits, calibrated on a text, for jaxserve, vLLM and transformers."""
    resolved = load_config(config, with_model(set_, source, "SOURCE"))
    set_up_logging(resolved.config.runtime)
    with show_progress(write=complain) as progress:
        progress.begin("importing JAX")
        from jaxserve.assemble.quantise import quantise_checkpoint  # JAX takes seconds to import
        from jaxserve.quantise.choice import Options, read_rules
        from jaxserve.quantise.quality import lines

        options = Options(
            scheme=scheme,
            method=method,
            group=group,
            rules=read_rules(rule or ()),
            head=head,
            embedding=embedding,
            budget_bits=budget_bits,
            cache_scales=kv,
            damping=damping,
        )
        report = quantise_checkpoint(
            resolved.config,
            options,
            data,
            target.expanduser(),
            judge=judge,
            max_tokens=tokens,
            progress=progress,
        )
    print(f"wrote {target}")
    for line in lines(report):
        print(line)
    return 0


def _convert_apart(source: Path, target: Path) -> int:
    """Converts in a process of its own: Orbax's threads end with it at any moment, and leave nothing of their work."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:  # the short rest must not be interrupted
            signal.signal(each, signal.SIG_IGN)
        complain(f"interrupted: nothing was written to {target}")
        raise typer.Exit(128 + number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        with new_directory(target) as made:
            command = [sys.executable, "-m", "jaxserve", "convert", str(source), str(made), "--here"]
            worker = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is for this process, which ends it
            try:
                code = worker.wait()
            finally:
                worker.kill()
                worker.wait()
            if code < 0:
                complain(f"error: the conversion was killed by {signal.Signals(-code).name}: was there enough memory?")
            if code:
                raise typer.Exit(code if code > 0 else DEFECT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(f"wrote {target}")
    return 0


def plan_command(
    config: ConfigOption = None,
    set_: SetOption = None,
    topology: Annotated[list[str] | None, typer.Option(help="v5e:2x4, v6e:1, h200:2, ... Repeatable.")] = None,
    model: ModelOption = None,
    tensor: Annotated[str | None, typer.Option(help="Replaces parallel.tensor; auto: all devices.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="One table; --tensor is auto unless given.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    exact: Annotated[
        bool | None, typer.Option("--exact/--extend", help="Compile all layers, or a few; default by compiler.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compile nothing: sizes by arithmetic, in seconds.")] = False,
    buckets: Annotated[
        list[str] | None, typer.Option(help="Step to compile, 'decode 64x64', or 'all'; default: the largest two.")
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a row in predictions.")] = None,
) -> int:
    """Say whether a config fits devices that are not here, and how fast it could be. Exit code 3: it does not fit."""
    if quick and (buckets or exact is not None):
        raise ConfigError("--quick compiles nothing: leave out --buckets, --exact and --extend")
    resolved = load_config(config, with_model(set_, model))
    with show_progress(write=complain) as progress:
        progress.begin("importing JAX")
        from jaxserve.lab.planner.command import PlanOptions, make_plans, print_plans

        options = PlanOptions(
            tensor=int(tensor) if tensor is not None and tensor.isdecimal() else tensor,
            buckets=tuple(buckets or ()),
            context=context,
            compile=not quick,
            exact=exact,
        )
        plans = make_plans(resolved.config, topology or (), options, compare=compare, say=complain, progress=progress)
    return print_plans(plans, compare=compare, as_json=json_, say=complain)


def route_command(
    context: typer.Context,
    config: ConfigOption = None,
    set_: SetOption = None,
    to: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a server, or dns:///NAME:PORT. Repeatable.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    policy: Annotated[str | None, typer.Option(help="How to choose: prefix, least_load, power_of_two, …")] = None,
) -> int:
    """One door for several servers: spread requests, and move them when a server dies."""
    from jaxserve.cli.announcer import announcer
    from jaxserve.serve.route import route_forever  # gRPC: not needed elsewhere

    given = {
        "to": ("route.replicas", to or None),
        "port": ("serve.grpc.port", port),
        "policy": ("route.policy", policy),
    }
    resolved = load_config(config, [*(set_ or ()), *flag_settings(context, given)])
    refuse_settings_of_others(resolved, "jaxserve route", _ROUTER_READS, _SERVERS_ALONE)
    set_up_logging(resolved.config.runtime)
    log_environment(resolved)
    return route_forever(resolved.config, announcer(resolved.config.runtime))


def kv_server_command(
    context: typer.Context,
    config: ConfigOption = None,
    set_: SetOption = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    directory: Annotated[str | None, typer.Option(help="Directory of the pages; default: they are in memory.")] = None,
) -> int:
    """Keep pages of keys and values for servers, in memory or in a directory, until SIGTERM."""
    from jaxserve.cli.announcer import announcer
    from jaxserve.serve.kv_server import kv_server_forever  # gRPC: not needed elsewhere

    given = {"port": ("kv_server.port", port), "directory": ("kv_server.directory", directory)}
    resolved = load_config(config, [*(set_ or ()), *flag_settings(context, given)])
    refuse_settings_of_others(resolved, "jaxserve kv-server", ("kv_server", *_LOGGING))
    set_up_logging(resolved.config.runtime)
    log_environment(resolved)
    return kv_server_forever(resolved.config, announcer(resolved.config.runtime))


def replay_command(
    log: Annotated[Path, typer.Argument(help="Step log, as runtime.step_log writes it.")],
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Run the steps of a log again and compare every token. Exit code 3: one differs, and which is the first."""
    from jaxserve.lab.replay.command import replay_and_print  # JAX takes seconds to import

    resolved = load_config(config, set_ or ())
    set_up_logging(resolved.config.runtime)
    return replay_and_print(log, resolved)


def steps_command(log: Annotated[Path, typer.Argument(help="Step log, as runtime.step_log writes it.")]) -> None:
    """Say where the time of a step log went, by kind of step."""
    from jaxserve.lab.replay.summary import summarize_and_print

    summarize_and_print(log)


def health_command(
    address: Annotated[str, typer.Argument(help="HOST:PORT of gRPC, or http://HOST:PORT, of a server or a router.")],
    service: Annotated[str, typer.Option(help="Name of the health service; 'live': worth keeping.")] = "",
    timeout: Annotated[float, typer.Option(min=0.001, max=1e6, help="Seconds to wait for the answer.")] = 5.0,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until a server that is starting answers, or --timeout.")
    ] = False,
    ca: Annotated[
        Path | None, typer.Option(help="Asks over TLS: PEM file of authorities that may have signed its certificate.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file to show a server that asks for one.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    server_name: Annotated[
        str | None, typer.Option(help="Name in the server's certificate, where it is not that of the address.")
    ] = None,
) -> int:
    """Ask a server how it is: exit code 0 when it is serving, 1 when it is not or does not answer."""
    from jaxserve.client import Client, RequestFailed, Tls  # gRPC: not needed elsewhere

    if not address:
        raise ConfigError("the address is ''; give HOST:PORT of a server or a router")
    if ca is None and (certificate, key, server_name) != (None, None, None):
        raise ConfigError("--certificate, --key and --server-name are for servers with TLS; add --ca FILE")
    if "://" in address:
        if service not in ("", "live") or (certificate, key, server_name) != (None, None, None):
            raise ConfigError(
                "over HTTP there is --service live, and of the options for TLS --ca; leave out the others"
            )
        return _health_over_http(address, "/live" if service else "/health", timeout, wait=wait, ca=ca)
    tls = Tls(ca=ca, certificate=certificate, key=key, server_name=server_name) if ca is not None else None
    with Client(address, tls=tls) as client:
        try:
            serving = client.check_health(service, timeout_s=timeout, wait_for_ready=wait)
        except RequestFailed as error:
            silent = error.status in (Status.UNAVAILABLE, Status.DEADLINE)
            hint = f"; if it is a port of HTTP, ask http://{address}" if "SETTINGS" in str(error) else ""
            print(f"{'NO_ANSWER' if silent else 'ERROR'} from {address}: {one_line(error)}{hint}")
            return 1
    print("SERVING" if serving else "NOT_SERVING")
    return 0 if serving else 1


def _health_over_http(address: str, route: str, timeout_s: float, *, wait: bool, ca: Path | None) -> int:
    from jaxserve.cli.http_call import call, http_url

    url, end_s = http_url(address, route), time.monotonic() + timeout_s
    while True:
        left_s = max(end_s - time.monotonic(), 0.001)
        try:
            with call(url, tls_ca=None if ca is None else str(ca), timeout_s=left_s, good=(200, 503)) as answer:
                serving = answer.status == 200
        except ConfigError as error:
            if not wait or time.monotonic() >= end_s:
                print(f"NO_ANSWER from {address}: {one_line(error)}")
                return 1
            time.sleep(min(_ASK_AGAIN_S, left_s))
            continue
        print("SERVING" if serving else "NOT_SERVING")
        return 0 if serving else 1


def top_command(
    url: Annotated[str, typer.Argument(help="HOST:PORT of a server's HTTP door, or a whole URL.")] = "127.0.0.1:8000",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key, where the server wants one.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="PEM file of authorities for https.")] = None,
    every: Annotated[float, typer.Option(min=0.1, max=1e6, help="Seconds between readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and end.")] = False,
) -> int:
    """Watch a running server: rates, pages, latencies."""
    from jaxserve.cli.top import show
    from jaxserve.serve.keys import read_keys

    key = read_keys(str(api_key_file), "--api-key-file")[0] if api_key_file is not None else None
    return show(url, key, every_s=every, once=once, tls_ca=None if tls_ca is None else str(tls_ca))


def version_command() -> None:
    """Print the versions of jaxserve and of what it runs on."""
    print(f"jaxserve {__version__}")
    for name in ("jax", "jaxlib", "flax"):
        print(f"{name} {importlib.metadata.version(name)}")
    print(f"python {platform.python_version()}")
