"""Rows of latents in scattered pages, and attention over them in float64."""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.ops.triton.batch import KeyLists, Pages

WIDTHS = ((64, 16), (32, 8), (48, 24))  # channels that are values, and others
PAGE = 16


class Latents:
    """Sequences with ``lengths`` latents each, in pages that lie anywhere in a pool whose other rows are not numbers;
    a length of 0 is padding. ``each``: rows of queries of a sequence."""

    def __init__(self, lengths, widths, heads, dtype=torch.float32, each=1, seed=0, device="cpu", page=PAGE):
        rng = torch.Generator().manual_seed(seed)
        self.lengths, self.value_dim, width = lengths, widths[0], sum(widths)
        self.each, self.heads, self.page = each, heads, page
        blocks = max(1, -(-max(lengths) // page))
        used = sum(-(-length // page) for length in lengths)
        slots = torch.randperm(used + 7, generator=rng).tolist()
        pool = torch.full((used + 7, 1, page, width), torch.nan, dtype=dtype)
        tables = torch.zeros(len(lengths), 1, blocks + 2, dtype=torch.int32)  # rows of a wider table
        self.rows = []
        for row, length in enumerate(lengths):
            own = torch.randn(length, width, generator=rng).to(dtype)
            self.rows.append(own)
            for block in range(-(-length // page)):
                tables[row, 0, block] = slots.pop()
                part = own[block * page : (block + 1) * page]
                pool[tables[row, 0, block], 0, : len(part)] = part
        pool = pool.to(device)
        counted = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.pages = Pages(pool, pool, tables.to(device), counted, max(lengths), value_dim=self.value_dim)
        # Heads outermost, as projections may leave them.
        q = torch.randn(heads, len(lengths) * each, width, generator=rng)
        self.q = q.to(device, dtype).transpose(0, 1)

    def lists(self, units, size, spaced, share=0.5, seed=1):
        """KeyLists of about ``share`` of the blocks of each row, in any order, and a bool [units, length] of each."""
        rng = torch.Generator().manual_seed(seed)
        found, kept = [], []
        for length in self.lengths:
            blocks = -(-length // size)
            masks = torch.zeros(units, length, dtype=torch.bool)
            for unit in range(units):
                own = torch.randperm(blocks, generator=rng)[: int(blocks * share)]
                found.append(own.int())
                for block in own.tolist():
                    masks[unit, block * size : (block + 1) * size] = True
            kept.append(masks)
        device = self.pages.k.device
        longest = max(1, max(map(len, found)))
        counts = torch.tensor([len(one) for one in found], dtype=torch.int32)
        if spaced:
            indices = torch.full((len(found), longest), 1 << 30, dtype=torch.int32)
            for row, one in enumerate(found):
                indices[row, : len(one)] = one
            return KeyLists(None, counts.to(device), indices.to(device), units, size, longest), kept
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        return KeyLists(starts.to(device), None, torch.cat(found).to(device), units, size, longest), kept

    def apart(self):
        """The same pages with every third block in another memory, as blocks of a host's are."""
        pool, tables = self.pages.k, self.pages.tables.clone()
        whole = torch.full((2 * len(pool) + 3, *pool.shape[1:]), torch.nan, dtype=pool.dtype, device=pool.device)
        near, host = whole[: len(pool)], whole[len(pool) + 3 :]
        near.copy_(pool)
        for row, length in enumerate(self.lengths):
            for block in range(0, -(-length // self.page), 3):
                slot = int(tables[row, 0, block])
                host[slot] = pool[slot]
                near[slot] = torch.nan
                tables[row, 0, block] = -1 - slot
        return replace(self.pages, k=near, v=near, tables=tables, host=(host, host))


def exact(rows, kept=None, limits=None, *, scale, softcap=None):
    """(out [heads, value_dim], lse [heads]) in float64 of each row of queries."""
    done = []
    for line, q in enumerate(rows.q.double().cpu()):
        keys = rows.rows[line // rows.each].double()
        logits = q @ keys.T * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        seen = torch.ones(rows.heads, len(keys), dtype=torch.bool)
        if kept is not None:
            masks = kept[line // rows.each]
            seen = masks.repeat_interleave(rows.heads // len(masks), 0)
        if limits is not None:
            seen = seen & (torch.arange(len(keys)) < int(limits[line]))
        logits = logits.masked_fill(~seen, -torch.inf)
        lse = logits.logsumexp(1) if len(keys) else torch.full((rows.heads,), -torch.inf, dtype=torch.float64)
        p = torch.exp(logits - lse[:, None]).masked_fill(~seen, 0.0)
        done.append((p @ keys[:, : rows.value_dim], lse))
    return done
