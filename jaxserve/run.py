"""`python -m jaxserve.run`: serve a model, or answer prompts and exit.

stdout gets results and nothing else; progress, logs and errors go to stderr.

Exit codes: 0; 2 when the user can change something (one line that begins with "error:"); 1 for a defect (a traceback)
and when a host of several is lost (one line); 5 when the device does not answer, and no other replica is left.
A batch ends with 0 when all of its entries succeeded, with 3 when some failed, which are reported one by one and
counted, and with 2 when all did.
"""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from jaxserve.cli.options import (
    HELP_OPTIONS,
    USER_ERROR,
    Command,
    ConfigOption,
    SetOption,
    flag_settings,
    one_line,
    run_app,
    sampling_flags,
    with_one_model,
)
from jaxserve.config import ResolvedConfig, for_batches, load_config, settings_from_environment
from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import HostsConfig
from jaxserve.engine import AnyEngine, refuse_url
from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError
from jaxserve.offline import InOrder, Result, check_takes_pictures, open_under, read_pictures, run_jobs
from jaxserve.offline.console import (
    BatchBar,
    TextWriter,
    complain,
    leave_without_devices,
    log_environment,
    set_up_logging,
)
from jaxserve.offline.journal import BatchResult, Journal, input_fact, run_journaled
from jaxserve.offline.jsonl import BatchOptions, Entry, JsonWriter, count_entries, make_jobs, read_entries
from jaxserve.progress import Progress, show_progress

if TYPE_CHECKING:
    from jaxserve.assemble import Assembly  # with JAX

logger = logging.getLogger("jaxserve.run")  # by its name: as a program this module is "__main__"

SOME_FAILED = 3
_HTTP_PORT = 8000  # of `jaxserve serve`, as with other engines


def run_command(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Directory of a model, GGUF file, demo, or demo-vision; default: --config's.")
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    model_option: Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to complete or answer. Repeatable.")] = None,
    input_: Annotated[Path | None, typer.Option("--input", help="JSONL file of prompts.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSONL file of results; default: stdout.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="File that keeps finished results: after a crash the same command goes on.")
    ] = None,
    picture: Annotated[
        list[Path] | None, typer.Option(help="File of a picture that each --prompt is about, with --chat. Repeatable.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Directory of the pictures that --input names by file: URLs.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="A prompt is a user's message.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate at most; default: 256, if they fit.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: as the checkpoint says.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object per result on stdout.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="The text begins with the prompt.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the log beside answers, not its warnings alone.")
    ] = False,
) -> int:
    """Answer prompts (--prompt, --input) and exit, or serve the ports of a config; see also `jaxserve serve MODEL`."""
    resolved = load_config(config, with_one_model(context, set_, model, model_option))
    answers = bool(prompt) or input_ is not None
    attends = resolved.config.hosts.process_id > 0
    set_up_logging(
        resolved.config.runtime, warnings_alone=answers and not attends and not verbose and not _asks_for_log(resolved)
    )
    _check_hosts(resolved)
    if attends:
        return _attend(resolved)  # the same command on every host: prompts and ports are for process 0
    flags = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling = sampling_flags(context, flags)
    if not answers:
        given = {"output": output is not None, "journal": journal is not None}
        others = {"chat": chat, "picture": bool(picture), "json": json_, "echo": echo, **given}
        return _serve(resolved, [*sampling, *(name for name, given in others.items() if given)])
    if prompt and input_ is not None:
        raise ConfigError("give --prompt or --input, not both")
    if journal is not None and (input_ is None or output is None):
        raise ConfigError("--journal needs --input and --output: it keeps what is written from the one to the other")
    if journal is not None and output is not None and journal.resolve() == output.resolve():
        raise ConfigError(f"--journal and --output are the same file, {journal}")
    if pictures is not None and input_ is None:
        raise ConfigError("--pictures is for the messages of --input; give both")
    if picture and not (prompt and chat):
        raise ConfigError("--picture is for messages on the command line; give --prompt and --chat, too")
    options = BatchOptions(
        sampling=sampling,
        chat=chat,
        echo=echo,
        pictures=read_pictures(picture or ()),
        open_url=refuse_url if pictures is None else open_under(pictures),
    )
    if picture:
        check_takes_pictures(resolved.config.model)
    with _open_files(input_, output) as files:
        if journal is not None and files.source is not None:
            facts = _batch_facts(resolved, files.source, options)
            with contextlib.closing(Journal(journal, facts)) as opened, _built(for_batches(resolved)) as assembly:
                return _run_journaled(assembly.engine, assembly.sampling_defaults, files, options, opened)
        pretty = input_ is None and output is None and not json_
        writer = TextWriter() if pretty else JsonWriter(files.target)
        return _answer(resolved, prompt or (), files, options, writer)


def serve_command(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Directory of a model, GGUF file, demo, or demo-vision; default: --config's.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of HTTP; 0 takes a free one. Default: 8000.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    model_option: Annotated[str | None, typer.Option("--model", "-m", hidden=True)] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Sets model.name.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Sets model.tokenizer.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Sets model.dtype.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Sets model.quantization.")] = None,
    seed: Annotated[int | None, typer.Option(help="Sets model.seed.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Sets model.max_len.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sets sched.max_rows.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Sets sched.max_step_tokens.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Sets cache.page_size.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Sets cache.memory_fraction.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Sets parallel.tensor.")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "-pp", help="Sets parallel.pipeline.")
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option("--data-parallel-size", "-dp", help="Sets parallel.data.")
    ] = None,
) -> int:
    """Serve a model over HTTP until SIGTERM: OpenAI's and Anthropic's APIs, and a page for a chat."""
    given = {
        "port": ("serve.http.port", port),
        "host": ("serve.host", host),
        "served_model_name": ("model.name", served_model_name),
        "tokenizer": ("model.tokenizer", tokenizer),
        "dtype": ("model.dtype", dtype),
        "quantization": ("model.quantization", quantization),
        "seed": ("model.seed", seed),
        "max_model_len": ("model.max_len", max_model_len),
        "max_num_seqs": ("sched.max_rows", max_num_seqs),
        "max_num_batched_tokens": ("sched.max_step_tokens", max_num_batched_tokens),
        "block_size": ("cache.page_size", block_size),
        "gpu_memory_utilization": ("cache.memory_fraction", gpu_memory_utilization),
        "tensor_parallel_size": ("parallel.tensor", tensor_parallel_size),
        "pipeline_parallel_size": ("parallel.pipeline", pipeline_parallel_size),
        "data_parallel_size": ("parallel.data", data_parallel_size),
    }
    overrides = [*with_one_model(context, set_, model, model_option), *flag_settings(context, given)]
    resolved = load_config(config, overrides)
    if resolved.config.serve.http.port is None:
        resolved = load_config(config, [*overrides, f"serve.http.port={_HTTP_PORT}"])
    if resolved.sources["model.path"] == "default":
        raise ConfigError("which model? `jaxserve serve DIRECTORY` serves a model of yours, `jaxserve serve demo` ours")
    set_up_logging(resolved.config.runtime)
    _check_hosts(resolved)
    if resolved.config.hosts.process_id > 0:
        return _attend(resolved)
    return _serve(resolved, ())


def _asks_for_log(resolved: ResolvedConfig) -> bool:
    """Whether the config says what is to be logged, or that programs read it."""
    return resolved.sources["runtime.log_level"] != "default" or resolved.config.runtime.log_format != "text"


def _check_hosts(resolved: ResolvedConfig) -> None:
    if resolved.config.hosts != HostsConfig():
        from jaxserve.hosts import check_hosts  # gRPC: not needed by one process that answers prompts

        check_hosts(resolved.config)


def _serve(resolved: ResolvedConfig, offline_flags: Sequence[str]) -> int:
    from jaxserve.cli.announcer import announcer
    from jaxserve.serve.handoff import HandoffSetup
    from jaxserve.serve.how_to_call import how_to_call
    from jaxserve.serve.orders import ShownSettings
    from jaxserve.serve.ports import hold_ports
    from jaxserve.serve.service import (  # gRPC: not needed for prompts
        HUNG,
        Addresses,
        check_serve_config,
        serve_forever,
    )
    from jaxserve.telemetry import check_tracing, observe_requests

    serve = resolved.config.serve
    if offline_flags:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in offline_flags)
        raise ConfigError(f"{names} given, but nothing to answer: add --prompt TEXT or --input FILE")
    if serve.grpc.port is None and serve.http.port is None:
        raise ConfigError(
            "nothing to do: give --prompt TEXT or --input FILE to answer prompts, or a port to serve: `jaxserve serve "
            "MODEL --port 8000` is for HTTP, --set serve.grpc.port=8500 for gRPC; `jaxserve chat MODEL` is for a talk"
        )
    log_environment(resolved)
    check_serve_config(serve)  # a wrong file is reported before minutes are spent on loading
    check_tracing(resolved.config.runtime)
    with (
        hold_ports(serve) as ports,  # and so is a port that is in use
        _built(resolved, logger.info) as assembly,
        observe_requests(assembly.engine, resolved.config.runtime),
    ):
        handoff = None if assembly.pages is None else HandoffSetup(resolved.config.handoff, assembly.pages)
        settings = ShownSettings(resolved.config.model_dump(mode="json"), settings_from_environment(resolved))
        directory = resolved.config.adapters.directory

        def on_ready(addresses: Addresses) -> None:
            if resolved.config.runtime.log_format == "text" and addresses.http is not None:
                tokenizer = assembly.engine.tokenizer
                chats = tokenizer is not None and tokenizer.chat_template is not None
                for line in how_to_call(addresses.http, assembly.engine.model.name, serve.http, chats=chats):
                    complain(line)

        code = serve_forever(
            assembly.engine,
            serve,
            ports,
            handoff,
            assembly.weights,
            settings,
            directory,
            on_ready,
            log_refusals=resolved.config.runtime.log_requests,
            say=announcer(resolved.config.runtime),
        )
    if code == HUNG:
        leave_without_devices(code)
    return code


@contextlib.contextmanager
def _built(resolved: ResolvedConfig, write: Callable[[str], None] | None = None) -> "Iterator[Assembly]":
    """The engine, and what doors need beside it. Other processes of a service over several hosts end with the block.

    `write`: takes the lines of the start where no terminal is; None: they are for people, so they go to stderr where
    the log does not show them.
    """
    resolve_model_path(resolved.config.model.path)  # a name that is no directory is told before JAX is loaded
    with contextlib.ExitStack() as stack:
        with _progress(resolved, write) as progress:
            from jaxserve.assemble import assemble  # JAX takes seconds, which a wrong option need not cost

            if resolved.config.hosts.coordinator is None:
                assembly = assemble(resolved, progress=progress)
            else:
                from jaxserve.assemble.many_hosts import lead

                assembly = stack.enter_context(lead(resolved, progress))
        yield assembly


def _attend(resolved: ResolvedConfig) -> int:
    with contextlib.ExitStack() as start:
        progress = start.enter_context(_progress(resolved, logger.info))
        from jaxserve.assemble.many_hosts import attend

        return attend(resolved, progress, on_ready=start.close)


@contextlib.contextmanager
def _progress(resolved: ResolvedConfig, write: Callable[[str], None] | None) -> Iterator[Progress]:
    """Begun before JAX is imported, which takes seconds."""
    with show_progress(write=write) as progress:
        progress.begin(f"starting with model {resolved.config.model.path}: loading JAX")
        yield progress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Both ends of a batch. `source` None: the prompts of the command line."""

    source: IO[bytes] | None
    source_name: str
    target: IO[bytes]


@contextlib.contextmanager
def _open_files(input_: Path | None, output: Path | None) -> Iterator[_Files]:
    """Opens both before anything is loaded. The old content of `output` stays until there is something to write."""
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(input_.open("rb")) if input_ is not None else None
            if input_ is not None and output is not None and output.exists() and os.path.samefile(input_, output):
                raise ConfigError(f"--input and --output are the same file, {input_}")
            target = stack.enter_context(output.open("ab")) if output is not None else sys.stdout.buffer
        except OSError as error:
            raise ConfigError(f"cannot open {error.filename}: {error.strerror}") from error
        yield _Files(source=source, source_name=str(input_), target=target)


def _entries(prompts: Sequence[str], files: _Files) -> Iterator[tuple[Entry, InvalidRequest | None]]:
    if files.source is not None:
        return read_entries(files.source)
    return ((Entry(fields={"prompt": prompt}), None) for prompt in prompts)


def _answer(
    resolved: ResolvedConfig,
    prompts: Sequence[str],
    files: _Files,
    options: BatchOptions,
    writer: TextWriter | JsonWriter,
) -> int:
    with _built(for_batches(resolved)) as assembly:
        return _run_batch(assembly.engine, assembly.sampling_defaults, prompts, files, options, writer)


def _run_batch(
    engine: AnyEngine,
    defaults: Mapping[str, object],
    prompts: Sequence[str],
    files: _Files,
    options: BatchOptions,
    writer: TextWriter | JsonWriter,
) -> int:
    total = len(prompts) if files.source is None else count_entries(files.source)
    options = _with_defaults(options, defaults)
    _empty(files.target)
    entries: list[Entry | None] = []
    num_failed = 0
    # On one terminal the bar and the results would be written over each other: the results come after the bar.
    held: list[tuple[Entry, Result]] | None = [] if files.target.isatty() and sys.stderr.isatty() else None
    with BatchBar(total) as bar:

        def emit(index: int, result: Result) -> None:
            nonlocal num_failed
            entry, entries[index] = entries[index], None
            assert entry is not None, f"two results for entry {index}"
            if isinstance(result, JaxserveError):
                num_failed += 1
                bar.note(f"error: {_place(entry, index, total, files.source_name)}{one_line(result)}")
            if held is None:
                writer.write(entry, result)
            else:
                held.append((entry, result))

        run_jobs(
            engine, make_jobs(engine, _entries(prompts, files), options, entries.append), InOrder(emit), bar.update
        )
    for entry, result in held or ():
        writer.write(entry, result)
    return _report(BatchResult(len(entries), num_failed, 0), files)


def _run_journaled(
    engine: AnyEngine, defaults: Mapping[str, object], files: _Files, options: BatchOptions, journal: Journal
) -> int:
    assert files.source is not None
    _empty(files.target)
    with BatchBar(count_entries(files.source)) as bar:

        def on_error(entry: Entry, error: JaxserveError) -> None:
            bar.note(f"error: {files.source_name}:{entry.line}: {one_line(error)}")

        options = _with_defaults(options, defaults)
        entries = read_entries(files.source)
        done = run_journaled(engine, entries, options, journal, files.target, on_error, bar.update)
    return _report(done, files)


def _batch_facts(resolved: ResolvedConfig, source: IO[bytes], options: BatchOptions) -> dict[str, str]:
    """What the answers of a batch depend on, by the names that a user knows. Raises ConfigError for a pipe."""
    model = {f"model.{name}": str(value) for name, value in resolved.config.model.model_dump(mode="json").items()}
    given = {f"--{name.replace('_', '-')}": str(value) for name, value in options.sampling.items()}
    return {
        "the content of --input": input_fact(source),
        **model,
        **given,
        "--chat": str(options.chat),
        "--echo": str(options.echo),
    }


def _with_defaults(options: BatchOptions, defaults: Mapping[str, object]) -> BatchOptions:
    return dataclasses.replace(options, sampling={**defaults, **options.sampling})


def _empty(target: IO[bytes]) -> None:
    if target.seekable() and target is not sys.stdout.buffer:
        target.truncate(0)


def _report(done: BatchResult, files: _Files) -> int:
    """Tells how a batch has ended; its exit code."""
    if files.source is not None:
        known = f", {done.num_known} of them in an earlier run" if done.num_known else ""
        num_good = done.num_entries - done.num_failed
        complain(f"{num_good} of {done.num_entries} entries of {files.source_name} succeeded{known}")
    if not done.num_failed:
        return 0
    return USER_ERROR if done.num_failed == done.num_entries else SOME_FAILED


def _place(entry: Entry, index: int, total: int | None, source_name: str) -> str:
    if entry.line is not None:
        return f"{source_name}:{entry.line}: "
    return f"prompt {index + 1}: " if total != 1 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. `arguments` default to those of the process."""
    app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)
    app.command(cls=Command)(run_command)
    return run_app(typer.main.get_command(app), "python -m jaxserve.run", arguments)


if __name__ == "__main__":
    sys.exit(main())
