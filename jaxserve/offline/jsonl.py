"""Files of prompts, one JSON object a line, and the objects that are written for them.

A line that is wrong becomes an error in its place, so that a file of a million lines is never lost to one.

A line has one of "prompt" (text or ids), "prompt_token_ids" and "messages"; "id", which is given back; and any option
of `SamplingParams`. Messages may have pictures: `data:` URLs, and `file:` URLs where a directory of pictures is named.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from jaxserve.api import Request, RequestOptions, SamplingParams
from jaxserve.engine import AnyEngine, OpenUrl, refuse_url
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.offline.jobs import Job, prepare_chat, prompt_text
from jaxserve.offline.results import CompletionOutput, Logprob, RequestOutput, Result

DEFAULT_MAX_TOKENS = 256  # when neither the line nor the command line has one; less where the context leaves less
_INPUTS = ("prompt", "prompt_token_ids", "messages")
_LEAST_LOGPROB = -3.4028234663852886e38  # of float32; JSON has no infinity, which a forbidden token's logprob is
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One prompt of a batch.

    Attributes:
      line: number in the file, from 1; None for a prompt of the command line.
      id: from the line, any JSON value.
      fields: the line without its id; empty when it could not be read.
    """

    line: int | None = None
    id: object = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of all entries that do not have their own.

    Attributes:
      sampling: options of `SamplingParams`; an entry's own win.
      chat: a text prompt is a user's message, not a text to go on with.
      echo: the output begins with the prompt.
      pictures: files that every user's message of `chat` begins with.
      open_url: reads pictures whose URL is no `data:`; see `picture_files`.
    """

    sampling: Mapping[str, Any]
    chat: bool = False
    echo: bool = False
    pictures: Sequence[bytes] = ()
    open_url: OpenUrl = refuse_url


def read_entries(file: IO[bytes]) -> Iterator[tuple[Entry, InvalidRequest | None]]:
    """Every line that is not blank, with the reason when it cannot be used."""
    for number, raw in enumerate(file, start=1):
        raw = raw.removeprefix(_BOM) if number == 1 else raw
        if raw.strip():
            yield _read_line(number, raw)


def count_entries(file: IO[bytes]) -> int | None:
    """Number of lines that `read_entries` will yield; None for a pipe, which cannot be read twice."""
    if not file.seekable():
        return None
    count = sum(1 for raw in file if raw.strip())
    file.seek(0)
    return count


def _read_line(number: int, raw: bytes) -> tuple[Entry, InvalidRequest | None]:
    try:
        fields = json.loads(raw.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return Entry(line=number), InvalidRequest(f"not valid UTF-8 at byte {error.start} of the line: {error.reason}")
    except json.JSONDecodeError as error:
        return Entry(line=number), InvalidRequest(f"not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, brackets without end
        return Entry(line=number), InvalidRequest(f"not valid JSON: {error}")
    if not isinstance(fields, dict):
        return Entry(line=number), InvalidRequest(f"a line is a JSON object, got {raw[:40].decode(errors='replace')!r}")
    name = fields.pop("id", None)
    try:
        json.dumps(name, allow_nan=False)
    except ValueError:  # Python reads NaN and Infinity, but the output must be valid JSON
        return Entry(line=number, fields=fields), InvalidRequest(f"id has a number that is no JSON, got {name!r:.80}")
    return Entry(line=number, id=name, fields=fields), None


def make_job(engine: AnyEngine, entry: Entry, options: BatchOptions) -> Job:
    """Raises InvalidRequest and its kin."""
    given = [name for name in _INPUTS if entry.fields.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else f"only {sorted(entry.fields)}"
        raise InvalidRequest(f"an entry has exactly one of {', '.join(_INPUTS)}; this one has {found}")
    own = {name: value for name, value in entry.fields.items() if name not in _INPUTS}
    merged = {**options.sampling, **own}
    # A default must not fail: the default length is cut to the context.
    sampling = SamplingParams.from_dict({"max_tokens": None, **merged})
    job = _prepare(engine, given[0], entry.fields[given[0]], sampling, options)
    if "max_tokens" not in merged:
        wanted = max(DEFAULT_MAX_TOKENS, sampling.min_tokens)
        job = dataclasses.replace(job, request=_shortened(job.request, wanted))
    return job


def _prepare(engine: AnyEngine, kind: str, value: Any, sampling: SamplingParams, options: BatchOptions) -> Job:
    if kind == "prompt_token_ids" and not isinstance(value, list):
        raise InvalidRequest(f"prompt_token_ids must be a list of token ids, got {value!r:.80}")
    asked = RequestOptions(echo=options.echo)
    if kind == "prompt" and options.chat and isinstance(value, str):
        shown = [{"type": "image", "image": picture} for picture in options.pictures]
        messages = [{"role": "user", "content": [*shown, {"type": "text", "text": value}] if shown else value}]
        chat = prepare_chat(engine, engine.chat_template(), messages, sampling, asked)
        return dataclasses.replace(chat, prompt=value)
    if kind == "messages":
        return prepare_chat(engine, engine.chat_template(), value, sampling, asked, open_url=options.open_url)
    return Job(request=engine.prepare(value, sampling, asked), prompt=prompt_text(value))


def _shortened(request: Request, max_tokens: int) -> Request:
    return dataclasses.replace(request, max_tokens=min(request.max_tokens, max_tokens))


def make_jobs(
    engine: AnyEngine,
    entries: Iterable[tuple[Entry, InvalidRequest | None]],
    options: BatchOptions,
    on_entry: Callable[[Entry], None],
) -> Iterator[Job | JaxserveError]:
    """A job or an error per entry, made when it is asked for; `on_entry` sees each entry just before."""
    for entry, problem in entries:
        on_entry(entry)
        if problem is not None:
            yield problem
            continue
        try:
            yield make_job(engine, entry, options)
        except JaxserveError as error:
            yield error


class JsonWriter:
    """Writes results to a binary file, a line each, at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, entry: Entry, result: Result) -> None:
        """One line per sequence, or one with the error."""
        for value in result_objects(entry, result):
            self._file.write(json_line(value))
        self._file.flush()


def json_line(value: dict[str, Any]) -> bytes:
    """A JSON object as a line of a file."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"


def result_objects(entry: Entry, result: Result) -> list[dict[str, Any]]:
    """The objects written for one entry: one per sequence, or one with "error"."""
    head: dict[str, Any] = {} if entry.id is None else {"id": entry.id}
    if isinstance(result, JaxserveError):
        where = {"prompt": entry.fields.get("prompt")} if entry.line is None else {"line": entry.line}
        return [{**head, **where, "error": str(result), "error_type": type(result).__name__}]
    return [{**head, **_completion_object(result, output)} for output in result.outputs]


def _completion_object(result: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
    body: dict[str, Any] = {"index": output.index} if len(result.outputs) > 1 else {}
    body |= {
        "prompt": result.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "usage": {
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
            "total_tokens": len(result.prompt_token_ids) + len(output.token_ids),
            "cached_tokens": result.num_cached_tokens,
        },
    }
    if output.logprobs is not None:
        body["cumulative_logprob"] = _json_number(output.cumulative_logprob)
        body["logprobs"] = [_position_object(p) for p in output.logprobs]
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = [None if p is None else _position_object(p) for p in result.prompt_logprobs]
    return body


def _position_object(position: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {**dataclasses.asdict(entry), "logprob": _json_number(entry.logprob)}
        for token_id, entry in position.items()
    }


def _json_number(logprob: float | None) -> float | None:
    """The nearest number that JSON has; None for NaN."""
    if logprob is None or math.isnan(logprob):
        return None
    return min(max(logprob, _LEAST_LOGPROB), -_LEAST_LOGPROB)
