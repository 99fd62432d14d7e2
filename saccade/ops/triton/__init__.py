"""The Triton kernels: attention over ``Dense``, ``Band``, ``Blocks``, ``Tokens`` and ``Ranking`` on a paged KV view on
an NVIDIA GPU (or on CPU tensors under Triton's interpreter, ``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from saccade.kv.rows import RowMover
from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.fp8 import why_no_products
from saccade.selection import Blocks, Corrected, Selection

MAX_HEAD_DIM = 256  # of keys and values
MAX_VALUES, MAX_OTHERS = 512, 128  # channels of a latent that are its value, and others
MOST_ROWS = 128  # that are summed over at once
MOST_KEY_BLOCKS = 1 << 14  # that one program chooses among

_installed = importlib.util.find_spec("triton") is not None


def available() -> bool:
    """Whether Triton is installed."""
    return _installed


def why_unavailable() -> str:
    """One sentence naming what is lost, or an empty string when the kernels are there."""
    return (
        ""
        if _installed
        else "Triton is not installed; the reference torch backend serves GPUs instead, many times slower"
    )


def serves_heads(head_dim: int, value_dim: int | None) -> str | None:
    """Why no kernel reads rows of ``head_dim`` channels, of latents the first ``value_dim`` being values; None where
    kernels do."""
    if head_dim % 16:
        return f"its kernels read a head_dim that is a multiple of 16; got {head_dim}"
    if value_dim is None and head_dim > MAX_HEAD_DIM:
        return f"its kernels read a head_dim of up to {MAX_HEAD_DIM}; got {head_dim}"
    if value_dim is not None and (value_dim > MAX_VALUES or head_dim - value_dim > MAX_OTHERS):
        return f"its kernels read latents of up to {MAX_VALUES} + {MAX_OTHERS} channels; got {head_dim}"
    return None


def row_mover(device: torch.device) -> RowMover | None:
    """What KVStorage on ``device`` is to be made with: the kernels that move rows on a GPU; None elsewhere, or without
    Triton."""
    if not _installed or device.type != "cuda":
        return None
    from saccade.ops.triton import pages

    return pages


def serves(q: Tensor, kv: KVView, selection: Selection | None = None) -> str | None:
    """Why the kernels cannot read these tensors, or not attend over ``selection`` of them; None where they can."""
    if not _installed:
        return why_unavailable()
    from saccade.ops.triton import dispatch

    return dispatch.serves(q, kv, selection)


def serves_scores(q: Tensor, kv: KVView) -> str | None:
    """Why the kernels that score keys to choose among them cannot read ``q`` and ``kv``; None where they can: heads of
    up to 256 channels, in float32 64."""
    most = 256 if q.element_size() == 2 else 64
    if kv.format.joined:
        return "it scores keys that are no latents"
    return serves(q, kv) if q.shape[-1] <= most else f"it scores heads of up to {most} channels; got {q.shape[-1]}"


def serves_sums(q: Tensor, kv: KVView, rows: int) -> str | None:
    """Why ``line_sums.token_sums`` cannot run this call; None where it can."""
    return serves_scores(q, kv) if 1 <= rows <= MOST_ROWS else f"it sums up to {MOST_ROWS} rows; got {rows}"


def serves_energies(q: Tensor, kv: KVView, block_size: int) -> str | None:
    """Why ``block_energies.energies`` cannot run this call; None where it can."""
    return serves_scores(q, kv) if block_size in (64, 128) else f"it takes blocks of 64 or 128 keys; got {block_size}"


def serves_tiles(q: Tensor, kv: KVView, k_len: int, block_size: int) -> str | None:
    """Why ``antidiagonals.choose`` cannot run this call; None where it can."""
    most = MOST_KEY_BLOCKS * block_size
    return serves_scores(q, kv) if k_len <= most else f"it chooses among up to {most} keys; got {k_len}"


def serves_fp8_tiles(q: Tensor, kv: KVView, k_len: int, block_size: int) -> str | None:
    """Why ``antidiagonals.choose`` cannot run this call with products in FP8; None where it can."""
    reason = why_no_products(q.device) if q.is_cuda else None  # which an interpreter has
    return reason or serves_tiles(q, kv, k_len, block_size)


def serves_means(q: Tensor, kv: KVView, used: Blocks, corrected: Corrected) -> str | None:
    """Why ``means.attend_means`` cannot add means beside ``used``; None where it can."""
    if q.shape[1] > 1 or used.block_size != corrected.block_size or corrected.gone is not None:
        return "it adds means to one row's blocks alone, of which nothing was evicted"
    if kv.format.joined:
        return "it adds means of keys and values that are no latents"
    return cpu.uneven(used.units, kv.kv_heads) or serves(q, kv)
