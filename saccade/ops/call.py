"""One attention call as every backend takes it, and what a backend returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.selection import Candidates, Dense, Ranking, Selection, Shape

KVLike = KVView | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """``q`` [heads, q_len, head_dim] over the keys of ``kv`` that ``selection`` names.

    ``scale`` multiplies the logits, ``softcap`` bends them (None: no cap), ``threads`` is for CPU kernels (None: as
    many as torch uses). ``want_weights`` asks for the softmax weights over what was read, of calls of one row.
    """

    q: Tensor
    kv: KVView
    selection: Selection
    scale: float
    softcap: float | None = None
    threads: int | None = None
    want_weights: bool = False

    @classmethod
    def of(
        cls,
        q: Tensor,
        kv: KVLike | Sequence[KVView],
        selection: Selection | Sequence[Selection] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        threads: int | None = None,
        want_weights: bool = False,
    ) -> Call:
        """With defaults filled in: ``kv`` may be a pair of tensors [kv_heads, k_len, head_dim]; ``selection=None`` is
        dense causal attention with the rows at the end of the keys; ``scale`` is 1 / sqrt(head_dim)."""
        if q.dim() != 3:
            raise SaccadeError(f"q must be [heads, q_len, head_dim] or [batch, ...], got shape {tuple(q.shape)}")
        view = kv if isinstance(kv, KVView) else KVView.from_tensors(*pair(kv))
        if selection is None:
            selection = Dense(Shape.suffix(q.shape[0], view.kv_heads, q.shape[1], view.length, q.device))
        if not isinstance(selection, Selection):
            raise SaccadeError("one sequence takes one selection, got a list")
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        return cls(q, view, selection, scale, softcap, threads, want_weights)

    def check(self) -> None:
        """Raise SaccadeError where query, keys and selection do not fit each other, or for a scale or cap that is out
        of range. Lists of indices are trusted: ``Selection.check`` looks at them."""
        q, view, selection = self.q, self.kv, self.selection
        shape = selection.shape
        expected = (shape.heads, shape.q_len, view.head_dim)
        if q.shape != expected or shape.kv_heads != view.kv_heads or shape.k_len != view.length:
            raise SaccadeError(
                f"q {tuple(q.shape)} and kv [{view.kv_heads}, {view.length}, {view.head_dim}] do not fit a selection "
                f"of {shape.heads} heads, {shape.kv_heads} KV heads, {shape.q_len} rows and {shape.k_len} keys"
            )
        if shape.heads % selection.units:
            raise SaccadeError(f"{selection.units} units of a selection cannot serve {shape.heads} query heads alike")
        if shape.q_len > 1 and isinstance(selection, (Ranking, Candidates)):
            raise SaccadeError(f"{type(selection).__name__} serves one query row, got q_len={shape.q_len}")
        if not math.isfinite(self.scale):
            raise SaccadeError(f"scale={self.scale} must be a finite number; leave it None for 1 / sqrt(head_dim)")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise SaccadeError(f"softcap={self.softcap} must be above 0 and finite; leave it None for no cap")


class Result(NamedTuple):
    """``out`` like q, ``lse`` float32 [heads, q_len]: the log-sum-exp of the logits that were read.

    ``backend`` ran. ``used`` is what was really read: a Ranking ends as Blocks, Candidates end as Tokens. ``weights``:
    the softmax weights over it, if the call wanted them (see ``ops.weights.selected_weights``). ``coverage`` float32
    [units]: of a Ranking the rule's estimate of each unit's coverage when it stopped.
    """

    out: Tensor
    lse: Tensor
    used: Selection
    backend: str
    weights: Tensor | None = None
    coverage: Tensor | None = None


class Backend(Protocol):
    """One way to run a call."""

    name: str

    def serves(self, call: Call) -> str | None:
        """Why it cannot run ``call``; None where it can."""

    def kernel(self, call: Call) -> Callable[[Call], Result]:
        """What runs ``call``, which it serves. ``Candidates.rest`` is left to :func:`saccade.ops.run`, and so are
        weights that the kernel does not have."""


def pair(kv: object) -> tuple[Tensor, Tensor]:
    """``kv`` as (k, v); SaccadeError for anything else."""
    if isinstance(kv, tuple) and len(kv) == 2 and all(isinstance(part, Tensor) for part in kv):
        return kv[0], kv[1]
    raise SaccadeError(f"kv must be a KVView or a pair of tensors (k, v), got {type(kv).__name__}")
