"""Decode over latents for many query heads on a Hopper GPU: what ``latents._latents`` computes, written in Gluon,
Triton's language of layouts.

Two warpgroups share a tile of 64 heads and 64 keys: each computes the scores of half of the keys, and weighs half of
the channels by all of them, which meet in shared memory. Triton would have both compute all scores. Rows of the tile
after the next are fetched as soon as a tile has been weighed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from saccade.ops.triton.common import interpreted, is_hopper
from saccade.ops.triton.gluon_readers import copy_rows

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # 3.7 renamed it
except (ImportError, AttributeError):  # it is experimental
    gluon = None

HEADS, KEYS, WARPS = 64, 64, 8  # of a program
VALUES, REST = (256, 512), 64  # channels that are values, and others, of rows that the kernel reads


@cache
def _capable(device: torch.device) -> bool:
    return torch.version.hip is None and is_hopper(device)


def serves(q: Tensor, value_dim: int) -> bool:
    """Whether the kernel takes such queries [rows, heads, width]."""
    halves = q.dtype in (torch.bfloat16, torch.float16)
    widths = value_dim in VALUES and q.shape[-1] - value_dim == REST
    return gluon is not None and not interpreted and halves and widths and q.is_cuda and _capable(q.device)


if gluon is not None:

    @gluon.jit
    def _wait(own):
        """``common.begin``, of a kernel launched early."""
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r", [own], gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def _listed(ids, number, valid, SIZE: gl.constexpr):
        """``batch.listed_keys``."""
        key = number
        if SIZE == 1:
            key = gl.load(ids + number, mask=valid, other=0)
        elif SIZE > 1:
            key = gl.load(ids + number // SIZE, mask=valid, other=0) * SIZE + number % SIZE
        return key

    @gluon.jit
    def _rows(table, key, valid, far, PAGE: gl.constexpr, FAR: gl.constexpr):
        """``common.pool_places`` of the one KV head."""
        slots = gl.load(table + key // PAGE, mask=valid, other=0).to(gl.int64)
        if FAR:
            there = slots < 0
            row = gl.where(there, -1 - slots, slots) * PAGE + key % PAGE + gl.where(there, far.to(gl.int64), 0)
        else:
            row = slots * PAGE + key % PAGE
        return row

    @gluon.jit
    def _fetch(
        values, rest, number, k_pool, row, valid, D: gl.constexpr, V: gl.constexpr, REST: gl.constexpr,
        COPY: gl.constexpr,
    ):  # fmt: skip
        """Starts to copy a tile of rows; nothing comes for those that are not ``valid``, zeros."""
        channel = gl.arange(0, V, gl.SliceLayout(0, COPY))[None, :]
        beyond = V + gl.arange(0, REST, gl.SliceLayout(0, COPY))[None, :]
        copy_rows(values.index(number), k_pool, row[:, None], channel, valid[:, None] & (channel < V), D)
        copy_rows(rest.index(number), k_pool, row[:, None], beyond, valid[:, None], D)
        async_copy.commit_group()

    @gluon.jit(
        do_not_specialize=["table_stride", "longest", "far"],
        do_not_specialize_on_alignment=["tables", "lengths", "limits", "starts", "counts", "indices"],
    )
    def latents(
        q_ptr, k_pool, tables, lengths, limits, starts, counts, indices, part_out, part_lse, out, lse, q_line, q_head,
        table_stride, longest, scale_log2, softcap, far, FAR: gl.constexpr, HEADS: gl.constexpr, UNITS: gl.constexpr,
        PER: gl.constexpr, PER_PAD: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
        V_PAD: gl.constexpr, REST_PAD: gl.constexpr, PAGE: gl.constexpr, SIZE: gl.constexpr, SPACED: gl.constexpr,
        COUNTED: gl.constexpr, KEYS: gl.constexpr, MANY: gl.constexpr, CAPPED: gl.constexpr, PRECISION: gl.constexpr,
        EARLY: gl.constexpr,
    ):  # fmt: skip
        COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        AT: gl.constexpr = gl.SliceLayout(1, COPY)
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
        OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, V // 2, 16])
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        kind: gl.constexpr = k_pool.dtype.element_ty
        program, split, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
        splits = gl.num_programs(1)
        table = tables + batch.to(gl.int64) * table_stride
        number = split * KEYS + gl.arange(0, KEYS, AT)
        hop = splits * KEYS
        if EARLY:
            _wait(number)
        length = gl.load(lengths + batch)
        ids = indices
        count = length
        if SIZE > 0:
            entry = batch * UNITS + program * PER // (HEADS // UNITS)
            if SPACED:
                ids = indices + entry.to(gl.int64) * longest
            else:
                ids = indices + gl.load(starts + entry)
            if COUNTED:
                count = gl.load(counts + entry).to(gl.int32) * SIZE
            else:
                count = (gl.load(starts + entry + 1) - gl.load(starts + entry)).to(gl.int32) * SIZE
        values = gl.allocate_shared_memory(kind, [2, KEYS, V], SHARED)
        rest = gl.allocate_shared_memory(kind, [2, KEYS, REST_PAD], SHARED)
        q_values = gl.allocate_shared_memory(kind, [1, PER_PAD, V], SHARED)
        q_rest = gl.allocate_shared_memory(kind, [1, PER_PAD, REST_PAD], SHARED)
        weighed = gl.allocate_shared_memory(kind, [PER_PAD, KEYS], SHARED)
        member = gl.arange(0, PER_PAD, AT)
        q_row = (batch.to(gl.int64) * ROWS + (program * PER + member) // HEADS) * q_line
        q_row += (program * PER + member) % HEADS * q_head
        none = (member * 0).to(gl.int64)
        _fetch(q_values, q_rest, 0, (q_ptr + q_row)[:, None], none, member < PER, D, V, REST_PAD, COPY)
        for ahead in gl.static_range(2):
            key = _listed(ids, number, number < count, SIZE)
            valid = (number < count) & (key < length)
            _fetch(values, rest, ahead, k_pool, _rows(table, key, valid, far, PAGE, FAR), valid, D, V, REST_PAD, COPY)
            number += hop
        key = _listed(ids, number, number < count, SIZE)
        place = gl.arange(0, PER_PAD, gl.SliceLayout(1, SCORES))
        limit = length + place * 0
        if ROWS > 1:
            line = batch * ROWS + (program * PER + place) // HEADS
            limit = gl.load(limits + line, mask=place < PER, other=0)
        acc = gl.zeros([PER_PAD, V], gl.float32, OUT)
        zeros = gl.zeros([PER_PAD, KEYS], gl.float32, SCORES)
        weight = gl.zeros([PER_PAD], gl.float32, gl.SliceLayout(1, SCORES))
        top = gl.full([PER_PAD], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        at = split * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        tiles = gl.cdiv(count, KEYS)
        turn = 0
        for _ in range(split, tiles, splits):
            async_copy.wait_group(1)
            fence_async_shared()
            barrier()
            k, k_rest = values.index(turn), rest.index(turn)
            scores = warpgroup_mma(q_values.index(0), k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma(q_rest.index(0), k_rest.permute((1, 0)), scores, is_async=True)
            # Meanwhile, what the tile after the next one needs.
            valid = (number < count) & (key < length)
            row = _rows(table, key, valid, far, PAGE, FAR)
            number += hop
            key = _listed(ids, number, number < count, SIZE)
            seen = (at < count) & (_listed(ids, at, at < count, SIZE) < length)
            scores = warpgroup_mma_wait(0, deps=(scores,)) * scale_log2
            if CAPPED:
                cap = softcap * 1.4426950408889634
                scores = cap * (1.0 - 2.0 / (gl.exp2(scores * (2.0 / softcap)) + 1.0))
            if ROWS > 1:
                scores = gl.where(seen[None, :] & (at[None, :] < limit[:, None]), scores, float("-inf"))
            else:
                scores = gl.where(seen[None, :], scores, float("-inf"))
            at += hop
            higher = gl.maximum(top, gl.max(scores, 1))
            anchor = gl.where(higher == float("-inf"), 0.0, higher)
            shrink = gl.exp2(top - anchor)
            p = gl.exp2(scores - anchor[:, None])
            top = higher
            weighed.store(p.to(kind))
            fence_async_shared()
            barrier()
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
            acc = warpgroup_mma(weighed, k, acc, is_async=True)
            weight = weight * shrink + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()  # both warpgroups have read it
            _fetch(values, rest, turn, k_pool, row, valid, D, V, REST_PAD, COPY)
            turn = 1 - turn
        async_copy.wait_group(0)
        total = gl.where(weight == 0.0, 1.0, weight)
        log = gl.where(weight == 0.0, float("-inf"), top + gl.log2(total))
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
        channel = gl.arange(0, V, gl.SliceLayout(0, OUT))[None, :]
        mine = gl.arange(0, PER_PAD, gl.SliceLayout(1, OUT))[:, None]
        own = (batch * gl.num_programs(0) + program).to(gl.int64)
        if MANY:
            part = own * splits + split
            if split < tiles:
                gl.store(part_out + (part * PER + mine) * V + channel, acc, mask=mine < PER)
            gl.store(part_lse + part * PER + place, log, mask=place < PER)
        else:
            gl.store(out + (own * PER + mine) * D + channel, acc.to(out.dtype.element_ty), mask=mine < PER)
            gl.store(lse + own * PER + place, log * 0.6931471805599453, mask=place < PER)
