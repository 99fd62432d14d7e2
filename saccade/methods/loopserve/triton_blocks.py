"""Lines of blocks on the device: from queries and keys to lists of blocks, no number of which goes to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.methods.loopserve.blocks import query_blocks
from saccade.methods.loopserve.triton_rounds import cover
from saccade.ops.layout import flat
from saccade.ops.triton.choose import compact
from saccade.ops.triton.common import pad
from saccade.ops.triton.row_shares import sums
from saccade.selection import Blocks, Shape


def select_on_device(chunk: Chunk, rows: Tensor, share: float, block_size: int, shape: Shape, near: int) -> Blocks:
    """``blocks.select_blocks``; a head whose weights are NaN reads everything, and so says NaN itself."""
    own = chunk.shape
    which, starts, blocks = _listed(own, rows, block_size, chunk.q.device)
    weights = sums(chunk.q, chunk.kv, own, which, starts, blocks, block_size, chunk.scale, chunk.softcap)
    marks = cover(weights, blocks, own.q_start // block_size, share, near)
    return lists_on_lines(shape, block_size, marks)


def lists_on_lines(shape: Shape, block_size: int, marks: Tensor) -> Blocks:
    """``blocks.on_lines`` of ``marks``, int8 [2, heads, k_blocks], as lists."""
    _, heads, k_blocks = marks.shape
    first, last = (at // block_size for at in (shape.q_start, shape.q_start + shape.q_len - 1))
    taken = torch.empty(heads, last - first + 1, k_blocks, dtype=torch.int8, device=marks.device)
    _cross[(last - first + 1, heads)](
        flat(marks, torch.int8), taken, first, heads * k_blocks, k_blocks, WIDTH=pad(k_blocks), num_warps=4
    )
    return compact(shape, block_size, taken)


def _listed(shape: Shape, rows: Tensor, block_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """``rows``, where those of each query block begin, and the query blocks: int64 on ``device``, by one copy that
    nothing waits for."""
    blocks, places = query_blocks(shape, rows, block_size)
    starts = torch.nn.functional.pad(torch.bincount(places).cumsum(0), (1, 0))
    parts = rows, starts, blocks
    listed = torch.zeros(3, -(-(rows.numel() + 1) // 2) * 2, dtype=torch.int64, device="cpu")
    for line, part in zip(listed, parts, strict=True):
        line[: part.numel()] = part
    if device.type == "cuda":
        listed = listed.pin_memory().to(device, non_blocking=True)
    which, starts, blocks = (line[: part.numel()] for line, part in zip(listed, parts, strict=True))
    return which, starts, blocks


@triton.jit(do_not_specialize=["first", "kind_stride", "k_blocks"])
def _cross(marks, taken, first, kind_stride, k_blocks, WIDTH: tl.constexpr):
    """What one query block of a head reads."""
    own, head = first + tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.arange(0, WIDTH)
    seen = (block <= own) & (block < k_blocks)
    column = tl.load(marks + head * k_blocks + block, mask=seen, other=0)
    distance = tl.load(marks + kind_stride + head * k_blocks + own - block, mask=seen, other=0)
    to = taken + (head * tl.num_programs(0) + tl.program_id(0)) * k_blocks
    tl.store(to + block, column | distance, mask=block < k_blocks)
