"""What a worker keeps of a sequence whose decode rows the CPU attends in host memory: its keys and values there, and
beside them what its decode method knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from saccade.engine.memory import SequenceMemory
from saccade.kv.hosted import HostedKV
from saccade.kv.sequence import SequenceKV
from saccade.methods.history import StateHistory
from saccade.methods.state import to
from saccade.selection.forms import Summarized

HOST = torch.device("cpu")


class HostedMemory(SequenceMemory):
    """The memory of ``memory``'s sequence, on the host, until :meth:`leave`. ``summarized``: blocks whose summaries are
    wanted: what the device knows of them comes down. ``first_keys``: the first keys and values as the device keeps
    them."""

    apart = True

    def __init__(self, memory: SequenceMemory, summarized: Summarized | None) -> None:
        kv, self._device = memory.kv, memory.kv.pool.storage.device
        known = {}
        if summarized is not None:
            known[summarized.summary, summarized.size] = kv.hand_over(summarized.summary, summarized.size)
        self.hosted_kv = HostedKV(kv, known)
        self.hosted_kv.settle()
        self.kv = cast(SequenceKV, self.hosted_kv)  # which rows on a CPU take it for
        self._hosted, self._on_device, self._opened_by = None, None, None
        self._states = to(memory.states, HOST)
        for name in ("tails", "gone", "watched"):
            setattr(self, name, to(getattr(memory, name), HOST))
        self.carried, self.weighed, self.history = None, None, StateHistory()
        self._first: tuple[Tensor, Tensor] | None = None

    def first_keys(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``count`` tokens on the device: [layers, kv_heads, count, head_dim] each."""
        if self._first is None or self._first[0].shape[2] != count:
            views = [self.hosted_kv.view(layer) for layer in range(self.hosted_kv.layers)]
            k = torch.stack([view.keys(0, count) for view in views])
            v = torch.stack([view.values(0, count) for view in views])
            self._first = k.to(self._device), v.to(self._device)
        return self._first

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
    try:
        held.hosted_kv.settle()
    except BaseException:
        memory.states  # noqa: B018  (back on the device)
        raise
    return held


def first_of(memories: Sequence[HostedMemory], counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the device attends of some sequences, the first ``counts`` keys of each: keys and values fp32 [layers, rows,
    kv_heads, greatest count, head_dim], and fp32 [rows, greatest count]: 0 for each of them, -inf behind; None where
    all have as many."""
    most = max(counts)
    held = [memory.first_keys(count) if count else None for memory, count in zip(memories, counts)]
    if min(counts) == most:
        k, v = (torch.stack([one[part] for one in held if one is not None], 1).float() for part in (0, 1))
        return k, v, None
    some = next(one for one in held if one is not None)
    k, v = (
        part.new_zeros(part.shape[0], len(held), part.shape[1], most, part.shape[3], dtype=torch.float32)
        for part in some
    )
    hidden = torch.full((len(held), most), -torch.inf, device="cpu")
    for row, one in enumerate(held):
        if one is not None:
            k[:, row, :, : counts[row]], v[:, row, :, : counts[row]] = one
            hidden[row, : counts[row]] = 0.0
    return k, v, hidden.to(k.device)
