"""What the C++ kernels know of one sequence whose method picks single keys, so that a decode step of many rows chooses,
reads and learns in one call a layer (ops/cpu_plans.py). The counterpart on a CPU of recorded steps' device states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from saccade.methods.device_state import DeviceState, Opening
from saccade.ops.cpu_readings import Listed, Readings, Reads
from saccade.ops.cpu_structs import band_keys, native
from saccade.ops.tallies import BESIDE
from saccade.selection.forms import MOST, Summarized

if TYPE_CHECKING:
    from saccade.methods.base import Method, WindowMethod


class HostState(DeviceState):
    """Base: every key is a candidate, and no layer knows anything. ``tally`` float64 [layers, heads + BESIDE]
    (ops/tallies.py) is what the step that runs adds to."""

    windows: ClassVar[bool] = False  # whether it keeps to the rows' windows
    upto: int = MOST  # longer rows are served otherwise
    summarized: Summarized | None = None  # blocks whose summaries it reads

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        heads, layers = opening.spec.heads, opening.spec.layers
        self.tally = torch.zeros(layers, heads + BESIDE, dtype=torch.float64, device="cpu")
        self.steps = 0  # since it was opened
        self._counted = torch.zeros_like(self.tally)
        self.layers: Sequence[Any] = ()
        self.lay_out()

    def lay_out(self) -> None:
        """Make ``layers``, a ListedLayer each, of what is known."""
        self.layers = [
            native.ListedLayer(tally=row.data_ptr(), **self.known(layer)) for layer, row in enumerate(self.tally)
        ]

    def known(self, layer: int) -> dict[str, Any]:
        """The fields of a ListedLayer beside its tally."""
        return {}

    def reads(self, length: int, window: WindowMethod | None = None) -> Reads | None:
        """What a row that sees ``length`` keys reads in every layer; None where that is everything. ``window``: its
        policy's, for those that serve ``windows``."""
        keys = self.keys(length)
        return None if keys is None else Listed(keys, self.layers, self.steps)

    def asked(self, length: int) -> torch.Tensor | None:
        """Where the queries of a row that sees ``length`` keys are to be put, [layers, heads, head_dim]; None where
        nothing is learnt from them."""
        return None

    def keys(self, length: int) -> Any | None:
        """A ListedKeys, what a row that sees ``length`` keys reads in every layer; None where that is everything."""
        raise NotImplementedError

    def done(self, length: int) -> None:
        """A step has ended well, and ``length`` tokens are stored."""
        self.length, self.steps = length, self.steps + 1
        self._counted += self.tally
        self.tally.zero_()

    def take(self) -> torch.Tensor:
        """What was counted since the last time, laid out as ``tally``."""
        taken, self._counted = self._counted, torch.zeros_like(self._counted)
        return taken


class WholeRows(HostState):
    """Of any ``method`` whose rows of at most ``upto`` keys read everything (Method.whole_upto). The queries that it
    learns from, the last ones, are kept meanwhile, and taken in once the states are asked for."""

    windows = True

    def __init__(self, opening: Opening, method: Method, upto: int) -> None:
        super().__init__(opening)
        self._method, self.upto, self._first = method, upto, self.length
        spec, count = opening.spec, method.recalled
        self._places = opening.layers
        layers = spec.layers if opening.layers is None else len(opening.every)  # kernels note those of all
        # As the queries are, whatever rows of keys are stored as: kernels write them here.
        dtype = opening.kv.pool.format.dtype
        self._asked = torch.empty(layers, count, spec.heads, spec.head_dim, dtype=dtype, device="cpu")

    def lay_out(self) -> None:
        """Kernels need to know nothing."""

    def reads(self, length: int, window: WindowMethod | None = None) -> None:
        """Everything."""

    def asked(self, length: int) -> torch.Tensor | None:
        count = self._asked.shape[1]
        return self._asked[:, (length - 1) % count] if count else None

    def done(self, length: int) -> None:
        self.length = length  # which says all that there is to count

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        count = self._asked.shape[1]
        places = [position % count for position in range(max(self._first, length - count), length)] if count else []
        if places:
            asked = self._asked if self._places is None else self._asked[list(self._places)]
            rows = asked[:, places].transpose(1, 2)
            for state, own in zip(self.states, rows):
                self._method.recall(state, own, length)
        return self.states


class ActingRows(HostState):
    """Of a sequence in whose other layers a window of their own rules, which these read: what ``own`` knows of the
    layers ``acting``, of which alone it was opened."""

    def __init__(self, opening: Opening, acting: tuple[int, ...], own: HostState) -> None:
        self._own, self._acting, self._windows = own, list(acting), opening.spec.windows
        super().__init__(opening)
        self.room, self.upto = own.room, own.upto

    def lay_out(self) -> None:
        """Its own state has."""

    def reads(self, length: int, window: WindowMethod | None = None) -> Reads | None:
        reads = self._own.reads(length, window)
        self.summarized = self._own.summarized
        if reads is None:
            return None
        assert not isinstance(reads, Readings)
        layers: list[Any] = [None if size is None else band_keys(size, 0) for size in self._windows]
        for layer, one in zip(self._acting, reads.layers):
            layers[layer] = one
        return reads._replace(layers=layers)

    def asked(self, length: int) -> torch.Tensor | None:
        return self._own.asked(length)

    def grow(self, length: int) -> None:
        self._own.grow(length)
        self.room = self._own.room

    def reads_all(self, length: int) -> bool:
        return self._own.reads_all(length)

    def notes(self, length: int) -> Sequence[str]:
        return self._own.notes(length)

    def done(self, length: int) -> None:
        self.length = length
        self._own.done(length)

    def take(self) -> torch.Tensor:
        taken = torch.zeros_like(self._counted)
        taken[self._acting] = self._own.take()
        return taken

    def settle(self, length: int) -> list[Any]:
        for layer, state in zip(self._acting, self._own.settle(length)):
            self.states[layer] = state
        return self.states
