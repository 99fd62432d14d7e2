"""Audits of recorded steps: kernels launched behind the step hold what its recording left in the tap against true
attention, while the host settles the step and prepares the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saccade.engine.device.graphs import StepKind
from saccade.engine.device.replays import Compared
from saccade.engine.device.rows import RowBuffers
from saccade.engine.device.tap import Tap
from saccade.engine.device.watch import PlacedRow
from saccade.engine.watch.audit import Place, RowAudit
from saccade.ops.row_words import AuditPlace
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.truth import Given, compare

Placed = Sequence[PlacedRow | None]


class StepAudits:
    """The audits (``audits``, by request) of one step of ``placed`` rows, that has been launched as ``kind``. ``tap``:
    what it leaves, None where nothing can be audited; ``buffers``: those of its rows. ``dense``: the logits of its
    dense replay, if it has one, of the requests ``replays``."""

    def __init__(
        self,
        placed: Placed,
        audits: Mapping[int, RowAudit],
        tap: Tap | None,
        buffers: RowBuffers,
        kind: StepKind,
        replays: frozenset[int] = frozenset(),
        dense: Tensor | None = None,
    ) -> None:
        self._tap, self._buffers, self._longest, self._kind, self._dense = tap, buffers, kind.longest, kind, dense
        held = [(number, row) for number, row in enumerate(placed) if row is not None]
        self._replays = [(number, row) for number, row in held if row.scheduled.request_id in replays]
        self._compared: Compared | None = None
        rows = [(number, row, audits.get(row.scheduled.request_id)) for number, row in held]
        self._rows = [(number, row, audit) for number, row, audit in rows if audit is not None]
        self._found: list[tuple[Tensor, list[tuple[RowAudit, list[Place]]]]] = []
        self._failed: str | None = None

    @property
    def _kv_heads(self) -> int:
        return next(row.kv.pool for _, row, _ in self._rows).format.kv_heads

    @property
    def launches(self) -> bool:
        """Whether :meth:`launch` does all of it: another step may then be launched behind it."""
        return self._tap is None or not self._rows or all(spec.sinks is None for spec in self._tap.specs.values())

    @torch.inference_mode()
    def launch(self) -> None:
        """Compute what was drawn. It fails no step: :meth:`settle` says what was left out."""
        if self._dense is not None and self._replays:
            self._compared = Compared(self._replays, self._kind.logits, self._dense)
        if self._tap is None:
            return
        asked: dict[tuple[float, float | None], list[tuple[AuditPlace, Place, RowAudit]]] = {}
        for number, _, audit in self._rows:
            for layer in audit.drawn:
                spec = self._tap.specs[layer]
                for named, head in audit.own(layer, self._kv_heads) if spec.sinks is None else ():
                    same = asked.setdefault((spec.scale, spec.softcap), [])
                    same.append((AuditPlace(layer, number, head, spec.window or 0), (layer, named), audit))
        try:
            for (scale, softcap), listed in asked.items():
                found = self._compare(self._tap, self._buffers, [place for place, _, _ in listed], scale, softcap)
                parts: dict[int, tuple[RowAudit, list[Place]]] = {}
                for _, known, audit in listed:
                    parts.setdefault(id(audit), (audit, []))[1].append(known)
                self._found.append((found, list(parts.values())))
        except Exception as error:
            self._failed = f"audit: a step's samples were left out: {type(error).__name__}: {error}"

    def _compare(
        self, tap: Tap, buffers: RowBuffers, listed: list[AuditPlace], scale: float, softcap: float | None
    ) -> Tensor:
        pool = next(row.kv.pool for _, row, _ in self._rows)
        paged, tables = pool.storage, buffers.tables
        if pool.shares_layers:
            tables = torch.stack([tables[one] for one in pool.reads])
        places = torch.tensor(listed, dtype=torch.int32, device="cpu")
        taps = tap.addresses()
        if taps.is_cuda:  # from other memory a copy would wait for the step
            places = places.pin_memory()
        pages = Pages(paged.k, paged.v, tables, buffers.lengths, self._longest)
        given = Given(taps, tap.dtype, tap.heads)
        return compare(places.to(taps.device, non_blocking=True), given, pages, scale=scale, softcap=softcap)

    @torch.inference_mode()
    def settle(self) -> None:
        """The step holds: count what was found, and the layers with sinks, which torch computes."""
        if self._compared is not None:
            self._compared.settle()
        for found, parts in self._found:
            for (audit, places), own in zip(parts, found.split([len(places) for _, places in parts])):
                audit.audit.found(own, audit.whole, places)
        for number, row, audit in self._rows:
            if row.result.error is not None:
                continue
            if self._tap is None:
                row.result.note("audit: steps whose keys may lie in host memory were left out")
                continue
            if self._failed is not None:
                audit.audit.left_out += sum(len(audit.own(layer, self._kv_heads)) for layer in audit.drawn)
                row.result.note(self._failed)
                continue
            for layer in audit.drawn:
                spec = self._tap.specs[layer]
                if spec.sinks is not None:
                    kv = row.kv.view(layer).upto(row.scheduled.stop)
                    q, out, lse = self._tap.row(layer, number)
                    row.result.note_of(audit.take(layer, q, out, lse, kv, spec))
