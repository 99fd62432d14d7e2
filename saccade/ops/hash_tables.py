"""Tables of hash codes of keys, the keys that share codes with a query, and attention over what was drawn so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.selection import Sampled, Shape, Tokens

GUARD = 1e-4  # added to a key's chance before it divides; keys that are likelier missed than this are suppressed


@dataclass(eq=False)
class HashTables:
    """Hash codes of ``bits`` bits of the keys ``first .. last - 1`` minus their ``mean`` (fp32 [kv_heads, head_dim]):
    int16 ``codes`` [kv_heads, tables, keys]. Where the kernels run, ``buckets`` holds them sorted instead: where each
    code's keys start, int32 [kv_heads, tables, 2^bits + 1], and the keys, int32 [kv_heads, tables, keys]."""

    first: int
    last: int
    bits: int
    mean: Tensor
    codes: Tensor
    buckets: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, q: Tensor, kv: KVView, first: int, last: int, bits: int, mean: Tensor, codes: Tensor) -> HashTables:
        """Tables of ``codes``, as :func:`draw` reads them fastest for queries like ``q`` and keys in ``kv``."""
        if not cpu.reads(q, kv):
            return cls(first, last, bits, mean, codes)
        heads, tables, keys = codes.shape
        starts = torch.empty(heads, tables, 2**bits + 1, dtype=torch.int32)
        order = torch.empty(heads, tables, keys, dtype=torch.int32)
        codes = codes.contiguous()
        cpu._kernels.fill_buckets(
            cpu._isa_index(),
            torch.get_num_threads(),
            heads * tables,
            keys,
            2**bits,
            codes.data_ptr(),
            starts.data_ptr(),
            order.data_ptr(),
        )
        return cls(first, last, bits, mean, codes[..., :0], (starts, order))


def draw(q: Tensor, kv: KVView, shape: Shape, tables: HashTables, asked: Tensor) -> tuple[Sampled, int]:
    """Per query head the keys whose codes equal the query's, ``asked`` int16 [heads, tables], in at least 2 tables,
    with -ln(chance + guard) for a bias, beside all keys that are in no table (MagicPIG, arXiv:2410.16179). ``q``
    [heads, 1, head_dim]. Also how many were drawn, all heads together."""
    exact = tables.first + shape.k_len - tables.last
    how = _compare if tables.buckets is None else _draw
    sampled = how(q, kv, shape, tables, asked.contiguous())
    return sampled, sampled.tokens.indices.numel() - shape.heads * exact


def chance(q: Tensor, keys: Tensor, tables: int, bits: int) -> Tensor:
    """Probability over draws that a key agrees with ``q`` [d] in at least 2 tables: ``keys`` fp32 [m, d] -> fp32
    [m]."""
    cosine = torch.nn.functional.cosine_similarity(q.double()[None], keys.double(), dim=1)
    p = (1 - torch.arccos(cosine.clamp(-1, 1)) / math.pi) ** bits
    missed = (1 - p) ** (tables - 1)
    return (1 - missed * (1 - p + tables * p)).clamp(0, 1).float()


def _compare(q: Tensor, kv: KVView, shape: Shape, tables: HashTables, asked: Tensor) -> Sampled:
    """By comparing every code."""
    before, after = torch.arange(tables.first), torch.arange(tables.last, shape.k_len)
    lists, biases = [], []
    for head in range(shape.heads):
        kv_head = head // shape.group
        same = tables.codes[kv_head] == asked[head, :, None]
        drawn = (same.sum(0) >= 2).nonzero()[:, 0] + tables.first
        keys = kv.take(drawn, kv_head)[0].float() - tables.mean[kv_head]
        bias = -torch.log(chance(q[head, 0], keys, tables.codes.shape[1], tables.bits) + GUARD)
        lists.append(torch.cat([before, drawn, after]))
        biases += [torch.zeros(before.numel()), bias, torch.zeros(after.numel())]
    return Sampled(Tokens.from_lists(shape, lists), torch.cat(biases))


def _draw(q: Tensor, kv: KVView, shape: Shape, tables: HashTables, asked: Tensor) -> Sampled:
    """By looking into the query's buckets."""
    assert tables.buckets is not None
    starts, order = tables.buckets
    mean = tables.mean.contiguous()
    call = cpu._Call(q, kv, shape, 1.0, None, None)
    counts, offsets = torch.empty(shape.heads, dtype=torch.int64), torch.empty(shape.heads + 1, dtype=torch.int64)
    indices = torch.empty(shape.heads * shape.k_len, dtype=torch.int32)  # pages without a key cost nothing
    bias = torch.empty(shape.heads * shape.k_len)
    cpu._kernels.draw(
        *call.geometry(0, 1),
        starts.shape[1],
        tables.bits,
        tables.first,
        tables.last,
        shape.k_len,
        GUARD,
        mean.data_ptr(),
        asked.data_ptr(),
        starts.data_ptr(),
        order.data_ptr(),
        counts.data_ptr(),
        offsets.data_ptr(),
        indices.data_ptr(),
        bias.data_ptr(),
    )
    count = int(offsets[-1])
    return Sampled(Tokens(shape, offsets, indices[:count].clone()), bias[:count].clone())


def supports(q: Tensor, kv: KVView, selection: Sampled) -> bool:
    """Whether :func:`attend_sampled` can serve this call: one row, a list for each query head."""
    return selection.shape.q_len == 1 and selection.units == selection.shape.heads and cpu.reads(q, kv)


def attend_sampled(
    q: Tensor,
    kv: KVView,
    selection: Sampled,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [heads, 1, head_dim] over lists of keys whose logits gain a bias, on the C++ kernels."""
    call = cpu._Call(q, kv, selection.shape, scale, softcap, threads)
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    offsets, indices = selection.tokens.offsets.long().contiguous(), selection.tokens.indices.int().contiguous()
    bias, sums = selection.bias.float().contiguous(), torch.empty(q.shape, dtype=torch.float32)
    cpu._kernels.sampled(
        *call.geometry(0, 1),
        out.data_ptr(),
        lse.data_ptr(),
        offsets.data_ptr(),
        indices.data_ptr(),
        bias.data_ptr(),
        sums.data_ptr(),
    )
    return out, lse
