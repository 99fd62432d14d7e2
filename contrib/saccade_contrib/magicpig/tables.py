"""Tables of hash codes of keys, and the keys that share codes with a query."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.state import MethodState
from saccade.ops import cpu
from saccade.ops.cpu_structs import Reads, address, native
from saccade.selection import Sampled, Shape, Tokens

GUARD = 1e-4  # added to a key's chance before it divides; keys that are likelier missed than this are suppressed


@dataclass(eq=False)
class HashTables(MethodState):
    """Hash codes of ``bits`` bits of the keys ``first .. last - 1`` minus their ``mean`` (fp32 [kv_heads, head_dim]):
    int16 ``codes`` [kv_heads, tables, keys]. Where the kernels run, ``buckets`` holds them sorted instead: where each
    code's keys start, int32 [kv_heads, tables, 2^bits + 1], and the keys, int32 [kv_heads, tables, keys]. All
    of it comes from a prompt of ``length`` tokens and stays as it is."""

    replaced: ClassVar[frozenset[str]] = frozenset({"mean", "codes", "buckets"})

    first: int
    last: int
    length: int
    bits: int
    mean: Tensor
    codes: Tensor
    buckets: tuple[Tensor, Tensor] | None = None

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        fitting.within("length", self.length, 0, sizes.length)
        fitting.within("last", self.last, 0, self.length)
        fitting.within("first", self.first, 0, self.last)
        fitting.within("bits", self.bits, 1, 15)
        heads, keys = sizes.kv_heads, self.last - self.first
        fitting.tensor("mean", self.mean, torch.float32, heads, sizes.head_dim)
        stored = keys if self.buckets is None else 0
        codes = fitting.tensor("codes", self.codes, torch.int16, heads, None, stored)
        if self.buckets is not None:
            starts, order = self.buckets
            fitting.tensor("starts", starts, torch.int32, heads, codes.shape[1], 2**self.bits + 1)
            fitting.within("starts", starts, 0, keys)
            fitting.require(bool((starts.diff(dim=2) >= 0).all()), "has starts out of order")
            fitting.within("keys", fitting.tensor("keys", order, torch.int32, heads, codes.shape[1], keys), 0, keys - 1)

    @classmethod
    def of(cls, q: Tensor, kv: KVView, first: int, last: int, bits: int, mean: Tensor, codes: Tensor) -> HashTables:
        """Tables of ``codes``, as :func:`draw` reads them fastest for queries like ``q`` and keys in ``kv``."""
        if cpu.serves(q, kv) is not None:
            return cls(first, last, kv.length, bits, mean, codes)
        heads, tables, keys = codes.shape
        starts = torch.empty(heads, tables, 2**bits + 1, dtype=torch.int32, device="cpu")
        order = torch.empty(heads, tables, keys, dtype=torch.int32, device="cpu")
        codes = codes.contiguous()
        cpu.kernels().fill_buckets(
            native.HashBuckets(
                threads=torch.get_num_threads(),
                rows=heads * tables,
                keys=keys,
                buckets=2**bits,
                codes=codes.data_ptr(),
                starts=starts.data_ptr(),
                order=order.data_ptr(),
            )
        )
        return cls(first, last, kv.length, bits, mean, codes[..., :0].clone(), (starts, order))

    def holds(self, length: int) -> bool:
        return length >= self.length

    def to(self, device: torch.device | str) -> Self:
        """Buckets serve the CPU's kernels alone: elsewhere the codes themselves are compared."""
        if torch.device(device).type == "cpu":
            return super().to(device)
        return super(HashTables, self.with_codes()).to(device)

    def with_codes(self) -> Self:
        """The tables without buckets, their codes in the keys' order."""
        if self.buckets is None:
            return self
        starts, order = self.buckets
        sorted_codes = (
            torch.arange(2**self.bits, dtype=torch.int16, device=order.device).repeat(*starts.shape[:2], 1).flatten()
        )
        sorted_codes = sorted_codes.repeat_interleave(starts.diff(dim=2).flatten()).view(order.shape)
        codes = torch.empty_like(sorted_codes).scatter_(2, order.long(), sorted_codes)
        return replace(self, codes=codes, buckets=None)


def draw(q: Tensor, kv: KVView, shape: Shape, tables: HashTables, asked: Tensor) -> tuple[Sampled, int]:
    """Per query head the keys whose codes equal the query's, ``asked`` int16 [heads, tables], in at least 2 tables,
    with -ln(chance + guard) for a bias, beside all keys that are in no table (MagicPIG, arXiv:2410.16179). ``q``
    [heads, 1, head_dim]. Also how many were drawn, all heads together."""
    exact = tables.first + shape.k_len - tables.last
    if kv.in_pieces:  # the kernel that looks into buckets reads keys where they lie, which is nowhere for some
        tables = tables.with_codes()
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
    device = q.device
    before = torch.arange(tables.first, device=device)
    after = torch.arange(tables.last, shape.k_len, device=device)
    lists, biases = [], []
    for head in range(shape.heads):
        kv_head = head // shape.group
        same = tables.codes[kv_head] == asked[head, :, None]
        drawn = (same.sum(0) >= 2).nonzero()[:, 0] + tables.first
        keys = kv.take(drawn, kv_head)[0].float() - tables.mean[kv_head]
        bias = -torch.log(chance(q[head, 0], keys, tables.codes.shape[1], tables.bits) + GUARD)
        lists.append(torch.cat([before, drawn, after]))
        biases += [bias.new_zeros(before.numel()), bias, bias.new_zeros(after.numel())]
    return Sampled(Tokens.from_lists(shape, lists), torch.cat(biases))


def _draw(q: Tensor, kv: KVView, shape: Shape, tables: HashTables, asked: Tensor) -> Sampled:
    """By looking into the query's buckets."""
    assert tables.buckets is not None
    starts, order = tables.buckets
    mean = tables.mean.contiguous()
    call = Reads(q, kv, shape, 1.0, None, None)
    counts = torch.empty(shape.heads, dtype=torch.int64, device="cpu")
    offsets = torch.empty(shape.heads + 1, dtype=torch.int64, device="cpu")
    room = shape.heads * shape.k_len  # memory that nothing is written to costs nothing
    indices = torch.empty(room, dtype=torch.int32, device="cpu")
    bias = torch.empty(room, device="cpu")
    wanted = native.HashDraw(
        tables=starts.shape[1],
        bits=tables.bits,
        first=tables.first,
        last=tables.last,
        length=shape.k_len,
        guard=GUARD,
        mean=mean.data_ptr(),
        asked=address(asked),
        starts=address(starts),
        order=address(order),
        counts=counts.data_ptr(),
        offsets=offsets.data_ptr(),
        indices=indices.data_ptr(),
        bias=bias.data_ptr(),
    )
    cpu.kernels().draw(call.threads, call.pool, call.table, call.queries(), wanted)
    count = int(offsets[-1])
    return Sampled(Tokens(shape, offsets, indices[:count].clone()), bias[:count].clone())
