"""Sums over ranks: over gloo on CPUs, and on GPUs of one host by symmetric memory and NCCL.

Few rows are summed by torch's one-shot all-reduce over symmetric memory: every rank reads the parts of all others over
NVLink and adds them up in the order of ranks, in one launch. More rows go through NCCL. Both run on the stream of the
step and are recorded with it; each rank makes the same calls for parts of one shape and dtype, in the same order.
"""

from __future__ import annotations

import datetime
import threading
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as distributed
from torch import Tensor

from saccade.engine.ranks.renumbered import RenumberedStore

MOST_SUM = 1 << 20  # bytes of a part whose sum is one shot
ROOM = 1 << 23  # bytes of symmetric memory: of a sum, and of all ranks' parts that are gathered in one shot
ALIGNED = 16  # bytes that the one-shot kernel reads at once
NEVER = datetime.timedelta(hours=24)  # a rank that compiles is waited for; one that hangs is found by its process
RENDEZVOUS = datetime.timedelta(seconds=60)
BLOCKS = 64  # of a one-shot kernel, more than it has
FREEING = 20.0  # seconds, at most, that a stuck device is let go for


class Reduce(Protocol):
    """What joins the ranks of an engine on their devices."""

    @property
    def records(self) -> bool:
        """Whether a CUDA graph can record what it launches."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the dtype of ``part``, which may be written to."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' parts, in the order of ranks."""

    def first(self, part: Tensor) -> Tensor:
        """The first rank's part."""

    def abort(self) -> None:
        """Have what waits for a rank that is gone wait no longer. From any thread; returns at once."""


class GlooReduce:
    """Over the loopback interface, for tensors on the host; others are copied there and back. RuntimeError within
    ``seconds`` where another rank does not come."""

    records = False

    def __init__(self, store: Any, rank: int, ranks: int, seconds: float) -> None:
        gloo: Any = distributed.ProcessGroupGloo  # of which torch's stubs know little
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=seconds)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._group, self._ranks = gloo(store, rank, ranks, options), ranks

    def sum(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`: added up in float32."""
        whole = part.to("cpu", torch.float32).contiguous()
        self._group.allreduce([whole]).wait()
        return whole.to(part.device, part.dtype)

    def gather(self, part: Tensor) -> list[Tensor]:
        """See :class:`Reduce`."""
        own = part.cpu().contiguous()
        parts = [torch.empty_like(own) for _ in range(self._ranks)]
        self._group.allgather([parts], [own]).wait()
        return [one.to(part.device) for one in parts]

    def first(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`."""
        return self.gather(part)[0]

    def abort(self) -> None:
        """Nothing: a connection that breaks ends its waits."""


class NcclReduce:
    """NCCL between the GPUs of one host."""

    records = True

    def __init__(self, store: Any, rank: int, ranks: int, device: torch.device) -> None:
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = NEVER
        self._group, self._ranks = nccl(distributed.PrefixStore("nccl", store), rank, ranks, options), ranks
        kinds: Any = torch._C._distributed_c10d
        self._sums, self._gathers = _here(kinds.AllreduceOptions()), _here(kinds.AllgatherOptions())
        self._firsts = _here(kinds.BroadcastOptions())
        self._firsts.rootRank = 0
        for joined in (self.sum, self.gather, self.first):  # connections are made before anything is recorded
            joined(torch.zeros(ALIGNED, device=device))
        torch.cuda.synchronize(device)

    def sum(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`: added up in the dtype of ``part``."""
        whole = part.contiguous()
        _launched(self._group.allreduce([whole], self._sums))
        return whole

    def gather(self, part: Tensor) -> list[Tensor]:
        """See :class:`Reduce`."""
        whole = part.new_empty(self._ranks, *part.shape)
        _launched(self._group._allgather_base(whole, part.contiguous(), self._gathers))
        return list(whole.unbind(0))

    def first(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`."""
        whole = part.clone(memory_format=torch.contiguous_format)
        _launched(self._group.broadcast([whole], self._firsts))
        return whole

    def abort(self) -> None:
        """See :class:`Reduce`: the communicator's kernels end."""
        _beside(getattr(self._group, "abort", None) or self._group._abort)


class OneShotReduce:
    """Symmetric memory between the GPUs of one host for small parts, ``large`` for others. ``name`` is that of no other
    group of this process."""

    def __init__(self, store: Any, rank: int, ranks: int, device: torch.device, name: str, large: Reduce) -> None:
        self._rank, self._ranks, self._large, self._name, self._device = rank, ranks, large, name, device
        kinds: Any = torch._C._distributed_c10d
        store = distributed.PrefixStore("symmetric", store)
        store.set_timeout(RENDEZVOUS)
        store = self._store = RenumberedStore(store)  # kept here: torch holds what it is in C++
        # Versions of torch differ in where they look a group up: among process groups by name, or in a list of its own.
        self._group = kinds.ProcessGroup(store, rank, ranks)
        self._group._set_group_name(name)
        kinds._register_process_group(name, self._group)
        memory = kinds._SymmetricMemory
        with suppress(AttributeError):
            memory.set_group_info(name, rank, ranks, store)
        self._room = memory.empty_strided_p2p((ROOM,), [1], torch.uint8, device, name)
        self._memory = memory.rendezvous(self._room, name)
        operations: Any = torch.ops.symm_mem
        self._plain, self._copying = operations.one_shot_all_reduce, None
        with suppress(AttributeError):
            self._copying = operations.one_shot_all_reduce_copy
        self._check()

    @property
    def records(self) -> bool:
        """See :class:`Reduce`."""
        return self._large.records

    def _check(self) -> None:
        """RuntimeError where the sum of small numbers is not what it must be."""
        own = torch.arange(4096, device=self._device, dtype=torch.float32) + self._rank
        want = self._ranks * torch.arange(4096.0) + self._ranks * (self._ranks - 1) / 2
        for _ in range(3):
            if not torch.equal(self._one_shot(own).cpu(), want):
                raise RuntimeError("one_shot_all_reduce gave a wrong sum")

    def sum(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`: added up in the dtype of ``part``, in the order of ranks."""
        return self._one_shot(part) if takes(part, part.nbytes, MOST_SUM) else self._large.sum(part)

    def gather(self, part: Tensor) -> list[Tensor]:
        """See :class:`Reduce`: of few numbers a sum to which each rank gives its own and zeros."""
        if not takes(part, part.nbytes * self._ranks, ROOM):
            return self._large.gather(part)
        whole = part.new_zeros(self._ranks, *part.shape)
        whole[self._rank].copy_(part)
        return list(self._one_shot(whole).unbind(0))

    def first(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`."""
        return self._large.first(part)

    def _one_shot(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        room = self._room.view(part.dtype)[: part.numel()].view(part.shape)
        with torch.cuda.device(self._device):  # which the operation launches on, wherever its tensors are
            if self._copying is not None:
                return self._copying(room, part, "sum", self._name)
            room.copy_(part)
            return self._plain(room, "sum", self._name)

    def abort(self) -> None:
        """See :class:`Reduce`. A one-shot kernel waits for a mark of each other rank, and for its own marks there to be
        taken: both are given for those that are gone, until the device has done all that was launched."""
        self._large.abort()
        over = threading.Event()
        _beside(partial(self._give_marks, over))
        _beside(partial(self._drain, over))

    def _drain(self, over: threading.Event) -> None:
        try:
            torch.cuda.synchronize(self._device)
        finally:
            over.set()

    def _give_marks(self, over: threading.Event) -> None:
        marks = [self._memory.get_signal_pad(rank, (BLOCKS, self._ranks), torch.int32) for rank in range(self._ranks)]
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        stream, passed = torch.cuda.Stream(self._device), 0.0
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            while not over.is_set() and passed < FREEING:
                for rank in others:
                    marks[self._rank][:, rank].fill_(1)
                    marks[rank][:, self._rank].zero_()
                stream.synchronize()
                over.wait(2e-4)
                passed += 2e-4


class Alone:
    """The part of a model that this process has, without the others: what it computes means nothing, but kernels of a
    rank are launched."""

    records = True

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def sum(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`."""
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        """See :class:`Reduce`."""
        return [part] * self.ranks

    def first(self, part: Tensor) -> Tensor:
        """See :class:`Reduce`."""
        return part

    def abort(self) -> None:
        """Nothing is waited for."""


def takes(part: Tensor, nbytes: int, most: int) -> bool:
    """Whether the one-shot kernel adds up parts like this one, ``nbytes`` together, of at most ``most``."""
    aligned = nbytes % ALIGNED == 0 and part.storage_offset() * part.element_size() % ALIGNED == 0
    return 0 < nbytes <= most and aligned and part.dtype in (torch.bfloat16, torch.float32)


def _here(options: Any) -> Any:
    """Run on the stream of the caller, where this version of torch can: a recording has no other one then."""
    with suppress(AttributeError):
        options.asyncOp = False
    return options


def _launched(work: Any) -> None:
    """Have the caller's stream wait for what may run on another one; None where it runs on that itself."""
    if work is not None:
        work.wait()


def _beside(call: Any) -> None:
    """On a thread of its own."""

    def run() -> None:
        with suppress(Exception):
            call()

    threading.Thread(target=run, name="saccade-abort", daemon=True).start()
