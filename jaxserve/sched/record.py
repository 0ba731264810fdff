"""The step log as a format: the plan, the result and the times of each step, as lines of JSON, and their reader.

A running engine measures and writes in `engine.step_log`; `replay` runs a log again.

A log is JSON lines: one header, one record a step in the order of the steps, one end. A log without its end is one
whose engine was killed: every whole line of it is good. A record says how many before it were lost, so that no reader
takes a gap for a sequence.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from jaxserve.errors import StepLogError
from jaxserve.sched import codec
from jaxserve.sched.plan import Bucket, Drafted, Limits, StepPlan, StepResult

__all__ = [
    "LogEnd",
    "LogHeader",
    "StepLog",
    "StepRecord",
    "context_tokens",
    "read_header",
    "read_records",
    "rounds_run",
]

FORMAT = "jaxserve step log"
VERSION = 4


def context_tokens(plan: StepPlan) -> int:
    """Tokens whose keys and values the step reads, at most: of each row, all up to the last token that it feeds; of a
    decode row that draws several, the first."""
    decoded = sum(plan.decode_positions) + len(plan.decode_positions)
    return decoded + sum(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)


def rounds_run(result: "StepResult | StepRecord") -> int:
    """The rounds that a step really had: it ends when all its rows have, perhaps before those that its plan allows."""
    if result.drafts is not None:
        return max(map(len, result.drafts))
    return 1 if result.counts is None else max(result.counts)  # without drafts a round draws one token of a row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that was run and committed. Times are those of its own plan, in whichever turns of the loop.

    Attributes:
      bucket: the compiled shape; of the step as a whole where a pipeline runs it in parts.
      token_ids, counts, drafts: what was drawn, and what became of drafts, as in `StepResult`.
      start_s: when planning began, in seconds since the log began, on a monotonic clock.
      schedule_ms: planning, the masks of grammars included.
      pack_ms: packing, the transfer to the device and the launch: the runner's `dispatch`.
      device_ms: from the launch, or from the end of the step before where that was later, to its tokens on the host.
        Where the host came late (`wait_ms` near 0) it holds the host's delay, too.
      wait_ms: the part of `device_ms` in which the host did nothing else.
      commit_ms: taking in the tokens: the scheduler, text, streams.
      missing: records lost just before this one.
    """

    plan: StepPlan
    bucket: Bucket
    token_ids: tuple[int, ...]
    start_s: float
    schedule_ms: float
    pack_ms: float
    device_ms: float
    wait_ms: float
    commit_ms: float
    missing: int = 0
    counts: tuple[int, ...] | None = None
    drafts: tuple[tuple[Drafted, ...], ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Slots of the compiled shape that held a token."""
        return self.plan.num_tokens

    @property
    def padded_tokens(self) -> int:
        """Slots of the compiled shape that held no token."""
        return self.bucket.tokens - self.plan.num_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens whose keys and values the step read."""
        return context_tokens(self.plan)

    @property
    def host_ms(self) -> float:
        """Time of the host for the step: schedule, pack, commit."""
        return self.schedule_ms + self.pack_ms + self.commit_ms

    def to_json(self) -> str:
        """One line, without its end. Counts that follow from the plan are there for people; `from_json` checks them."""
        plan = self.plan
        head = (
            f'{{"step_id":{plan.step_id},"start_s":{self.start_s:.6f},"schedule_ms":{self.schedule_ms:.4f},'
            f'"pack_ms":{self.pack_ms:.4f},"device_ms":{self.device_ms:.4f},"wait_ms":{self.wait_ms:.4f},'
            f'"commit_ms":{self.commit_ms:.4f},"num_tokens":{plan.num_tokens},"padded_tokens":{self.padded_tokens},'
            f'"context_tokens":{self.context_tokens},"missing":{self.missing},'
        )
        lists = {"bucket": self.bucket, "token_ids": self.token_ids, "counts": self.counts, "drafts": self.drafts}
        texts = [f'"{name}":{_line(values)},' for name, values in lists.items() if values is not None]
        return f'{head}{"".join(texts)}"plan":{plan.to_json()}}}'

    @classmethod
    def from_json(cls, line: str) -> "StepRecord":
        """The record that `to_json` wrote, times rounded as there. Raises ValueError, KeyError, TypeError or one of
        the errors of `SamplingParams` for anything else."""
        return cls.from_fields(json.loads(line))

    @classmethod
    def from_fields(cls, raw: dict[str, Any]) -> "StepRecord":
        """The record of a JSON object, already parsed."""
        record = cls(
            plan=StepPlan.from_fields(raw["plan"]),
            bucket=Bucket(*raw["bucket"]),
            token_ids=tuple(raw["token_ids"]),
            missing=raw["missing"],
            counts=tuple(raw["counts"]) if "counts" in raw else None,
            drafts=tuple(tuple(Drafted(*one) for one in row) for row in raw["drafts"]) if "drafts" in raw else None,
            **{name: float(raw[name]) for name in _TIMES},
        )
        for name, found in (
            ("step_id", record.plan.step_id),
            ("num_tokens", record.num_tokens),
            ("padded_tokens", record.padded_tokens),
            ("context_tokens", record.context_tokens),
        ):
            if raw[name] != found:
                raise ValueError(f"{name} is {raw[name]}, but that of the plan is {found}")
        rows, counts = record.plan.sampled_rows, record.counts
        if (counts is not None) != bool(record.plan.row_tokens) or len(rows) != len(rows if counts is None else counts):
            raise ValueError(f"counts {counts} of up to {record.plan.row_tokens} tokens of {len(rows)} rows")
        if len(record.token_ids) != (len(rows) if counts is None else sum(counts)):
            raise ValueError(f"{len(record.token_ids)} tokens of {len(rows)} rows")
        if record.drafts is not None:
            drawn = [sum(accepted + 1 for _, accepted in row) for row in record.drafts]
            wrong = any(not 0 <= accepted <= drafted for row in record.drafts for drafted, accepted in row)
            if wrong or counts is None or drawn != [*counts]:
                raise ValueError(f"drafts {record.drafts} of rows that drew {counts} tokens")
        return record


def _line(values: object) -> str:
    return json.dumps(values, separators=(",", ":"))


_TIMES = ("start_s", "schedule_ms", "pack_ms", "device_ms", "wait_ms", "commit_ms")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """The first line: what the plans were made for, so that a replay can say beforehand whether it fits.

    Attributes:
      model: name of the model.
      policy: of the scheduler, as it was asked for.
      vocab_size: V of the model.
      replica: number of the replica, from 0.
      started_at: wall clock, seconds since 1970.
      settings: what else can change a token (types, kernels, seeds), by name, as texts.
    """

    limits: Limits
    model: str
    policy: str
    vocab_size: int
    replica: int = 0
    started_at: float = 0.0
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """One line, without its end."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return codec.dumps({"format": FORMAT, "version": VERSION, **fields})

    @classmethod
    def from_fields(cls, raw: dict[str, Any]) -> "LogHeader":
        """The header of a JSON object, already parsed."""
        return codec.load(cls, {name: raw[name] for name in raw if name not in ("format", "version")})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """The last line. `dropped`: steps that are not in the log, because it could not be written fast enough."""

    records: int
    dropped: int

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps({"end": dataclasses.asdict(self)}, separators=(",", ":"))


class StepLog:
    """A log that is being read, line by line: iterate once. Mutated by the iteration.

    Attributes:
      header: the first line.
      end: the last line, once it was read; None until then, and for a log whose engine was killed.
      line: number of the line that was read last, from 1.
    """

    def __init__(self, path: Path | str) -> None:
        """Opens the file and reads the header. Raises StepLogError."""
        self.end: LogEnd | None = None
        self.line = 0
        self._path = path
        try:
            self._file: IO[str] = open(path, encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise StepLogError(f"cannot read the step log {path}: {error.strerror}; give the path of one") from error
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; nothing can be read afterwards."""
        self._file.close()

    def __iter__(self) -> Iterator[StepRecord]:
        """The records, in order. Raises StepLogError at the first line that is none."""
        while (line := self._next_line()) is not None:
            if self.end is not None:
                raise self._error("something follows the line that ends the log: two logs in one file? Cut it there")
            try:
                raw = json.loads(line)
                if "end" in raw:
                    self.end = LogEnd(**raw["end"])
                    continue
                record = StepRecord.from_fields(raw)
            except Exception as error:  # errors of values that a damaged line has
                raise self._error(f"it is no record of a step ({error!r:.200})") from error
            yield record

    def _read_header(self) -> LogHeader:
        line = self._next_line()
        try:
            raw = json.loads(line or "")
            is_ours = raw["format"] == FORMAT
        except (ValueError, KeyError, TypeError):
            is_ours = False
            raw = {}
        if not is_ours:
            raise self._error("this is no header of a step log; write one with runtime.step_log")
        if raw.get("version") != VERSION:
            raise self._error(
                f"version {raw.get('version')} of the format; this jaxserve reads {VERSION}. Use the jaxserve that"
                " wrote the log"
            )
        try:
            return LogHeader.from_fields(raw)
        except Exception as error:
            raise self._error(f"the header is damaged ({error!r:.200})") from error

    def _next_line(self) -> str | None:
        self.line += 1
        try:
            line = self._file.readline()
        except UnicodeDecodeError as error:
            raise self._error("it is not text in UTF-8") from error
        if not line:
            return None
        if not line.endswith("\n"):
            raise self._error(
                "it is cut short, its writer was killed or its disk full; the lines before it are whole, remove it"
            )
        return line

    def _error(self, what: str) -> StepLogError:
        return StepLogError(f"{self._path}, line {self.line}: {what}")


def read_records(path: Path | str) -> Iterator[StepRecord]:
    """The records of a log, streamed in the order of the steps. Raises StepLogError with the number of the line."""
    with StepLog(path) as log:
        yield from log


def read_header(path: Path | str) -> LogHeader:
    """The header alone. Raises StepLogError."""
    with StepLog(path) as log:
        return log.header
