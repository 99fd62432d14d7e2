"""Prefill by FlashAttention-4 (the package flash-attn-4, BSD-3; Dao et al.), an optional extra: many rows on a Hopper
GPU, dense or blocks of 64 or 128 keys, where it was measured to be faster than our kernels
(docs/performance-gpu.md).

Its kernels read keys in one piece, so these are laid out first, as our own kernel does for as many rows. With a page
table and block lists it was seen to ignore the table: it is never called so.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import rows
from saccade.selection import Blocks, Dense, Selection, Shape

VERSION = "4.0.0b36"  # whose results were compared; an alpha's interface changes between versions
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (64, 128)
LEAST = {Dense: (1024, 1 << 25), Blocks: (4096, 1 << 27)}  # rows, and rows times keys, from which on it was faster

_failed: dict[str, str] = {}  # by device: why no further call is made there


def why_not(device: torch.device) -> str | None:
    """Why no call runs on ``device``; None where those that :func:`serves` do."""
    reason = _missing()
    if reason is not None:
        return reason
    if device.type != "cuda":
        return f"it runs on a Hopper GPU, not on {device}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"it was measured on Hopper GPUs alone, not on {torch.cuda.get_device_name(device)}"
    return _failed.get(str(device))


def wanted(asked: bool | None, backend: str, device: torch.device | None) -> bool:
    """Whether an engine has it run what it serves: as ``asked``, by default where it can and no backend is named."""
    if asked is not None:
        return asked
    return backend == "auto" and device is not None and why_not(device) is None


@cache
def _missing() -> str | None:
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return "flash-attn-4 is not installed (pip install 'saccade-llm[fa4]')"
    if found != VERSION:
        return f"flash-attn-4 {found} is installed, {VERSION} is known to be right (pip install 'saccade-llm[fa4]')"
    lost = next((name for name in ("flash_attn", "cutlass", "triton") if importlib.util.find_spec(name) is None), None)
    return None if lost is None else f"{lost} is not installed (pip install 'saccade-llm[fa4]')"


def serves(q: Tensor, selection: Selection, scale: float, softcap: float | None) -> str | None:
    """Why it does not serve this call; None where it does. The caller knows that our own kernels could."""
    if type(selection) not in LEAST:
        return f"it is called for everything and for blocks, not for {type(selection).__name__}"
    shape, (least_rows, least_pairs) = selection.shape, LEAST[type(selection)]
    if shape.q_len < least_rows or shape.q_len * (shape.q_start + shape.q_len) < least_pairs:
        return f"{shape.q_len} rows over {shape.q_start + shape.q_len} keys are too few to lay the keys out for"
    reason = why_not(q.device)
    if reason is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] not in HEAD_DIMS:
        return f"it is called in 16 bits with a head_dim of {HEAD_DIMS}, not in {q.dtype} with {q.shape[-1]}"
    if isinstance(selection, Blocks) and selection.block_size not in BLOCK_SIZES:
        return f"it reads blocks of {BLOCK_SIZES} keys, not of {selection.block_size}"
    return "it is called without softcap and with a scale above 0" if softcap is not None or scale <= 0 else None


def prepare(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what a model of this shape will want, dense and by blocks of 128, in some seconds; a warning where that
    fails."""
    if dtype not in (torch.bfloat16, torch.float16) or head_dim not in HEAD_DIMS:
        return
    q, k = (torch.zeros(count, 256, head_dim, dtype=dtype, device=device) for count in (heads, kv_heads))
    shape = Shape.suffix(heads, kv_heads, 256, 256, device)
    mask = torch.ones(heads, 2, 2, dtype=torch.bool, device=device).tril()
    for selection in (Dense(shape), Blocks.from_block_mask(shape, 128, mask)):
        _tried(q, k, k, selection, 1.0)


def attend(q: Tensor, kv: KVView, selection: Dense | Blocks, *, scale: float) -> tuple[Tensor, Tensor] | None:
    """``q`` [heads, q_len, head_dim] -> ``out`` like q and ``lse`` float32 [heads, q_len] (natural log), of a call that
    :func:`serves`. None where the package fails; it is not called on that device again, and a warning says why."""
    from saccade.ops.triton.pages import gather

    shape, paged = selection.shape, kv.paged()
    limit = shape.q_start + shape.q_len  # no key from here on is causal for any row
    k, v = (gather(part, paged.block_table, 0, limit, q.dtype) for part in (paged.k, paged.v))
    return _tried(rows(q), k, v, selection, scale)


def _tried(q: Tensor, k: Tensor, v: Tensor, selection: Dense | Blocks, scale: float) -> tuple[Tensor, Tensor] | None:
    try:
        return _attend(q, k, v, selection, scale)
    except Exception as error:  # it compiles at a variant's first call, by tools that may not suit the machine
        line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        _failed[str(q.device)] = f"a call failed: {line[:200]}"
        warnings.warn(f"FlashAttention-4 is not used any more on {q.device}: {line[:200]}", stacklevel=3)
        return None


def _attend(q: Tensor, k: Tensor, v: Tensor, selection: Dense | Blocks, scale: float) -> tuple[Tensor, Tensor]:
    """``k``, ``v`` [kv_heads, n, head_dim], with the rows at their end."""
    from flash_attn.cute import flash_attn_func

    queries, before, options = q.transpose(0, 1), 0, _options(selection)
    if isinstance(selection, Blocks):
        before = selection.shape.q_start % selection.block_size
        if before:  # its tiles begin at the first row, ours on the grid of blocks
            queries = torch.cat([queries.new_zeros(before, *queries.shape[1:]), queries])
    out, lse = flash_attn_func(
        queries[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        softmax_scale=scale,
        return_lse=True,
        **options,
    )[:2]
    return out[0, before:].transpose(0, 1), lse[0, :, before:].contiguous()


def _options(selection: Dense | Blocks) -> dict[str, Any]:
    if isinstance(selection, Dense):
        return {"causal": True}
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from saccade.ops.fa4_mask import causal
    from saccade.ops.triton.block_rows import block_rows

    lists = block_rows(selection)
    tensors = BlockSparseTensorsTorch(
        mask_block_cnt=lists.diagonal_counts[None],
        mask_block_idx=lists.diagonals[None],
        full_block_cnt=lists.counts[None],
        full_block_idx=lists.rows[None],
        block_size=(selection.block_size, selection.block_size),
    )
    return {"block_sparse_tensors": tensors, "mask_mod": causal, "pack_gqa": False}  # lists are a query head's
