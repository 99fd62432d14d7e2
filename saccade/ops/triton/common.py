"""What all kernels share: when they may run, how they reach a paged key, and how logits become base-2 exponents.

Kernels work in base 2: logits are scaled by log2(e) once, and every exponential is an ``exp2``.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
STORAGE = (torch.float32, torch.float16, torch.bfloat16)
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_on(tensor: Tensor) -> bool:
    """Whether kernels can read ``tensor``: it lies on a GPU, or Triton interprets on the CPU."""
    return tensor.is_cuda or (interpreted and tensor.device.type == "cpu")


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` treats operands of ``dtype``: float32 keys promise float32 results, which one tf32 product would
    break and three give."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's copy engine and shared memory, and starts kernels early (:func:`begin`)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; under the interpreter a few, so that splits are exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_kept: dict[tuple[str, torch.device, int], Tensor] = {}


def kept_zeros(device: torch.device, count: int, name: str = "words") -> Tensor:
    """At least ``count`` int64 zeros, which the kernel that writes them sets to zero again. All calls on a device share
    them, so that no two may run at once: kernels that use them belong on one stream. They are kept for good, for
    captured graphs may know them."""
    size = max(1 << 14, triton.next_power_of_2(count))
    held = _kept.get((name, device, size))
    if held is None:
        held = torch.zeros(size, dtype=torch.int64, device=device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # else a replay sets them to zero
            _kept[name, device, size] = held
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other streams may be next to use them
    return held


def kept_room(device: torch.device, count: int, name: str) -> Tensor:
    """At least ``count`` int64 of anything, with what else :func:`kept_zeros` says: what a kernel writes there before
    it waits for the one before it, no other kernel reads."""
    return kept_zeros(device, count, name)


def clear_kept(device: torch.device) -> None:
    """Set what :func:`kept_zeros` gave out for ``device`` to zero, where kernels that would have done so did not
    run."""
    with torch.inference_mode():  # in which they may have been made
        for (_, where, _), held in _kept.items():
            if where == device:
                held.zero_()


def arrivals(device: torch.device, count: int) -> Tensor:
    """At least ``count`` counters, by which the last of some programs to end knows that it is the last."""
    return kept_zeros(device, count, "arrivals")


def pad(count: int, least: int = 16) -> int:
    """The next power of two, at least ``least``."""
    return max(least, triton.next_power_of_2(count))


def launched(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel calls :func:`begin` before all else."""
    early = is_hopper(device)
    return {"EARLY": early, "launch_pdl": early}


@triton.jit
def begin(EARLY: tl.constexpr):
    """Programs of a kernel launched early take their places while the kernel before it still runs. They wait here until
    it has ended and all that it wrote is there; the kernel after this one may then take its places."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def also(mask, condition):
    """The bools ``mask``, all False unless the scalar ``condition``. (Triton 3.9's interpreter makes integers of a
    block & a scalar, and takes none for a mask.)"""
    return mask & (tl.zeros(mask.shape, tl.int32) + condition.to(tl.int32) != 0)


@triton.jit
def pool_rows(table, positions, valid, kv_head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Row numbers, int64, of one KV head's ``positions`` in a pool seen as [slots * KV_HEADS * PAGE, width];
    ``valid`` None: all are. (Of ``positions % PAGE`` Triton 3.6 takes all row numbers for multiples of PAGE, and reads
    16 bytes at once where rows lie 8 apart.)"""
    if valid is None:
        slots = tl.load(table + positions // PAGE).to(tl.int64)
    else:
        slots = tl.load(table + positions // PAGE, mask=valid, other=0).to(tl.int64)
    return (slots * KV_HEADS + kv_head) * PAGE + (positions & (PAGE - 1))


@triton.jit
def pool_places(
    table, positions, valid, kv_head, far_k, far_v, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr
):
    """:func:`pool_rows` of keys, and of values. With ``FAR`` an entry -1 - c of ``table`` is cell c of host memory,
    which lies ``far_k``, ``far_v`` rows behind the pools (``Pages.far``)."""
    slots = tl.load(table + positions // PAGE, mask=valid, other=0).to(tl.int64)
    if FAR:
        there = slots < 0
        row = (tl.where(there, -1 - slots, slots) * KV_HEADS + kv_head) * PAGE + (positions & (PAGE - 1))
        k_row = row + tl.where(there, tl.cast(far_k, tl.int64), 0)
        v_row = row + tl.where(there, tl.cast(far_v, tl.int64), 0)
    else:
        k_row = (slots * KV_HEADS + kv_head) * PAGE + (positions & (PAGE - 1))
        v_row = k_row
    return k_row, v_row


@triton.jit
def cap_logits(scores, scale_log2, softcap, CAPPED: tl.constexpr):
    """Dot products -> logits in base 2, soft-capped: cap * tanh(x / cap) with tanh from one exponential."""
    scores = scores * scale_log2
    if CAPPED:
        cap = softcap * 1.4426950408889634
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))
    return scores
