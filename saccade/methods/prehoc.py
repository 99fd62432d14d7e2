"""PSAW and ETF, the two parts of PrHS that narrow deep layers before any score is known (docs/algorithms.md 5.4, 5.5).

Both leave the first l_s layers alone and then take more with depth: at layer l = 1 .. N the share
``1 - base^(exponent (l - l_s) / (N - l_s))`` of the context, l_s = floor(3N / 4). PSAW hides that share of each row's
past, in prefill and decode; ETF freezes that share of a prompt's tokens in prefill. Both spare the first ``sinks``
tokens and depend on nothing but positions and lengths. Where the paper is silent or cannot be run as printed:

* layers count from 1, so that the last layer reaches ``base^exponent``;
* ``start_layer`` is l_s; without one, a model of fewer than 4 layers (l_s = 0 prunes its first layer) is left alone,
  and PSAW may begin deeper: where a model's measured locality allows it (``saccade calibrate locality``);
* PSAW's windows lie on a grid of ``block_size`` positions, rounded outwards, which kernels need: at most two blocks
  more than printed. ``block_size=1`` is the paper. The last ``local`` keys are never hidden; ``local=0`` is the paper;
* ETF's length is the whole context when its prefill ends: a later turn freezes only rows of its own. The last row is
  never frozen. A frozen row of a chunk still gives each layer a key and a value (``reuse``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from saccade.methods.base import FreezeMethod, WindowMethod
from saccade.methods.options import require, require_choice, require_number, require_whole
from saccade.selection import Cone

LEAST_LAYERS = 4
LOCALITY = "locality"  # the calibration that says how far each layer of a model looks
SINKS = 16  # first keys that it leaves out
HIDDEN = tuple(share / 20 for share in range(1, 20))  # shares of the context that it knows the weight of
# Mean weight that a measured window may hide in a layer: SmolLM2's hide up to 0.112 at no cost, Qwen2.5-Coder-0.5B's up
# to 0.171 at some (docs/real-models.md).
MOST_HIDDEN = 0.12
PAPER = "PrHS, pre-hoc sparsity (PSAW and ETF with CIS)"


def depth_share(base: float, exponent: float, layer: int, layers: int, start_layer: int | None) -> float:
    """``1 - base^(exponent (l - l_s) / (N - l_s))`` at ``layer`` = l - 1 of N = ``layers``; 0 up to l_s."""
    if start_layer is None and layers < LEAST_LAYERS:
        return 0.0
    start = 3 * layers // 4 if start_layer is None else start_layer
    if layer + 1 <= start:
        return 0.0
    return 1.0 - base ** (exponent * (layer + 1 - start) / (layers - start))


def _check_depth(name: str, base: float, exponent_name: str, exponent: float, start_layer: int | None) -> None:
    require_number(name, base, 0.0, 1.0)
    require(base > 0, name, base, "a number above 0 and at most 1")
    require_number(exponent_name, exponent, 0.0, 1000.0)
    if start_layer is not None:
        require_whole("start_layer", start_layer, 1)


@dataclass(frozen=True)
class PSAW(WindowMethod):
    """Progressive sliding attention window: a row at position t - 1 of layer l > l_s does not see the positions i with
    ``sinks <= i`` and ``i + 1 < floor((1 - phi^(alpha (l - l_s) / (N - l_s))) t)``. ``alpha=0`` or ``phi=1`` hides
    nothing."""

    name: ClassVar[str] = "psaw"
    paper: ClassVar[str] = PAPER

    phi: float = 0.7
    alpha: float = 1.0
    start_layer: int | None = None
    sinks: int = 16
    local: int = 64
    block_size: int = 128

    def __post_init__(self) -> None:
        _check_depth("phi", self.phi, "alpha", self.alpha, self.start_layer)
        require_whole("sinks", self.sinks, 0)
        require_whole("local", self.local, 0)
        require_choice("block_size", self.block_size, (1, 16, 32, 64, 128))

    def at(self, layer: int, layers: int) -> Cone | None:
        share = depth_share(self.phi, self.alpha, layer, layers, self.start_layer)
        return Cone(share, self.sinks, self.local, self.block_size) if share > 0 else None

    @property
    def calibration(self) -> str | None:
        return LOCALITY if self.start_layer is None else None

    def calibrated(self, layers: Sequence[Mapping[str, Tensor] | None] | None) -> tuple[PSAW, str]:
        if layers is None:
            return self, (
                f"'{self.name}' hides keys from the deepest quarter of the layers, however far these look: the "
                f"locality of this model is not measured; saccade calibrate {LOCALITY} does"
            )
        found = self.measured([None if one is None else one[LOCALITY] for one in layers])
        where = f"from layer {found.start_layer} on" if found.acts(len(layers)) else "in no layer"
        return found, f"'{self.name}' hides keys {where}, by this model's measured locality"

    def measured(self, far: Sequence[Tensor | None]) -> PSAW:
        """With the first layer, from l_s on, from which every deeper one has at most ``MOST_HIDDEN`` of its weight
        where the deepest window would hide it; past the last layer where even that one has more. ``far``: each layer's
        :class:`~saccade.methods.offline.Locality`, fp32 [heads, shares], None where the model's own window decides."""
        layers = len(far)
        share = depth_share(self.phi, self.alpha, layers - 1, layers, self.start_layer)
        at = next((at for at, known in enumerate(HIDDEN) if known >= share), len(HIDDEN) - 1)
        begin = layers
        while begin > 3 * layers // 4 and ((one := far[begin - 1]) is None or float(one[:, at].mean()) <= MOST_HIDDEN):
            begin -= 1
        return replace(self, start_layer=begin)


@dataclass(frozen=True)
class ETF(FreezeMethod):
    """Early token freezing: in the prefill of a context of L tokens, the positions ``sinks <= i < E_l`` with
    ``E_l = floor((1 - psi^(gamma (l - l_s) / (N - l_s))) L)`` skip attention and MLP of layer l > l_s. ``gamma=0`` or
    ``psi=1`` freezes nothing."""

    name: ClassVar[str] = "etf"
    paper: ClassVar[str] = PAPER

    psi: float = 0.5
    gamma: float = 1.0
    start_layer: int | None = None
    sinks: int = 16
    reuse: str = "hidden"

    def __post_init__(self) -> None:
        _check_depth("psi", self.psi, "gamma", self.gamma, self.start_layer)
        require_whole("sinks", self.sinks, 0)
        require_choice("reuse", self.reuse, ("hidden", "kv"))

    def acts(self, layers: int) -> bool:
        return depth_share(self.psi, self.gamma, layers - 1, layers, self.start_layer) > 0

    @property
    def copies(self) -> bool:
        return self.reuse == "kv"

    def ends(self, length: int, layers: int) -> list[int]:
        """E_l of every layer for a context of ``length`` tokens; never falls."""
        shares = [depth_share(self.psi, self.gamma, layer, layers, self.start_layer) for layer in range(layers)]
        return [min(int(share * length + 1e-9), length - 1) for share in shares]  # 0.1 of 10 tokens is 1 token

    def first_frozen(self, positions: Tensor, length: int, layers: int) -> Tensor:
        ends = torch.tensor(self.ends(length, layers), device=positions.device)
        first = torch.searchsorted(ends, positions, right=True)
        return torch.where(positions < self.sinks, layers, first)
