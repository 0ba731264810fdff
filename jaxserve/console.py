"""What a person at a terminal sees: progress bars, log lines and complaints on stderr, results on stdout.

Owns their look. Refuses results for programs (`offline.jsonl`). stdout belongs to results alone, so that they can be
piped. Bars vanish or shrink to one line where stderr is no terminal; rich decides that.
"""

import logging
import sys
import time
from types import TracebackType

import rich.console
import rich.logging
import rich.progress
import rich.text

from jaxserve.config_schema import RuntimeConfig
from jaxserve.errors import JaxserveError
from jaxserve.offline import Counts, Result
from jaxserve.offline.jsonl import Entry
from jaxserve.telemetry.logs import JsonFormatter

logger = logging.getLogger(__name__)

_REFRESH_S = 0.1


def set_up_logging(config: RuntimeConfig) -> None:
    """Shows what the package logs, as `config` says. For programs; a library leaves logging to its user.

    In JSON, the warnings of other packages are lines of JSON, too: what collects them reads nothing else.
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
    logger.propagate = False


def complain(line: str) -> None:
    """One line on stderr, as it is."""
    print(line, file=sys.stderr, flush=True)


class TextWriter:
    """Prompts and answers for reading."""

    def __init__(self) -> None:
        self._console = rich.console.Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def write(self, entry: Entry, result: Result) -> None:
        """Prints nothing for an error: it has been reported on stderr."""
        if isinstance(result, JaxserveError):
            return
        self._console.print(rich.text.Text(f"> {entry.fields.get('prompt')}", style="bold cyan"))
        for output in result.outputs:
            self._console.print(rich.text.Text(output.text))
            note = f"({len(output.token_ids)} tokens, {output.finish_reason})\n"
            self._console.print(rich.text.Text(note, style="dim"))


def _columns(what: str) -> tuple[rich.progress.ProgressColumn, ...]:
    return (
        rich.progress.TextColumn(what),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeElapsedColumn(),
    )


class StartBar:
    """How many of the executables are compiled. A context manager; gone when it ends. Log lines without a terminal."""

    def __init__(self, *, shown: bool = True) -> None:
        console = rich.console.Console(stderr=True)
        self._drawn = console.is_terminal or console.is_jupyter
        self._bar = rich.progress.Progress(
            *_columns("compiling"),
            console=console,
            transient=True,
            disable=not (shown and self._drawn),
        )
        self._task: rich.progress.TaskID | None = None
        self._shown = shown

    def __enter__(self) -> "StartBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, newest: str) -> None:
        """`newest` names the executable that was finished last."""
        if self._shown and not self._drawn:
            logger.info("compiled %d of %d: %s", done, total, newest)
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, description=newest)


class BatchBar:
    """Prompts done and tokens a second of one batch. A context manager.

    `total` None: not known. `shown` False draws nothing.
    """

    def __init__(self, total: int | None, *, shown: bool = True) -> None:
        self._bar = rich.progress.Progress(
            *_columns("prompts"),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            disable=not shown,
        )
        self._task = self._bar.add_task("", total=total)
        self._shown = shown
        self._start_s = self._last_s = time.monotonic()
        self._counts: Counts | None = None

    def __enter__(self) -> "BatchBar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._counts is not None:
            self._draw(self._counts, time.monotonic())
        self._bar.stop()

    def update(self, counts: Counts) -> None:
        """Cheap enough to be called at every step."""
        self._counts = counts
        now_s = time.monotonic()
        if self._shown and now_s - self._last_s >= _REFRESH_S:
            self._draw(counts, now_s)

    def note(self, line: str) -> None:
        """A line on stderr, above the bar."""
        self._bar.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _draw(self, counts: Counts, now_s: float) -> None:
        self._last_s = now_s
        seconds = max(now_s - self._start_s, 1e-9)
        rates = f"in {counts.prompt_tokens / seconds:.0f} tok/s, out {counts.output_tokens / seconds:.0f} tok/s"
        self._bar.update(self._task, completed=counts.num_done, description=rates)
