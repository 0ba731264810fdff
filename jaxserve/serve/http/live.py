"""The live view's data: what the engine did since the last look, as server-sent events.

Only `web/live.js` should read these messages: programs read `/metrics`. Of a viewer nothing is kept but the time of its
last message. For any number of viewers the page map is built once per interval, since it is the one thing here whose
cost grows with the size of the pool.
"""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from jaxserve.engine import AnyEngine, EngineStats
from jaxserve.serve.metrics import shares_of

MAX_VIEWERS = 64
_MAX_STEPS = 1000  # of one message; the latest, when there were more
_RUN = re.compile(rb"(.)\1*", re.DOTALL)


class Seen:
    """The position of one viewer in the records of one replica. Mutated by `LiveFeed.message`."""

    __slots__ = ("first", "step_id")

    def __init__(self) -> None:
        self.step_id = -1
        self.first = 0


class LiveFeed:
    """Messages for all viewers. Used on one event loop. `num_viewers` is counted by the sender of messages."""

    def __init__(self, engine: AnyEngine, interval_s: float = 0.5) -> None:
        self.num_viewers = 0
        self._engine = engine
        self._interval_s = interval_s
        self._maps: dict[int, tuple[float, str]] = {}  # replica -> when its map was made, and the map

    async def events(self) -> AsyncIterator[str]:
        """One event every interval, until the engine takes no more requests: an open view must not delay an end."""
        seen, first = [Seen() for _ in self._engine.stats], True
        while True:
            message = await asyncio.to_thread(self.message, seen)
            if first:
                message |= self._about()
                first = False
            yield f"data: {json.dumps(message, separators=(',', ':'))}\n\n"
            if not self._engine.accepting:
                return
            await asyncio.sleep(self._interval_s)

    def _about(self) -> dict[str, Any]:
        """What does not change while a viewer is here, and is told in the first message alone."""
        model = self._engine.model
        return {"examples": model.examples, "sees_pictures": model.pictures is not None}

    def message(self, seen: list[Seen]) -> dict[str, Any]:
        """The news for a viewer, whose `seen` is brought up to date. Times are in ms, `t` on the engine's clock."""
        engine = self._engine
        return {
            "model": engine.model.name,
            "max_len": engine.model.max_model_len,
            "accepting": engine.accepting,
            "stalled_s": round(engine.stalled_s, 3),
            "compiles": max([stats.num_compiles for stats in engine.stats], default=0),
            "replicas": [self._replica(k, stats, seen[k]) for k, stats in enumerate(engine.stats)],
        }

    def _replica(self, number: int, stats: EngineStats, seen: Seen) -> dict[str, Any]:
        recent, all_firsts = stats.steps(), stats.first_tokens()
        steps = list(itertools.takewhile(lambda s: s.step_id > seen.step_id, reversed(recent)))[:_MAX_STEPS]
        firsts = list(itertools.takewhile(lambda f: f.number > seen.first, reversed(all_firsts)))
        seen.step_id = recent[-1].step_id if recent else -1
        seen.first = all_firsts[-1].number if all_firsts else 0
        counts, totals, shares = stats.counts, stats.totals(), shares_of(recent)
        return {
            "t": _ms(stats.clock_s),
            "alive": stats.alive,
            "rung": stats.degraded[0].label,
            "counts": None if counts is None else counts._asdict(),
            "prompt_tokens": totals.prompt_tokens,
            "new_tokens": totals.new_tokens,
            "steps_total": totals.steps,
            "decode_rows": totals.decode_rows,
            "decode_tokens": totals.decode_tokens,
            "drafted": totals.drafts.drafted + totals.grammar_drafts.drafted,
            "accepted": totals.drafts.accepted + totals.grammar_drafts.accepted,
            "host": round(shares.host, 4),
            "padding": round(shares.padding, 4),
            "ended": {reason.value: count for reason, count in totals.ended.items()},
            "steps": [
                (s.step_id, _ms(s.time_s), s.decode_rows, s.chunks, s.prefill_tokens, s.slots, _ms(s.itl_s))
                for s in reversed(steps)
            ],
            "firsts": [(_ms(f.time_s), _ms(f.ttft_s)) for f in reversed(firsts)],
            "pages": self._page_map(number, stats),
        }

    def _page_map(self, number: int, stats: EngineStats) -> str:
        made_s, page_map = self._maps.get(number, (-self._interval_s, ""))
        now_s = stats.clock_s
        if now_s - made_s >= self._interval_s / 2:
            page_map = run_lengths(stats.page_states())
            self._maps[number] = (now_s, page_map)
        return page_map


def run_lengths(states: bytes) -> str:
    """b"ffffu" -> "4f1u"."""
    return "".join([f"{len(run[0])}{chr(run[0][0])}" for run in _RUN.finditer(states)])


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
