"""The C++ kernels of a Llama-shaped decoder layer on a few rows: all of it but attention, each weight read once for all
rows. torch's bfloat16 product of one row reads weights at a fraction of the memory's speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from saccade.ops import cpu
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.layer_weights import LayerWeights, Norm
from saccade.ops.layout import written
from saccade.ops.matrices import Matrix, on_host

MOST_ROWS = {torch.float32: 16, torch.bfloat16: 64}  # from more rows on torch's matrix products are faster


def serves(weights: LayerWeights) -> bool:
    """Whether the kernels read a layer's weights as they lie: norms of one type, and matrices in formats that they
    multiply by (``Matrix.native``), on the CPU."""
    dtype = weights.norm.weight.dtype
    norms = all(on_host(dtype, norm, norm) for norm in weights.norms)
    return norms and all(part.native(dtype) is not None for part in weights.matrices)


def serves_head(norm: Norm, matrix: Matrix) -> bool:
    """:func:`serves`, for the final norm and the head."""
    return on_host(norm.weight.dtype, norm.weight, None) and matrix.native(norm.weight.dtype) is not None


class RowLayer:
    """One layer's operations, for weights that :func:`serves` allows and whose shapes fit."""

    def __init__(self, weights: LayerWeights) -> None:
        self._kept = weights  # the kernels hold addresses
        self.heads, self.kv_heads = (part.outputs // weights.head_dim for part in (weights.query, weights.key))
        self.head_dim, self.dtype, self.rotated = weights.head_dim, weights.norm.weight.dtype, weights.rotated
        norms = weights.head_norms
        self.native = native.LayerWeights(
            storage=STORAGE[self.dtype],
            channels=weights.norm.weight.numel(),
            head_dim=self.head_dim,
            norm=address(weights.norm.weight),
            epsilon=weights.norm.epsilon,
            query_norm=0 if norms is None else address(norms.query),
            key_norm=0 if norms is None else address(norms.key),
            head_epsilon=0.0 if norms is None else norms.epsilon,
            second_norm=address(weights.second_norm.weight),
            second_epsilon=weights.second_norm.epsilon,
            query=weights.query.native(self.dtype),
            key=weights.key.native(self.dtype),
            value=weights.value.native(self.dtype),
            output=weights.output.native(self.dtype),
            gate=weights.gate.native(self.dtype),
            up=weights.up.native(self.dtype),
            down=weights.down.native(self.dtype),
        )

    def project(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``hidden`` [rows, channels]: [heads or kv_heads, rows, head_dim], rotated by
        ``cos``, ``sin`` [rows, head_dim] where the layer rotates. All contiguous, of the weights' dtype. ``delta`` is
        added to ``hidden`` first, in place."""
        if delta is not None:
            hidden.add_(delta)
        rows, hidden = hidden.shape[0], hidden.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        q = torch.empty(rows, self.heads, self.head_dim, dtype=self.dtype)
        k = torch.empty(rows, self.kv_heads, self.head_dim, dtype=self.dtype)
        v = torch.empty(rows, self.kv_heads, self.head_dim, dtype=self.dtype)
        given = native.LayerInput(
            rows=rows,
            hidden=address(hidden),
            cos=cos.data_ptr() if self.rotated else 0,
            sin=sin.data_ptr() if self.rotated else 0,
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
        )
        cpu.kernels().project_rows(torch.get_num_threads(), self.native, given)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def finish(self, hidden: Tensor, attended: Tensor) -> None:
        """Add to ``hidden`` [rows, channels], in place, the output projection of ``attended`` [heads, rows, head_dim]
        and then what the MLP makes of that."""
        rows = written("hidden", hidden, self.dtype).shape[0]
        attended = attended.transpose(0, 1).contiguous()
        update = native.LayerUpdate(rows=rows, hidden=address(hidden), attended=attended.data_ptr())
        cpu.kernels().finish_rows(torch.get_num_threads(), self.native, update)


class WholeLayers(Protocol):
    """All layers of a model in one call, for rows whose attention the kernels know in advance
    (cpu_plans.PlannedRows.run_layers)."""

    def queries(self, rows: int) -> Tensor:
        """Room for a layer's queries of ``rows`` rows: [heads, rows, head_dim], rows before heads in memory."""
        ...

    def run(
        self,
        step: Any,
        pool: Any,
        hidden: Tensor,
        q: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        lse: Tensor,
        attending: int,
        watched: bool,
    ) -> tuple[float, float]:
        """Take ``hidden`` [rows, channels] through the layers, in place. ``step`` and ``pool``: the kernels' DecodeStep
        and Pool; ``q`` of :meth:`queries`; layer i's factors ``rotary[i]`` [rows, n]; ``lse`` [rows, heads] is written;
        ``attending``: threads of attention. If ``watched``, returns which shares of the time went to attention, and to
        choosing and learning, else 0."""
        ...


class RowLayers:
    """All layers of a model, for rows whose attention the kernels know in advance (cpu_plans.PlannedRows.run_layers):
    what each by itself would make of them, in one call."""

    def __init__(self, layers: Sequence[RowLayer], asked: Sequence[tuple[float, float | None]]) -> None:
        """``asked[i]``: scale and cap of the logits of layer i's attention."""
        self.layers = layers  # the kernels hold addresses of their weights
        self.native = native.DecoderLayers([layer.native for layer in layers])
        self._kinds = [(layer.rotated, *one) for layer, one in zip(layers, asked, strict=True)]
        self._turned: list[dict[str, Any]] = [{} for _ in layers]
        self._balances: object = None

    def turn(self, balances: Sequence[tuple[Tensor | None, Tensor | None]] | None) -> None:
        """Have queries and keys turned (row_passes.turn), layer i's by ``balances[i]``; None ends it."""
        self._balances = balances  # the kernels hold addresses
        self._turned = [
            {"turned": True, "query_balance": address(query), "key_balance": address(key)}
            for query, key in balances or ()
        ] or [{} for _ in self.layers]

    def queries(self, rows: int) -> Tensor:
        """Room for a layer's queries of ``rows`` rows: [heads, rows, head_dim], rows before heads in memory."""
        one = self.layers[0]
        return torch.empty(rows, one.heads, one.head_dim, dtype=one.dtype).transpose(0, 1)

    def run(
        self,
        step: Any,
        pool: Any,
        hidden: Tensor,
        q: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        lse: Tensor,
        attending: int,
        watched: bool,
    ) -> tuple[float, float]:
        """See :class:`WholeLayers`."""
        count, one = hidden.shape[0], self.layers[0]
        turns, kept = self.turns(rotary)
        k, v = torch.empty(2, count, one.kv_heads, one.head_dim, dtype=one.dtype)
        out = torch.empty(count, one.heads, one.head_dim, dtype=one.dtype)
        call = native.LayersCall(
            rows=count,
            hidden=address(written("hidden", hidden, one.dtype)),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            attended=out.data_ptr(),
            lse=lse.data_ptr(),
            threads=max(1, torch.get_num_threads()),
            attending=attending,
        )
        kernels: Any = cpu.kernels()
        shares: tuple[float, float] = kernels.run_layers(step, self.native, pool, call, turns, watched)
        del kept  # which the call has read
        return shares

    def turns(self, rotary: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Any], list[Tensor]]:
        """What layer i has of its own in a step, as a struct LayerTurn, whose cos and sin are ``rotary[i]`` [rows,
        head_dim], and the tensors behind it."""
        made: dict[Any, Any] = {}  # most layers have the same
        turns, kept = [], []
        for kind, pair, turned in zip(self._kinds, rotary, self._turned, strict=True):
            key = kind, id(pair), *turned.values()
            turn = made.get(key)
            if turn is None:
                rotated, scale, softcap = kind
                own = [one.contiguous() for one in pair] if rotated else []
                kept += own
                places = dict(zip(("cos", "sin"), (one.data_ptr() for one in own)))
                turn = made[key] = native.LayerTurn(**places, scale=scale, softcap=softcap or 0.0, **turned)
            turns.append(turn)
        return turns, kept


def head(hidden: Tensor, norm: Norm, matrix: Matrix) -> Tensor:
    """Logits fp32 [rows, out] of ``hidden`` [rows, channels], rounded to its dtype."""
    hidden = hidden.contiguous()
    out = torch.empty(hidden.shape[0], matrix.outputs)
    rows, channels = hidden.shape
    cpu.kernels().head_rows(
        native.HeadRows(
            threads=torch.get_num_threads(),
            storage=STORAGE[hidden.dtype],
            rows=rows,
            channels=channels,
            hidden=address(hidden),
            norm=address(norm.weight),
            epsilon=norm.epsilon,
            matrix=matrix.native(hidden.dtype),
            out=out.data_ptr(),
        )
    )
    return out
