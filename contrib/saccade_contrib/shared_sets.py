"""HShare's state: the sets of keys that units and layers share, kept for single rows or in words of a recorded step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.methods.device_state import Opening
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.labels import Labels
from saccade.methods.labels.recorded import RecordedLabels
from saccade.methods.state import MethodState
from saccade.ops.row_words import KeyWords


@dataclass(eq=False)
class Shared(MethodState):
    """State of one layer. ``donor``: for each unit of the layer the one whose set it takes. ``layer_donor``: the layer
    whose sets this one takes, or None. ``sets`` int32 [units, heavy], rising, made when the middle ended before
    ``since``.
    ``critical`` int64 [units, rows, heavy], sorted: the keys of most weight of the prompt's last rows, until the
    layers' donors are settled."""

    replaced: ClassVar[frozenset[str]] = frozenset({"critical", "sets"})

    labels: Labels | None
    donor: list[int]
    critical: Tensor | None = None
    layer_donor: int | None = None
    sets: Tensor | None = None
    since: int = 0

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        units = len(self.donor)
        fitting.require(units in sizes.units, f"has {units} donors, not {sizes.units}")
        fitting.within("donor", self.donor, 0, units - 1)
        fitting.within("since", self.since, 0, sizes.length)
        if self.layer_donor is not None:
            fitting.within("layer_donor", self.layer_donor, 0, sizes.layers - 1)
        if self.critical is not None:
            fitting.tensor("critical", self.critical, torch.int64, units, None, None)
            fitting.within("critical", self.critical, 0, sizes.length - 1)
        if self.sets is not None:
            fitting.within("sets", fitting.tensor("sets", self.sets, torch.int32, units, None), 0, sizes.length - 1)


class RecordedSets(RecordedLabels):
    """Of ``Shared`` states: sets of ``heavy`` keys at addresses that stay, which layers that take them know too.
    ``sinks``, ``local`` and ``every`` are the method's."""

    def __init__(self, opening: Opening, heavy: int, sinks: int, local: int, every: int) -> None:
        super().__init__(opening, [state.labels for state in opening.states])
        self._heavy, self._sinks, self._local, self._every = heavy, sinks, local, every
        device = opening.device
        self._sets, self._since, self._donors = [], [], []
        for state in self.states:
            sets, since = _opened(state, heavy, device)
            self._sets.append(sets)
            self._since.append(since)
            self._donors.append(torch.tensor(state.donor, dtype=torch.int32, device="cpu").to(device))
        places = opening.places()
        self._others: list[tuple[Tensor, Tensor] | None] = []  # by layer, what it may take
        for state in self.states:
            donor = state.layer_donor
            if donor is None:
                self._others.append(None)
            elif donor in places:
                self._others.append((self._sets[places[donor]], self._since[places[donor]]))
            else:  # its own window rules there now: it retrieves no more
                self._others.append(_opened(opening.every[donor], heavy, device))

    def words(self, layer: int) -> KeyWords:
        other = self._others[layer]
        return (
            super()
            .words(layer)
            ._replace(
                k=self._heavy,
                sinks=self._sinks,
                local=self._local,
                every=self._every,
                sets=self._sets[layer].data_ptr(),
                since=self._since[layer].data_ptr(),
                other_sets=0 if other is None else other[0].data_ptr(),
                other_since=0 if other is None else other[1].data_ptr(),
                donors=self._donors[layer].data_ptr(),
            )
        )

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        for state, sets, since in zip(super().settle(length), self._sets, self._since):
            ended = int(since)
            state.sets, state.since = (sets, ended) if ended > 0 else (None, 0)
        return self.states


def _opened(state: Shared, heavy: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A layer's sets and since when they are, at addresses that stay; 0 where it has none."""
    sets = torch.zeros(len(state.donor), heavy, dtype=torch.int32, device=device)
    if state.sets is not None:
        sets.copy_(state.sets)
    since = 0 if state.sets is None else state.since
    return sets, torch.full((1,), since, dtype=torch.int64, device=device)
