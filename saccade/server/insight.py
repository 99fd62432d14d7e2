"""What the requests of one client do now, and what the last ones did: by layer and head, for the page."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

from saccade.engine.messages import RequestOutcome
from saccade.errors import SaccadeError
from saccade.server.admission import Caller

if TYPE_CHECKING:
    from saccade.server.serving import Serving

KEPT = 8  # ended requests of a key
CALLERS = 64  # keys whose ended requests are kept, the latest ones
RUNNING = 8  # requests at work that the engine reports
_SECONDS = 1.0  # between two questions to the engine, however many ask
_PATIENCE = 2.0  # seconds for a step to end, in which the engine answers no one

JSON = dict[str, Any]


def summary(report: JSON) -> JSON:
    """A request's report, short: shares with three digits, by phase those of each layer's heads. ``contradiction``:
    where an audit contradicts what the method estimates (docs/audit.md), or null."""
    said = {name: report[name] for name in ("policy", "prompt_tokens", "cached_tokens", "output_tokens")}
    said |= {name: report[name] for name in ("queue_seconds", "first_token_seconds", "total_seconds")}
    said["contradiction"] = None if report["audit"] is None else report["audit"]["contradiction"]
    for phase in ("prefill", "decode"):
        stats = report[phase]
        said[phase] = {
            "tokens": stats["tokens"],
            "seconds": stats["seconds"],
            "density": stats["density"],
            "coverage_estimated": stats["coverage_estimated"],
            "keys_read_per_token": stats["keys_attended_per_row"],
            "density_per_head": [[round(value, 3) for value in heads] for heads in stats["density_per_head"]],
        }
    return said


class Insight:
    """It lives on the event loop's thread alone."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, deque[JSON]] = OrderedDict()
        self._asked = -_SECONDS
        self._reports: list[JSON] | None = []
        self._asking = asyncio.Lock()

    def ended(self, caller: Caller, outcome: RequestOutcome) -> None:
        """A sample of ``caller`` has ended."""
        last = self._ended.setdefault(caller.name, deque(maxlen=KEPT))
        self._ended.move_to_end(caller.name)
        while len(self._ended) > CALLERS:
            self._ended.popitem(last=False)
        place = {"id": caller.request_id, "finish_reason": outcome.finish_reason}
        last.appendleft({**place, "report": outcome.report})

    async def requests(self, serving: Serving, caller: Caller) -> JSON:
        """The requests of a client. ``running`` is null while the engine is too busy to say."""
        mine = {number: one for one in serving.running if one.caller.name == caller.name for number in one.request_ids}
        reports = await self._running(serving) if mine else []
        running = None
        if reports is not None:
            running = [
                {"id": mine[report["request_id"]].caller.request_id, "finish_reason": None, **summary(report)}
                for report in reports
                if report["request_id"] in mine
            ]
        ended = [
            {"id": one["id"], "finish_reason": one["finish_reason"], **summary(one["report"])}
            for one in self._ended.get(caller.name, ())
        ]
        limits = {"selection_map_tokens": serving.config.selection_maps, "layers": serving.about.layers}
        return {"object": "list", "running": running, "ended": ended, **limits}

    async def _running(self, serving: Serving) -> list[JSON] | None:
        async with self._asking:
            if time.monotonic() - self._asked >= _SECONDS:
                try:
                    self._reports = await asyncio.wait_for(serving.engine.running_reports(RUNNING), _PATIENCE)
                except (TimeoutError, SaccadeError):
                    self._reports = None
                self._asked = time.monotonic()
            return self._reports
