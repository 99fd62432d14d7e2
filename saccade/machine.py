"""Asking the machine what it has, and checking what users ask of it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.errors import RequestError, SaccadeError, finite_number, shown, whole_number

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_THREADS = 1024  # each has a stack and scratch of its own
HUGE_PAGE = 1 << 21  # bytes

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def sent(values: Tensor, device: torch.device) -> Tensor:
    """``values``, of the host, on ``device``, without a wait for what runs there: a GPU takes them from pinned memory
    when it comes to it. They must not change meanwhile where ``device`` is the host."""
    if values.device == device:  # asked several times a step: `to` would take as long as an operator
        return values
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def parse_bytes(size: int | float | str, what: str = "kv_memory") -> int:
    """``"4GiB"``, ``"500MB"``, ``"2g"`` or a number of bytes -> bytes. Raises SaccadeError, naming ``what``, for
    anything else or <= 0."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", size.lower())
        value = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else -1.0
    else:
        value = float(size) if finite_number(size) else -1.0
    if not 1 <= value < 2**63:
        raise SaccadeError(
            f"{what}={shown(size)} is not a size; write bytes (1 to 2**63 - 1) or text such as '4GiB' or '500MB'"
        )
    return int(value)


def folder_and_size(given: Any, what: str, default: str | None = None) -> tuple[Path, int]:
    """``"folder:SIZE"`` -> the folder, with ``~`` expanded, and bytes; a folder alone where there is a ``default``
    size. SaccadeError, naming ``what``, for anything else."""
    text = str(given) if isinstance(given, str | Path) else ""
    folder, colon, last = text.rpartition(":")
    size: str | None = last
    if not colon or "/" in last or not last[:1].isdigit():
        folder, size = text, default
    try:
        if not folder or "\0" in folder or size is None:
            raise SaccadeError("no folder, or no size")
        return Path(folder).expanduser(), parse_bytes(size)
    except (SaccadeError, RuntimeError):  # the latter for a user without a home
        allowed = "a folder and a size" if default is None else "a folder, or a folder and a size"
        raise SaccadeError(f"{what}={shown(given)} must be {allowed}, such as '~/kept:20GiB'") from None


def check_threads(threads: Any) -> None:
    """Raise SaccadeError unless ``threads`` is a number of threads that a machine may run."""
    if not whole_number(threads, 1, MOST_THREADS):
        raise SaccadeError(f"threads={shown(threads)} must be an integer from 1 to {MOST_THREADS}")


def check_writable(path: Path | None, what: str = "report file") -> None:
    """Fail before the work whose result ``path`` is to hold, not after it: RequestError where it cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"{what} {path} is a folder; give a file name")
    if not path.parent.is_dir():
        raise RequestError(f"the folder of {what} {path} does not exist; create it first")
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise RequestError(f"{what} {path} cannot be written: {error.strerror}") from error


def show_bytes(count: int) -> str:
    """Bytes in a unit a reader can take in."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def no_room(error: OSError, folder: Path, wanted: int) -> str:
    """How much room there is in ``folder`` for ``wanted`` bytes, to be added to what is said of an ``error``; nothing
    where it is not that a disk, a quota or a limit is full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ""
    try:
        free = f"{show_bytes(shutil.disk_usage(folder).free)} are free in {folder}"
    except OSError:
        free = f"nothing can be said of {folder}"
    return f"; {show_bytes(wanted)} are to be written and {free}: make room, or choose another folder"


def available_bytes() -> int:
    """Memory that can be taken without swapping, as the system and, in a container, its memory limit tell it."""
    free = total_bytes() // 2
    try:
        with open("/proc/meminfo") as info:
            fields = dict(line.split(":", 1) for line in info)
        free = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as most, open("/sys/fs/cgroup/memory.current") as used:
            limit = most.read().strip()
            if limit != "max":
                free = min(free, int(limit) - int(used.read()))
    except (OSError, ValueError):
        pass
    return max(free, 1 << 20)


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that was, since :func:`reset_peak` where that could be done."""
    return max(_status("VmHWM"), resident_bytes())


def reset_peak() -> bool:
    """Have :func:`peak_bytes` begin anew. Whether the system does that."""
    try:
        with open("/proc/self/clear_refs", "r+") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """Bytes, by what Linux says of this process; elsewhere the most that it has taken so far."""
    try:
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields[name].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10


def total_bytes() -> int:
    """Physical memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def gpu_name(device: str) -> str | None:
    """The name of the GPU that ``device`` is, None for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None


def gpu_bytes(device: str) -> int | None:
    """Memory of the GPU that ``device`` is; None for a CPU, or one that torch does not see."""
    import torch

    try:
        index = torch.device(device).index or 0
    except (RuntimeError, TypeError):
        return None
    if not device.startswith("cuda") or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    return int(torch.cuda.get_device_properties(index).total_memory)


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def best_device() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_note(device: torch.device) -> str | None:
    """One line on what ``auto`` chose, where that is not plain: a GPU, or a CPU beside a GPU that torch cannot use."""
    import torch

    if device.type == "cuda":
        return f"running on {torch.cuda.get_device_name(device)} (device {device}); device cpu keeps to the CPU"
    if Path("/proc/driver/nvidia/version").exists():
        return "running on the CPU: there is an NVIDIA driver, but torch sees no GPU; its CUDA build would use it"
    return None


def release_rows(tensor: Tensor, rows: Sequence[int]) -> None:
    """Give the memory of ``rows`` of a contiguous CPU tensor back to the system, as far as they fill pages; what they
    hold is then zeros, or what it was where the system does not take it."""
    if tensor.device.type != "cpu" or not sys.platform.startswith("linux") or not len(rows):
        return
    each, page, madvise = tensor[0].nbytes, os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None).madvise
    ordered = sorted(rows)
    starts = [row for at, row in enumerate(ordered) if not at or ordered[at - 1] != row - 1]
    stops = [row + 1 for at, row in enumerate(ordered) if at + 1 == len(ordered) or ordered[at + 1] != row + 1]
    for first, last in zip(starts, stops):
        start = -(-(tensor.data_ptr() + first * each) // page) * page
        size = (tensor.data_ptr() + last * each) // page * page - start
        if size > 0:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 4)  # MADV_DONTNEED


def forget_file_pages(tensor: Tensor) -> None:
    """Give back the memory of a CPU tensor that is a file's, mapped and never written to; it is read again when it is
    asked for. Other tensors stay as they are, and those of less than 16 pages, which are not worth the search."""
    page, covered = os.sysconf("SC_PAGE_SIZE"), _covered(tensor)
    if covered < 16 * page or tensor.device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    first, last = tensor.data_ptr(), tensor.data_ptr() + covered
    try:
        with open("/proc/self/maps") as maps:
            areas = [line.split()[0] for line in maps if ".safetensors" in line]
    except OSError:
        return
    for area in areas:
        low, high = (int(end, 16) for end in area.split("-"))
        if low <= first and last <= high:
            start = -(-first // page) * page
            if last // page * page > start:
                madvise = ctypes.CDLL(None).madvise
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(last // page * page - start), 4)  # MADV_DONTNEED


def _covered(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last of a tensor, which may be some columns of another."""
    if not tensor.numel():
        return 0
    return (sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride())) + 1) * tensor.itemsize


def trim_memory() -> None:
    """Give freed memory that the C library keeps back to the system, where it can do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def ask_for_huge_pages(tensor: Tensor, least: int = 16) -> None:
    """Let Linux back a CPU tensor of at least ``least`` pages of 2 MiB with such pages. Scattered rows of 4 KiB pages
    cost a page walk each, and even reading in order is slower. Only advice: without it everything works as before."""
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or size < least * HUGE_PAGE or not sys.platform.startswith("linux"):
        return
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    stop = (tensor.data_ptr() + size) // HUGE_PAGE * HUGE_PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), 14)  # MADV_HUGEPAGE
