"""C++ kernels that selections are decided from: sums over sampled rows, block scores and shares."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.cpu_structs import Reads, native
from saccade.selection import Shape

_MAX_TILE = 4096  # channels of a tile's rows together
_MAX_LANES = 64  # rows of a tile


def line_sums(
    q: Tensor, kv: KVView, shape: Shape, rows: int, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax weights of the last ``rows`` rows, summed by key and by distance: two fp32 [heads, k_len].

    What ``scores.line_sums`` means, for calls that :func:`saccade.ops.cpu.serves` allows.
    """
    call = Reads(q, kv, shape, scale, softcap, None)
    sums = torch.zeros(2, shape.heads, shape.k_len)
    sample = torch.arange(shape.q_len - rows, shape.q_len, dtype=torch.int32)
    wanted = native.LineSums(
        rows=sample.data_ptr(),
        count=rows,
        k_len=shape.k_len,
        columns=sums[0].data_ptr(),
        slashes=sums[1].data_ptr(),
    )
    cpu.kernels().line_sums(call.threads, call.pool, call.table, call.queries(0, shape.q_len), wanted)
    return sums[0], sums[1]


def serves_tiles(q: Tensor, kv: KVView, stride: int, block_size: int) -> str | None:
    """Why :func:`antidiagonals` cannot run this call; None where it can: tiles that lie within a page and fit the
    scratch of a core."""
    if kv.block_size % stride or block_size > 64 * stride or stride * q.shape[-1] > _MAX_TILE:
        return f"tiles of {stride} rows do not lie within pages of {kv.block_size} keys, or are too large"
    return cpu.serves(q, kv)


def antidiagonals(
    q: Tensor, kv: KVView, shape: Shape, stride: int, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """``scores.antidiagonal_shares`` before blocks are brought to a sum of 1, for calls that :func:`serves_tiles`
    allows."""
    call = Reads(q, kv, shape, scale, softcap, None)
    shares = _no_shares(shape, block_size)
    wanted = native.Antidiagonals(k_len=shape.k_len, stride=stride, block_size=block_size, shares=shares.data_ptr())
    cpu.kernels().antidiagonals(call.threads, call.pool, call.table, call.queries(0, shape.q_len), wanted)
    return shares


def _no_shares(shape: Shape, block_size: int) -> Tensor:
    """Zeros [heads, query blocks that the call has a part of, key blocks]."""
    q_blocks = (shape.q_start + shape.q_len - 1) // block_size - shape.q_start // block_size + 1
    return torch.zeros(shape.heads, q_blocks, -(-shape.k_len // block_size))


def serves_shares(mass: Tensor) -> str | None:
    """Why :func:`needed_shares` cannot take ``mass``; None where it can."""
    if not cpu.available():
        return cpu.why_unavailable()
    if mass.dtype != torch.float32 or mass.device.type != "cpu":
        return f"it sums float32 on the CPU; got {mass.dtype} on {mass.device}"
    return None


def needed_shares(mass: Tensor) -> Tensor:
    """``scores.needed_shares`` of fp32 [..., n], for what :func:`serves_shares` allows: a task is a row,
    sorted by digits."""
    mass = mass.contiguous()
    out, n = torch.empty(mass.shape, dtype=torch.float64), mass.shape[-1]
    rows = mass.numel() // n if n else 0
    native.needed_shares(
        native.Shares(threads=torch.get_num_threads(), mass=mass.data_ptr(), rows=rows, n=n, out=out.data_ptr())
    )
    return out


def serves_row_shares(q: Tensor, kv: KVView, rows: int, block_size: int) -> str | None:
    """Why :func:`row_shares` cannot run this call; None where it can."""
    if rows > _MAX_LANES or 128 % block_size:
        return f"it takes up to {_MAX_LANES} rows of blocks that divide 128; got {rows} of {block_size}"
    return cpu.serves(q, kv)


def row_shares(
    q: Tensor, kv: KVView, shape: Shape, rows: int, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """``row_shares.row_shares`` before rows are brought to a sum of 1, for calls that :func:`serves_row_shares`
    allows."""
    call = Reads(q, kv, shape, scale, softcap, None)
    shares = _no_shares(shape, block_size)
    wanted = native.RowShares(k_len=shape.k_len, rows=rows, block_size=block_size, shares=shares.data_ptr())
    cpu.kernels().row_shares(call.threads, call.pool, call.table, call.queries(0, shape.q_len), wanted)
    return shares


def row_sums(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: Tensor,
    places: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """``row_shares.row_sums`` for calls that :func:`serves_row_shares` allows: a task is a head."""
    call = Reads(q, kv, shape, scale, softcap, None)
    listed, place = (part.to("cpu", torch.int32).contiguous() for part in (rows, places))
    count = int(place[-1]) + 1
    sums = torch.zeros(shape.heads, count, -(-shape.k_len // block_size), device="cpu")
    wanted = native.RowShares(
        k_len=shape.k_len,
        rows=1,
        block_size=block_size,
        shares=sums.data_ptr(),
        listed=listed.data_ptr(),
        place=place.data_ptr(),
        count=listed.numel(),
        places=count,
    )
    cpu.kernels().row_shares(call.threads, call.pool, call.table, call.queries(0, shape.q_len), wanted)
    return sums
