"""The attention of one step on the row path: layer by layer, its rows one by one, joined, or in host memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.engine.rows.calls import RequestRows, Setting, choose, finish, read
from saccade.engine.rows.decode_rows import JoinedRows
from saccade.engine.rows.expanded import attend as attend_expanded
from saccade.engine.rows.expanded import expands
from saccade.engine.rows.freezing import frozen_at, interleaved, runs
from saccade.engine.rows.hosted import HostedPart, HostedRows, Hosting
from saccade.engine.rows.resolved import ResolvedRow
from saccade.engine.rows.tiers import count_tiers, tier_counts
from saccade.engine.rows.together import TogetherRows, waits
from saccade.engine.steps.step import SkipCount
from saccade.models.interface import AheadRows, AttentionContext, FrozenRows, InputRows, LayerAttention, WholeRows

LISTED = 1 << 24  # keys in the lists of rows that choose each for itself, at once: of 4 bytes


@dataclass
class RowAttention:
    """The attention of one step (see models.interface.AttentionContext)."""

    setting: Setting
    rows: list[RequestRows]
    frozen: FrozenRows | None = None
    together: Collection[int] = ()  # ids of the rows of ``joined``; others are served one by one
    joined: JoinedRows | None = None
    resolved: dict[int, ResolvedRow] = field(default_factory=dict)  # of rows that are served apart, by request
    hosted: Sequence[HostedRows] = ()  # rows that the CPU attends in host memory
    hosting: Hosting | None = None
    why_apart: str = "its KV blocks are not all resident"  # of decode rows that are not ``together``
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # frozen rows' keys and values by request

    def ahead_rows(self) -> AheadRows | None:
        """The decode rows whose method looks ahead; None where there are none."""
        asking = [rows for rows in self.rows if rows.decodes and rows.scheduled.policy.decode.looks_ahead]
        looking = [rows for rows in asking if rows.scheduled.stop > rows.scheduled.policy.decode.dense_upto]

        def visit(layer: int, q: Tensor) -> None:
            for at, rows in enumerate(looking):
                before = {layer - 1: rows.ahead[layer - 1]} if layer - 1 in rows.ahead else {}
                rows.ahead = {**before, layer: q[:, at : at + 1]}

        return AheadRows(torch.tensor([rows.first for rows in looking]), visit) if looking else None

    def input_rows(self) -> InputRows | None:
        """The decode rows whose method looks at what layers take in; None where there are none."""
        looking = [rows for rows in self.rows if rows.decodes and rows.scheduled.policy.decode.looks_at_inputs]

        def visit(layer: int, hidden: Tensor) -> None:
            for at, rows in enumerate(looking):
                rows.taken_in = hidden[at]

        return InputRows(torch.tensor([rows.first for rows in looking]), visit) if looking else None

    def parts(self) -> list[HostedPart] | None:
        """The rows as parts that take turns on the device and the CPU; None where they are attended together."""
        return self.hosting.parts(self.hosted) if self.hosting is not None and len(self.hosted) > 1 else None

    @property
    def context(self) -> AttentionContext:
        """What attends: the rows that are joined, where these are all."""
        joined = self.joined
        return self if joined is None or len(self.together) < len(self.rows) or self.frozen is not None else joined

    def whole(self) -> WholeRows | None:
        """The rows where none needs anything between the layers; else None."""
        return self.joined if self.why_not_whole() is None else None

    def why_not_whole(self) -> str | None:
        """Why rows need something between the layers. Where they need nothing, it is the model's products that have no
        C++ kernels."""
        if self.joined is None or len(self.joined.fixed) < len(self.rows):
            return "another row of the step is a prefill's, or chosen for layer by layer"
        if self.frozen is not None:
            return "rows are frozen in some layers"
        return "an audit looks at every layer" if self.setting.watch.audits else None

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        self.setting.watch.pulse.layer()
        self._settle_resolved(layer, q, spec)
        served = self.joined is not None or self.hosted or self.resolved
        alone = len(self.rows) == 1 and not served and not batches(self.rows[0], q)
        if alone and self._skipped(self.rows[0], layer) is None:
            attended = self._attend(self.rows[0], layer, q, k, v, spec, None)  # nothing to put together
            return torch.zeros_like(q) if attended is None else attended
        out = q.new_zeros(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
        hosted = [(part, self._places(layer, part.requests)) for part in self.hosted]
        for part, places in hosted:
            part.send(layer, q[:, places], *_of(places, k, v), spec)
            part.foresee(layer)
        if self.joined is not None:
            self.joined.run(layer, q, k, v, spec, out)
        if len(self.resolved) > 1:
            for one in self.resolved.values():
                one.ask(layer, q, k, v, spec, out)
        start, together = 0, TogetherRows(self.setting)
        skips = [self._skipped(rows, layer) for rows in self.rows]
        several = sum(waits(rows, q) for rows in self.rows) > 1 and all(rows is None for rows in skips)
        for rows, skipped in zip(self.rows, skips):
            here = slice(start, start + rows.scheduled.length - (0 if skipped is None else int(skipped.sum())))
            start = here.stop  # frozen rows are left out
            if (
                id(rows) in self.together
                or self.is_hosted(rows)
                or rows.result.error is not None
                or here.start == here.stop
            ):
                continue
            own = self.resolved.get(rows.scheduled.request_id)
            count = here.stop - here.start
            apart = expands(self.setting, rows, spec, count) or not (several and waits(rows, q))
            if own is None and not batches(rows, q) and apart:
                attended = self._attend(rows, layer, q[:, here], *_of(here, k, v), spec, skipped, here.start)
                if attended is not None:
                    out[:, here] = attended
                continue
            try:
                if own is not None:
                    own.run(layer, q, k, v, spec, out)
                    continue
                if k is not None and v is not None:
                    rows.memory.kv.append(layer, k[:, here], v[:, here])
                chosen = choose(self.setting, rows, layer, q[:, here], rows.scheduled.stop, spec)
                if not together.takes(q, chosen):
                    out[:, here] = finish(self.setting, chosen, spec, read(self.setting, chosen))
            except Exception as error:  # one request's failure must not take the others down
                rows.failed(layer, error)
        together.run(q, spec, out)
        for part, places in hosted:
            part.attend(layer, spec)
            out[:, places] = part.take()
        return out

    def is_hosted(self, rows: RequestRows) -> bool:
        return any(one is rows for part in self.hosted for one in part.requests)

    def _places(self, layer: int, some: Sequence[RequestRows]) -> slice | list[int]:
        """Where the decode rows ``some`` stand among those of ``layer``."""
        places = [rows.first for rows in some]
        if self.frozen is not None:
            left = (~self.frozen.skip(layer)).cumsum(0) - 1  # frozen rows are left out
            places = left[places].tolist()
        first, last = places[0], places[-1] + 1
        return slice(first, last) if last - first == len(places) else places  # a slice copies nothing

    def _settle_resolved(self, layer: int, q: Tensor, spec: LayerAttention) -> None:
        """Have rows served as any others where the kernels do not read these tensors."""
        if layer == 0 and self.resolved:
            self.resolved = {number: one for number, one in self.resolved.items() if one.serves(q, spec)}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        start = 0
        for rows in self.rows:
            skipped, freeze = self._skipped(rows, layer), rows.scheduled.policy.freeze
            if skipped is None:
                continue
            copies = freeze is not None and freeze.copies
            here = slice(start, start + (0 if copies else int(skipped.sum())))
            start = here.stop
            if rows.result.error is not None:
                continue
            try:
                self._keep(rows, layer, skipped, copies, k[:, here], v[:, here])
            except Exception as error:
                rows.failed(layer, error)

    def _keep(self, rows: RequestRows, layer: int, skipped: Tensor, copies: bool, k: Tensor, v: Tensor) -> None:
        """Keep what the rows ``skipped`` (bool [rows]) leave at ``layer``: ``k``, ``v``, or the layer before's."""
        scheduled, kv = rows.scheduled, rows.memory.kv
        count = int(skipped.sum())
        if copies and self.setting.spec.stores(layer):
            before, here = kv.view(layer - 1), skipped.to(k.device)
            first, last = scheduled.start, scheduled.stop
            k, v = before.keys(first, last)[:, here], before.values(first, last)[:, here]
        if not self.setting.spec.stores(layer):
            pass  # what it reads is there
        elif count < scheduled.length:
            self.held[scheduled.request_id] = k, v
        else:
            kv.append(layer, k, v)
        positions = skipped.nonzero()[:, 0] + scheduled.start
        frozen = positions[frozen_at(scheduled, positions, layer, self.setting.spec.layers)]
        rows.result.skips.append(
            SkipCount(layer, frozen.numel(), int((frozen + 1).sum()), unread=count - frozen.numel())
        )

    def _skipped(self, rows: RequestRows, layer: int) -> Tensor | None:
        """bool [rows of the request]: which rows skip ``layer``; None where none does."""
        if self.frozen is None:
            return None
        skipped = self.frozen.skip(layer)[rows.first : rows.first + rows.scheduled.length]
        return skipped if bool(skipped.any()) else None

    def _attend(
        self,
        rows: RequestRows,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: LayerAttention,
        skipped: Tensor | None,
        place: int = 0,
    ) -> Tensor | None:
        """Store and attend for the rows of one request; q, k, v leave out those that are ``skipped`` (bool [rows]).
        None where the request has failed. ``place``: of the first among the layer's rows."""
        scheduled, kv, before = rows.scheduled, rows.memory.kv, tier_counts(rows)
        if rows.result.error is not None:
            return None
        parts, spans, done = [], [(0, scheduled.length)], 0
        try:
            if skipped is not None:
                spans = list(runs(~skipped))
            if k is not None and v is not None:
                if skipped is not None:
                    k, v = interleaved(skipped, self.held.pop(scheduled.request_id), k, v)
                kv.append(layer, k, v)
            few: list[tuple[int, int]] = []
            for first, end in spans:
                most = max(1, LISTED // (len(q) * (scheduled.start + end))) if rows.method.row_by_row else end - first
                few += [(at, min(at + most, end)) for at in range(first, end, most)]
            if expands(self.setting, rows, spec, q.shape[1]):
                return attend_expanded(self.setting, rows, layer, q, few, place, spec)
            for first, end in few:
                asking, stop = q[:, done : done + end - first], scheduled.start + end
                chosen = choose(self.setting, rows, layer, asking, stop, spec)
                parts.append(finish(self.setting, chosen, spec, read(self.setting, chosen)))
                done += end - first
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        except Exception as error:  # one request's failure must not take the others down
            rows.failed(layer, error)
            return None
        finally:
            if before is not None:
                count_tiers(rows, before)


def _of(rows: slice | list[int], k: Tensor | None, v: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Some rows of keys and values [kv_heads, rows, head_dim], where a layer has any."""
    return (None, None) if k is None or v is None else (k[:, rows], v[:, rows])


def batches(rows: RequestRows, q: Tensor) -> bool:
    """Whether rows may be attended with those of other requests that verify as many."""
    return rows.together and q.is_cuda
