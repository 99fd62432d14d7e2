"""Blocks that the next layer of a recorded step is likely to choose, brought in while this layer computes its MLP.

The residual stream changes little from layer to layer, so the next layer's norm and query projection, applied to what
enters this layer's MLP, give nearly the queries that it will ask with (InfiniGen: Lee et al., OSDI 2024). They score
the next layer's block summaries, and what they choose comes over the link beside the MLP's products with weights. The
layer then chooses by its true queries and has brought in what is still missing, so answers do not hang on any of this.

All of it runs on a stream of its own, from after a layer's attention to before the next layer stores its rows. No
attention runs in between, so no copy can go into a slot that one reads: what the layers before have read, they have
read, and what the next layer will read, it has not looked up yet. Words and lists of kv.offers are written by one of
both streams at a time for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from saccade.engine.device_choice import Group, bring, choose
from saccade.engine.device_rows import RowBuffers
from saccade.kv.blocks import BlockManager
from saccade.kv.offers import Offers
from saccade.models.interface import LayerAttention
from saccade.models.llama_kernels import StepLayer
from saccade.ops.triton.batched_decode import Summaries
from saccade.ops.triton.decode import Pages
from saccade.selection.plan import BestBlocks, RankedBlocks, blocks_of

MORE = 0  # one in so many blocks more than will be read is looked for ahead; 0 for none
MOST_BYTES = 8 << 20  # that come ahead for a layer: about twice what the link brings while it computes its MLP


class Foresight:
    """For one step of ``groups`` over ``buffers``, whose rows have ``lengths`` keys, with blocks in host memory
    (``offers``). ``aside``: the stream beside that of the step; None on a CPU. A models.decode_step.Foresight."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        buffers: RowBuffers,
        pool: BlockManager,
        lengths: Tensor,
        longest: int,
        offers: Offers,
        aside: torch.cuda.Stream | None,
    ) -> None:
        self.groups, self.buffers, self.pool, self.longest = groups, buffers, pool, longest
        self.offers, self.aside = offers, aside
        # Without the step's own tokens: blocks that these fill have no summary before the layer stores them.
        self._lengths = (lengths - 1).clamp(min=0)
        self._take = buffers.first + buffers.first // MORE if MORE else buffers.first
        self._most = max(1, MOST_BYTES // offers.cell_bytes // pool.rows)
        self._came: Any = None  # event: what was foreseen last lies in its slots

    def wants(self, layer: int) -> bool:
        """See decode_step.Foresight: where blocks are chosen by queries."""
        return any(isinstance(group.form[layer], BestBlocks | RankedBlocks) for group in self.groups)

    @contextmanager
    def beside(
        self, layer: int, kernels: StepLayer, hidden: Tensor, rotary: tuple[Tensor, Tensor], spec: LayerAttention
    ) -> Iterator[None]:
        """See decode_step.Foresight."""
        if self.aside is None:
            self._foresee(layer, kernels.query(kernels.norm(hidden), *rotary), spec)
            yield
            return
        stream = torch.cuda.current_stream(self.aside.device)
        self.aside.wait_stream(stream)
        with torch.cuda.stream(self.aside):
            x = kernels.norm(hidden)
            read = self.aside.record_event()
            self._foresee(layer, kernels.query(x, *rotary), spec)
            self._came = self.aside.record_event()
        yield
        stream.wait_event(read)

    def join(self) -> bool:
        """What follows on the current stream follows all that was foreseen. Whether there was anything: the next kernel
        then has two kernels before it, and must not start early."""
        came, self._came = self._came, None
        if came is not None:
            torch.cuda.current_stream(self.offers.head.device).wait_event(came)
        return came is not None

    def _foresee(self, layer: int, q: Tensor, spec: LayerAttention) -> None:
        """Bring in what queries like ``q`` [heads, rows, head_dim] would choose."""
        q, buffers, storage = q.transpose(0, 1), self.buffers, self.pool.storage
        for group in self.groups:
            reading, rows, choice = group.form[layer], group.slice, blocks_of(group.form)
            if choice is None or not isinstance(reading, BestBlocks | RankedBlocks):
                continue
            tables = buffers.tables[layer, rows]
            pages = Pages(storage.k, storage.v, tables, self._lengths[rows], self.longest)
            summaries = Summaries(buffers.pointers[layer, rows], choice.size, choice.summary)
            take, second = self._take[layer, rows], buffers.second[layer, rows]
            if MORE and isinstance(reading, BestBlocks):
                take = take.clamp(max=reading.take)  # as many as its lists have room for
            chosen = choose(reading, q[group.tokens], pages, summaries, take, second, spec)
            bring(self.pool, self.offers, layer, buffers.logical[rows], pages, reading, chosen, self._most)
