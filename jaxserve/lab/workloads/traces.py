"""Readers of recorded traces: arrival times and lengths of requests, in three published schemas.

Nothing is downloaded or repaired: a line that does not fit its schema is an error with its number, because half a trace
is another load.

- Mooncake (Qin et al., FAST 2025): JSON lines {"timestamp": ms, "input_length", "output_length", "hash_ids"}, an id for
  each block of 512 prompt tokens; equal ids are equal tokens.
- BurstGPT (Wang et al., arXiv 2401.17644): CSV with "Timestamp" in seconds, "Request tokens", "Response tokens". A
  request without response tokens failed there and is left out.
- Azure (Patel et al., ISCA 2024; Stojkovic et al., HPCA 2025): CSV with "TIMESTAMP" (date and time), "ContextTokens",
  "GeneratedTokens".
"""

import csv
import datetime
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.samples import Part, Shape

MOONCAKE_BLOCK = 512


def read_mooncake(path: Path, limit: int | None, scale: float) -> Iterator[Shape]:
    """The first `limit` requests, all lengths times `scale`, read as they are asked for. Raises ConfigError."""
    first_ms: float | None = None
    block = max(1, round(MOONCAKE_BLOCK * scale))
    for number, line in _lines(path, limit):
        try:
            row = json.loads(line)
            time_ms = float(row["timestamp"])
            prompt_len, output_len = int(row["input_length"]), int(row["output_length"])
            ids = [int(key) for key in row["hash_ids"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _bad(
                path, number, f"expected timestamp, input_length, output_length and hash_ids: {error}"
            ) from error
        if (
            prompt_len < 1
            or output_len < 1
            or not (len(ids) - 1) * MOONCAKE_BLOCK < prompt_len <= len(ids) * MOONCAKE_BLOCK
        ):
            raise _bad(path, number, f"{prompt_len} prompt tokens are not {len(ids)} blocks of {MOONCAKE_BLOCK}")
        first_ms = time_ms if first_ms is None else first_ms
        yield Shape(
            parts=_blocks(ids, block, _scaled(prompt_len, scale)),
            output_len=_scaled(output_len, scale),
            arrival_s=_after(path, number, time_ms / 1e3, first_ms / 1e3),
        )


def _blocks(ids: Sequence[int], block: int, prompt_len: int) -> tuple[Part, ...]:
    parts: list[Part] = []
    left = prompt_len
    for place, key in enumerate(ids):
        length = left if place == len(ids) - 1 else min(block, left)  # rounding may leave more than a block
        if length:
            parts.append(Part(key, length))
        left -= length
    return tuple(parts)


def read_burstgpt(path: Path, limit: int | None, scale: float) -> Iterator[Shape]:
    """As `read_mooncake`; requests that failed when the trace was taken do not count."""
    return _read_csv(path, limit, scale, ("Timestamp", "Request tokens", "Response tokens"), float)


def read_azure(path: Path, limit: int | None, scale: float) -> Iterator[Shape]:
    """As `read_mooncake`."""
    return _read_csv(path, limit, scale, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _seconds)


def _read_csv(
    path: Path, limit: int | None, scale: float, columns: tuple[str, str, str], seconds: Callable[[str], float]
) -> Iterator[Shape]:
    number = 0  # of the line that was read last; the reader does not see empty ones

    def lines() -> Iterator[str]:
        nonlocal number
        for at, line in _lines(path, None):
            number = at
            yield line

    reader = csv.DictReader(lines())
    try:
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"{path} has no column {', '.join(missing)}; it has {', '.join(reader.fieldnames or ())}")
        count = 0
        first_s: float | None = None
        for row in reader:
            if limit is not None and count >= limit:
                break
            time_s, prompt_len, output_len = seconds(row[columns[0]]), int(row[columns[1]]), int(row[columns[2]])
            if output_len < 0 or prompt_len < 0:
                raise _bad(path, number, f"{prompt_len} tokens of a prompt and {output_len} of its answer")
            if output_len == 0 or prompt_len == 0:
                continue
            first_s = time_s if first_s is None else first_s
            count += 1
            yield Shape(
                parts=(Part(number, _scaled(prompt_len, scale)),),
                output_len=_scaled(output_len, scale),
                arrival_s=_after(path, number, time_s, first_s),
            )
    except (csv.Error, ValueError, TypeError, OverflowError) as error:
        raise _bad(path, number, str(error)) from error


def _seconds(text: str) -> float:
    moment = datetime.datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _after(path: Path, number: int, time_s: float, first_s: float) -> float:
    if not math.isfinite(time_s):
        raise _bad(path, number, f"its time is {time_s}")
    if time_s < first_s:
        raise _bad(path, number, "it is earlier than the first request; sort the trace by time")
    return time_s - first_s


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers from 1. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            count = 0
            for number, line in enumerate(file, start=1):
                if limit is not None and count >= limit:
                    return
                if line.strip():
                    count += 1
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _bad(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {why}")
