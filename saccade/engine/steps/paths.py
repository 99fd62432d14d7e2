"""Which path a request's rows took through attention, and why no faster one did. Reports count rows by path, and
``saccade explain`` shows them for a policy."""

from __future__ import annotations

from typing import NamedTuple

RECORDED, EAGER, STEP, LAYER, TIER, HOST = "recorded", "eager", "step", "layer", "tier", "host"
ROW, CHUNK = "row", "chunk"
MEANINGS = {
    RECORDED: "one recorded step of many requests on a GPU",
    EAGER: "the kernels of recorded steps, launched one by one for an observer",
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
