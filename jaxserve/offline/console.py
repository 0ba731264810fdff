"""The output at a terminal: progress bars, log lines and errors on stderr, results on stdout.

stdout belongs to results alone, so that they can be piped; results for programs are written by `offline.jsonl`. Bars
vanish or shrink to one line where stderr is no terminal; rich decides that.
"""

import logging
import os
import sys
import time
from types import TracebackType
from typing import NoReturn

import rich.console
import rich.logging
import rich.progress
import rich.text

from jaxserve.config import ResolvedConfig, settings_from_environment
from jaxserve.config.schema import RuntimeConfig
from jaxserve.errors import JaxserveError
from jaxserve.offline import Counts, Result
from jaxserve.offline.jsonl import Entry
from jaxserve.progress import error_console
from jaxserve.telemetry.logs import JsonFormatter

_REFRESH_S = 0.1


def set_up_logging(config: RuntimeConfig, *, warnings_alone: bool = False) -> None:
    """Shows what the package logs, as `config` says. For programs; a library leaves logging to its user.

    `warnings_alone`: and errors, of what the config would show; for commands whose answer is what their user waits for.
    In JSON, the warnings of other packages are lines of JSON, too: log collectors read nothing else.
    """
    console = rich.console.Console(stderr=True)
    handler: logging.Handler
    root = logging.getLogger()
    root.handlers[:] = [other for other in root.handlers if not isinstance(other.formatter, JsonFormatter)]
    if config.log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        root.addHandler(handler)
    elif console.is_terminal:
        handler = rich.logging.RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:  # a file or a journal: whole lines, whatever their length
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("jaxserve")
    logger.handlers[:] = [handler]
    logger.setLevel(config.log_level.upper())
    if warnings_alone:
        logger.setLevel(max(logger.level, logging.WARNING))
    logger.propagate = False


def log_environment(resolved: ResolvedConfig) -> None:
    """Says which settings came from the environment, which no file shows. Values are not told."""
    if found := settings_from_environment(resolved):
        names = ", ".join(f"{name} ({variable})" for name, variable in found.items())
        logging.getLogger("jaxserve").info("settings from the environment: %s", names)


def complain(line: str) -> None:
    """Writes one line to stderr, unchanged."""
    print(line, file=sys.stderr, flush=True)


def leave_without_devices(code: int) -> NoReturn:
    """Ends the process at once: the interpreter's own exit waits for devices, of which one may never answer."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class TextWriter:
    """Prompts and answers for reading."""

    def __init__(self) -> None:
        self._console = rich.console.Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def write(self, entry: Entry, result: Result) -> None:
        """Prints one result. Nothing for an error: it has been reported on stderr."""
        if isinstance(result, JaxserveError):
            return
        self._console.print(rich.text.Text(f"> {entry.fields.get('prompt')}", style="bold cyan"))
        for output in result.outputs:
            self._console.print(rich.text.Text(output.text))
            note = f"({len(output.token_ids)} tokens, {output.finish_reason})\n"
            self._console.print(rich.text.Text(note, style="dim"))


class BatchBar:
    """Prompts done and tokens a second of one batch. A context manager.

    `total` None: not known. `shown` False draws nothing, and makes nothing that could: rich's objects refer to each
    other in circles, which a program that generates in a loop would gather until Python looks at all it has.
    """

    def __init__(self, total: int | None, *, shown: bool = True) -> None:
        self._start_s = self._last_s = time.monotonic()
        self._counts: Counts | None = None
        self._bar: rich.progress.Progress | None = None
        if not shown:
            return
        console = error_console()
        # The widget of a notebook takes messages from the thread of the cell alone, so that no other may draw there.
        self._draws_itself = not console.is_jupyter
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("prompts"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            auto_refresh=self._draws_itself,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "BatchBar":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is None:
            return
        if self._counts is not None:
            self._draw(self._bar, self._counts, time.monotonic())
        self._bar.stop()

    def update(self, counts: Counts) -> None:
        """Cheap enough to be called at every step."""
        self._counts = counts
        if self._bar is None:
            return
        now_s = time.monotonic()
        if now_s - self._last_s >= _REFRESH_S:
            self._draw(self._bar, counts, now_s)

    def note(self, line: str) -> None:
        """A line on stderr, above the bar, which must be shown."""
        assert self._bar is not None, "nothing is shown"
        self._bar.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _draw(self, bar: rich.progress.Progress, counts: Counts, now_s: float) -> None:
        self._last_s = now_s
        seconds = max(now_s - self._start_s, 1e-9)
        rates = f"in {counts.prompt_tokens / seconds:.0f} tok/s, out {counts.output_tokens / seconds:.0f} tok/s"
        bar.update(self._task, completed=counts.num_done, description=rates, refresh=not self._draws_itself)
