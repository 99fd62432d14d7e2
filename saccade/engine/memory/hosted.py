"""Memory of a sequence whose decode rows the CPU attends in host memory: its keys and values there, and what its decode
method knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.kv.hosted import HostedKV
from saccade.kv.sequence import SequenceKV
from saccade.methods.history import StateHistory
from saccade.methods.state import to
from saccade.selection.forms import Summarized

HOST = torch.device("cpu")


class HostedMemory(SequenceMemory):
    """The memory of ``memory``'s sequence, on the host, until :meth:`leave`. ``summarized``: blocks whose summaries are
    wanted: what the device knows of them comes down."""

    def __init__(self, memory: SequenceMemory, summarized: Summarized | None) -> None:
        kv, self._device = memory.kv, memory.kv.pool.storage.device
        known = {}
        if summarized is not None:
            known[summarized.summary, summarized.size] = kv.hand_over(summarized.summary, summarized.size)
        self.hosted_kv = HostedKV(kv, known)
        self.hosted_kv.settle()
        self.kv = cast(SequenceKV, self.hosted_kv)  # which rows on a CPU take it for
        self._hosted, self._on_device, self._opened_by, self._opened_for = None, None, None, None
        self._states = to(memory.states, HOST)
        for name in ("tails", "gone", "watched"):
            setattr(self, name, to(getattr(memory, name), HOST))
        self.carried, self.weighed, self.history = None, None, StateHistory()

    def leave(self) -> None:
        """The sequence lives on the device again, and its method's knowledge, too: what it has is in ``states``."""
        self._states = to(self.states, self._device)
        self.hosted_kv.close()


Opened = Callable[[SequenceMemory], HostedMemory]


def lives_on_host(memory: SequenceMemory, opened: Opened) -> HostedMemory:
    """The memory of a sequence that lives on the host, ready for a step; ``opened`` moves it there. Raises what
    HostedKV.settle raises; then it lives on the device."""
    held = memory.hosted
    if held is None:
        held = opened(memory)
        memory.hosted = held
        return held
    assert isinstance(held, HostedMemory), "only this module makes them"
    try:
        held.hosted_kv.settle()
    except BaseException:
        memory.states  # noqa: B018  (back on the device)
        raise
    return held
