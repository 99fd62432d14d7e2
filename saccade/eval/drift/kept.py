"""How much of true attention a run reads: its weight on the keys that were read, by layer, head and row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import selected_rows, true_rows
from saccade.selection import Dense


def kept_weight(call: AttentionCall, rows: Tensor) -> Tensor:
    """Share of the dense softmax weight that lies on the keys read: fp32 [heads, r] on the CPU, for the call's ``rows``
    (int64, sorted, numbers within the call). Sink logits carry none. What stands in for unread keys does not count."""
    shape = call.selection.shape
    if type(call.selection) is Dense:
        return torch.ones(shape.heads, rows.numel())
    chosen = rows.to(call.q.device)
    kept = torch.empty(shape.heads, rows.numel(), device=call.q.device)
    for true in true_rows(call, chosen):
        read = selected_rows(call.selection, true.heads, true.rows)
        whole = torch.logsumexp(true.scores, -1)
        some = torch.logsumexp(true.scores.masked_fill(~read, -torch.inf), -1)
        kept[true.heads, torch.searchsorted(chosen, true.rows)] = torch.exp(some - whole).clamp(max=1.0)
    return kept.cpu()


class KeptWeight:
    """An observer that measures the prefill's rows at ``positions`` (int64, absolute) and all decode rows. Layers whose
    own sliding window decides are left out: no policy acts there. Rows that are computed again count once."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = torch.unique(positions)
        self._found: dict[tuple[str, int], dict[int, Tensor]] = {}  # (phase, layer) -> first row -> [heads, rows]

    def __call__(self, call: AttentionCall) -> None:
        shape = call.selection.shape
        if call.spec.window is not None and call.spec.window < shape.k_len:
            return
        if call.phase == "decode":
            rows = torch.arange(shape.q_len)
        else:
            rows = self.positions[(self.positions >= shape.q_start) & (self.positions < shape.q_start + shape.q_len)]
            rows = rows - shape.q_start
        if rows.numel():
            self._found.setdefault((call.phase, call.layer), {})[shape.q_start] = kept_weight(call, rows)

    def of(self, phase: str) -> Kept | None:
        """What a phase kept; None where nothing was measured."""
        layers = {
            layer: torch.cat([found[start] for start in sorted(found)], 1)
            for (name, layer), found in sorted(self._found.items())
            if name == phase
        }
        return Kept(layers) if layers else None


class Kept:
    """``layers``: [heads, rows] by layer."""

    def __init__(self, layers: dict[int, Tensor]) -> None:
        self.layers = layers

    def as_dict(self) -> dict[str, Any]:
        """Plain data: the mean over layers, heads and rows, the worst head's mean over rows, the least of all, and the
        mean by layer."""
        heads = {layer: values.mean(1) for layer, values in self.layers.items()}
        worst = min(heads, key=lambda layer: float(heads[layer].min()))
        least = min(self.layers, key=lambda layer: float(self.layers[layer].min()))
        return {
            "mean": _plain(torch.stack([values.double().mean() for values in self.layers.values()]).mean()),
            "worst_head": {
                "layer": worst,
                "head": int(heads[worst].argmin()),
                "mean": _plain(heads[worst].min()),
            },
            "least": {
                "layer": least,
                "head": int(self.layers[least].min(1).values.argmin()),
                "weight": _plain(self.layers[least].min()),
            },
            "layers": {str(layer): _plain(values.mean()) for layer, values in self.layers.items()},
        }

    def below(self, bound: float) -> float:
        """The share of (head, row) pairs that kept less than ``bound``."""
        below = sum(int((values < bound).sum()) for values in self.layers.values())
        return below / sum(values.numel() for values in self.layers.values())


def _plain(value: Tensor) -> float:
    return float(f"{float(value):.6g}")
