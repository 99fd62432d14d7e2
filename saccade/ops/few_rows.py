"""Dense attention of a few last rows of one sequence, or within a window, reading its keys once for all of them.

On a CPU a chunk of few rows makes few tasks, one for each KV head. Here its keys are cut into parts, as decode kernels
cut them (flash decoding), each a task of its own, and the parts meet by their log-sum-exp (``csrc/few_rows.h``).
"""

from __future__ import annotations

from saccade.ops import cpu
from saccade.ops.attend import run as run_call
from saccade.ops.call import Call, Result
from saccade.selection import Band, Dense

LEAST_KEYS = 512  # before the first row: with fewer, a chunk's tasks are as fast


def run(call: Call, backend: str = "auto") -> Result:
    """``ops.run`` of a call, in parts where it is Dense or a Band and has 2 or more rows at the end of many keys that
    they see, on a CPU. The same result but for rounding."""
    selection = call.selection
    shape = selection.shape
    rows, before = shape.q_len, shape.q_start
    seen = min(before, selection.window + selection.sinks) if isinstance(selection, Band) else before
    if not isinstance(selection, Dense | Band) or rows < 2 or seen < LEAST_KEYS or before + rows != shape.k_len:
        return run_call(call, backend)
    if backend not in ("auto", "cpu") or cpu.serves(call.q, call.kv, selection) is not None:
        return run_call(call, backend)
    out, lse = cpu.attend_few(call.q, call.kv, selection, scale=call.scale, softcap=call.softcap, threads=call.threads)
    return Result(out, lse, selection, f"cpu/{cpu.isa()}")
