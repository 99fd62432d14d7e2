"""Decode over keys in two places: the query goes to the host, attends to the keys that lie there, and the result comes
back and meets what the device holds (LFPS on a GPU: sinks and window there, everything else in host memory)."""

from __future__ import annotations

from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops.attend import attend, run
from saccade.ops.call import Call, Result
from saccade.ops.down import Down
from saccade.ops.merge import merge_state
from saccade.selection import Selection


def attend_hybrid(
    q: Tensor,
    near: KVView,
    far: KVView,
    near_selection: Selection,
    far_selection: Selection,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    threads: int | None = None,
) -> Result:
    """``q`` [heads, 1, head_dim] over the keys of ``near_selection`` in ``near``, on q's device, and those of
    ``far_selection`` in ``far``, on the host: ``out`` and ``lse`` of one attention over both; all else that the result
    holds is of the part on the host.

    The views are of one sequence, with its positions; pages that a view's selection does not name need not hold
    anything. The selections must have no key in common. Only the query, its result and its log-sum-exp travel:
    head_dim + 1 numbers a head each way; the device works on its part meanwhile. Raises SaccadeError where ``far`` does
    not lie on the host.
    """
    if far.device.type != "cpu":
        raise SaccadeError(f"the far keys lie on {far.device}, not in host memory; use ops.attend for both")
    query = Down(q)
    out, lse = attend(q, near, near_selection, scale=scale, softcap=softcap)
    sent = query.wait()
    there = run(Call.of(sent, far, far_selection.to(sent.device), scale=scale, softcap=softcap, threads=threads))
    out, lse = merge_state(out, lse, there.out.to(q.device), there.lse.to(q.device))
    return there._replace(out=out, lse=lse)
