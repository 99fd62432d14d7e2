"""Host memory that a GPU's kernels read and write by address: allocated once, and registered with the driver."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from saccade.errors import CapacityError
from saccade.machine import HUGE_PAGE, ask_for_huge_pages, available_bytes, show_bytes

CHUNK = 1 << 30  # bytes that one call registers
THREADS = 16  # that do so: the pages are made and zeroed meanwhile


class PinnedMemory:
    """``data``: uint8 [count] on the host. For a CUDA ``device`` it is pinned; kernels there reach it by its address.
    Torch's own allocator of pinned memory would round the size up to a power of two. Raises CapacityError
    where there is not so much memory, or the driver does not take it."""

    def __init__(self, count: int, device: torch.device) -> None:
        free = available_bytes()
        if count > free:
            raise CapacityError(
                f"kv_host={show_bytes(count)} is more than the {show_bytes(free)} of host memory that are available; "
                "give less"
            )
        try:
            whole = torch.empty(count + HUGE_PAGE, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise CapacityError(f"kv_host={show_bytes(count)} of host memory cannot be allocated; give less") from error
        ask_for_huge_pages(whole)
        self.data: Tensor = whole[-whole.data_ptr() % HUGE_PAGE :][:count]
        self._chunks: list[int] = []  # addresses that are registered
        self._end = weakref.finalize(self, _unregister, self._chunks, device)
        if device.type == "cuda":
            self._register(device)

    def close(self) -> None:
        """Give the memory back to the system, once it is no longer used."""
        self._end()
        self.data = self.data.new_empty(0)

    def _register(self, device: torch.device) -> None:
        base, count = self.data.data_ptr(), self.data.numel()
        starts = range(base, base + count, CHUNK)

        def register(start: int) -> int:
            with torch.cuda.device(device):
                return int(torch.cuda.cudart().cudaHostRegister(start, min(CHUNK, base + count - start), 1))  # portable

        torch.cuda.synchronize(device)  # the device is ready before threads ask for it
        with ThreadPoolExecutor(THREADS, thread_name_prefix="saccade-pin") as pool:
            codes = list(pool.map(register, starts))
        self._chunks += [start for start, code in zip(starts, codes) if code == 0]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            self.close()
            _forget_error(device)
            raise CapacityError(
                f"kv_host={show_bytes(count)} of host memory cannot be pinned: the driver refused (error {failed}); "
                "give less, or raise the limit on locked memory"
            )


def _unregister(chunks: list[int], device: torch.device) -> None:
    if not chunks:
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        for start in chunks:
            torch.cuda.cudart().cudaHostUnregister(start)
    chunks.clear()


def _forget_error(device: torch.device) -> None:
    """The driver tells of a refusal once more at the next launch, whosever that is: let it be this one."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)
