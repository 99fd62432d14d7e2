"""What joins the ranks of an engine: gloo on their hosts, and on their GPUs what ``SACCADE_REDUCE`` chooses, the same
one for all of them.

NVLink multicast is left off while they meet: nothing here needs it, and it can hang GPUs that a host shares out.
``NCCL_NVLS_ENABLE`` and ``TORCH_SYMM_MEM_DISABLE_MULTICAST`` that are set stay as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from saccade.engine.ranks.reduce import GlooReduce, NcclReduce, OneShotReduce, Reduce
from saccade.engine.ranks.watch import SumCounts
from saccade.errors import SaccadeError, brief, shown

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
VARIABLE = "SACCADE_REDUCE"
ONE_SHOT, NCCL, GLOO = "one_shot", "nccl", "gloo"
CHOICES = f"{ONE_SHOT},{NCCL}", NCCL, f"{ONE_SHOT},{GLOO}", GLOO  # of VARIABLE: what joins few rows, and many

# While ranks meet: no multicast, and no thread of NCCL's that ends this process over a rank that has ended.
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Group(Protocol):
    """What joins ranks, as they call it: each the same in the same order."""

    ranks: int

    @property
    def records(self) -> bool: ...

    def sum(self, part: Tensor) -> Tensor: ...

    def gather(self, part: Tensor) -> list[Tensor]: ...

    def first(self, part: Tensor) -> Tensor: ...

    def abort(self) -> None: ...


class RankGroup:
    """What joins ``ranks`` ranks, of which this one is ``rank``, from 0; each calls the same in the same order.
    RuntimeError within ``seconds`` where another one does not come to what runs on the host. Waits for all of them to
    begin. ``counts`` say when it is in such a sum. Tensors on ``device``, a GPU, are joined there."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        seconds: float,
        counts: SumCounts,
        device: torch.device = CPU,
        name: str = "",
    ) -> None:
        self._host, self.rank, self.ranks, self.counts = GlooReduce(store, rank, ranks, seconds), rank, ranks, counts
        self.broken = False  # whether another rank did not come, by which this one ends
        self._there: Reduce = self._host
        if device.type == "cuda":
            self._there = device_reduce(store, rank, ranks, device, name, self._host)

    @property
    def records(self) -> bool:
        """Whether a CUDA graph can record its sums."""
        return self._there.records

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the dtype of ``part``: added up in float32 on the host."""
        return self._run(part, "sum")

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' parts, which are of one shape and dtype."""
        return self._run(part, "gather")

    def first(self, part: Tensor) -> Tensor:
        """The first rank's part; all are of one shape and dtype."""
        return self._run(part, "first")

    def _run(self, part: Tensor, name: str) -> Any:
        joins = self._host if part.device.type == "cpu" else self._there
        if joins is not self._host:
            return getattr(joins, name)(part)
        with self.counts.within(self.rank):
            try:
                return getattr(joins, name)(part)
            except RuntimeError:
                self.broken = True
                raise

    def abort(self) -> None:
        """Have a GPU that waits for a rank that is gone wait no longer, and give back what joins them."""
        self._there.abort()


def asked() -> tuple[str, ...]:
    """What joins few rows on GPUs, and what many. SaccadeError where ``SACCADE_REDUCE`` names nothing of the kind."""
    said = os.environ.get(VARIABLE) or CHOICES[0]
    if said not in CHOICES:
        raise SaccadeError(f"{VARIABLE}={shown(said)} must be one of {', '.join(map(repr, CHOICES))}")
    return tuple(said.split(","))


def shares_gpus() -> bool:
    """Whether ranks may share a GPU, which NCCL refuses."""
    return GLOO in asked()


def device_reduce(store: Any, rank: int, ranks: int, device: torch.device, name: str, host: GlooReduce) -> Reduce:
    """What joins ``ranks`` ranks on their GPUs, as ``SACCADE_REDUCE`` says: all of them take the same. Where they have
    no symmetric memory in common NCCL joins few rows, too, and a warning says why. ``host`` joins them already."""
    place = torch.cuda.current_device() if device.index is None else device.index
    with _quiet():
        return _device_reduce(store, rank, ranks, torch.device("cuda", place), name, host)


@contextmanager
def _quiet() -> Iterator[None]:
    added = [variable for variable in QUIET if variable not in os.environ]
    os.environ.update({variable: QUIET[variable] for variable in added})
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]


def _device_reduce(store: Any, rank: int, ranks: int, device: torch.device, name: str, host: GlooReduce) -> Reduce:
    chosen = asked()
    large: Reduce = host if GLOO in chosen else NcclReduce(store, rank, ranks, device)
    if ONE_SHOT not in chosen:
        return large
    small, trouble = None, "" if _reaches_others(device, rank, ranks) else "its GPU does not reach the others' memory"
    if not any(_agreed(host, bool(trouble))):
        try:
            small = OneShotReduce(store, rank, ranks, device, name, large)
        except Exception as error:
            trouble = f"{type(error).__name__}: {brief(error)}"
    failed = [number for number, bad in enumerate(_agreed(host, bool(trouble))) if bad]
    if small is None or failed:
        why = trouble or "another one has none"
        logger.warning("ranks %s have no symmetric memory, all sums go through %s: %s", failed, chosen[-1], why)
        return large
    return small


def _agreed(host: GlooReduce, own: bool) -> list[bool]:
    return [bool(one) for one in host.gather(torch.tensor([own], device="cpu"))]


def _reaches_others(device: torch.device, rank: int, ranks: int) -> bool:
    """Whether this GPU may read what lies on those of the other ranks, which stand one behind the other."""
    if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1":
        return True
    mine = device.index or 0
    places = [mine - rank + other for other in range(ranks) if other != rank]
    return all(torch.cuda.can_device_access_peer(mine, place) for place in places)
