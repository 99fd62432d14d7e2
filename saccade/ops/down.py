"""What goes between a device and the host while the device works on: queries down, results up."""

from __future__ import annotations

import torch
from torch import Tensor


class Down:
    """A query on its way to the host, before the near part is launched, which it need not wait for."""

    def __init__(self, q: Tensor) -> None:
        self._lane = Lane(q.device)
        self._lane.send(q)

    def wait(self) -> Tensor:
        """It, once it is here."""
        return self._lane.wait()[0]


class Lane:
    """A way to the host and back for tensors of one layer after the other, through pinned memory that it keeps. What
    was sent is good until more is; a result is taken up before the next one is written."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: dict[str, Tensor] = {}
        self._sent: torch.cuda.Event | None = None
        self._here: tuple[Tensor, ...] = ()

    def send(self, *parts: Tensor) -> int:
        """Begin to bring ``parts`` [any, rows, channels], alike but for their first axis, down, in one transfer. Their
        bytes."""
        sizes = [len(part) for part in parts]
        if self.device.type == "cuda":
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            room = self.room("down", joined.shape, joined.dtype)
            room.copy_(joined, non_blocking=True)
            self._sent = self._sent or torch.cuda.Event()
            self._sent.record()
            self._here = room.split(sizes)
        else:
            self._here = parts
        return sum(part.nbytes for part in parts)

    def wait(self) -> tuple[Tensor, ...]:
        """What was sent, once it is here."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._here

    def room(self, name: str, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """Host memory from which a device copies by itself; the same for the same name and form."""
        held = self._pinned.get(name)
        if held is None or held.shape != shape or held.dtype != dtype:
            held = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")
            self._pinned[name] = held
        return held

    def up(self, part: Tensor) -> Tensor:
        """``part``, of :meth:`room`, on the device, which waits for it by itself."""
        return part.to(self.device, non_blocking=True)
