"""Which path a request's rows took through attention, and why no faster one did. Reports count rows by path, and
``saccade explain`` shows them for a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from saccade.engine.rows.backend import HostAttention
    from saccade.engine.rows.calls import RequestRows

RECORDED, EAGER, STEP, LAYER, TIER, HOST = "recorded", "eager", "step", "layer", "tier", "host"
ROW, CHUNK = "row", "chunk"
MEANINGS = {
    RECORDED: "one recorded step of many requests on a GPU",
    EAGER: "the kernels of recorded steps, launched one by one for somebody who looks on",
    STEP: "one C++ call for all layers, products too, of all rows of a step",
    LAYER: "one C++ call a layer for all rows of a step",
    TIER: "one C++ call a layer, which names the blocks that a tier must bring in",
    HOST: "the CPU attends in host memory, the GPU does all else (kv_compute)",
    ROW: "the method's hooks choose for each row and layer, and a kernel reads",
    CHUNK: "the method's hooks choose for a chunk of a prompt at each layer, and a kernel reads",
}


class Path(NamedTuple):
    """``name``: one of ``MEANINGS``. ``why``: why no faster path served, if there is one."""

    name: str
    why: str | None = None


def path_of(rows: RequestRows, attention: HostAttention) -> Path:
    """The path that ``rows`` of a pass have taken, once it has run."""
    joined, passed_on = attention.joined, rows.result.passed_on
    if attention.is_hosted(rows):
        return Path(HOST)
    if rows.scheduled.request_id in attention.resolved:
        return Path(TIER, passed_on)
    if not (rows.decodes or rows.together):
        return Path(CHUNK, passed_on)
    if joined is None or id(rows) not in attention.together:
        return Path(ROW, passed_on or attention.why_apart)
    if (why := joined.why_chosen.get(id(rows))) is not None:
        return Path(ROW, passed_on or why)
    return Path(STEP, passed_on) if joined.ran_whole else Path(LAYER, passed_on or attention.why_not_whole())
