"""Of the kernels of layers that keep a state, and of norms of modules: what compiled_kernels.py compiles."""

from __future__ import annotations

from typing import Any

from saccade.ops import norming
from saccade.ops.triton import causal_conv, delta_chunks, delta_rule, norms, state_space

_SLOTS = {"memory": "*fp32", "reads": "*i64", "writes": "*i64"}
_ROWS = dict.fromkeys(("q", "k", "v", "beta", "solved", "weights", "out", "x", "b", "c"))
_DELTA = {"HEADS": 48, "GROUP": 3, "D_K": 128, "K_PAD": 128}
_SPACE = {"HEADS": 64, "GROUP": 64, "DIM": 64, "SIZE": 128, "PADDED": 128, "WIDTH": 32, "SKIPS": True}


def cases() -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """(kernel, constants with ``types`` of all pointers, launch options)."""
    found: list[tuple[Any, dict[str, Any], dict[str, int]]] = []
    four = {"num_warps": 4}
    for dtype, precision in (("bf16", "tf32"), ("fp32", "tf32x3")):
        of_rows = dict.fromkeys(_ROWS, f"*{dtype}")
        types = {**_SLOTS, **of_rows, "factors": "*fp32", "g": "*fp32", "scale": "fp32"}
        spaces = {**_SLOTS, **of_rows, "dt": f"*{dtype}", **dict.fromkeys(("a", "d", "bias"), "*fp32")}
        chunks = {**_DELTA, "CHUNK": delta_chunks.CHUNK, "PRECISION": precision, "types": types}
        systems = {**chunks, "BLOCK": delta_chunks.BLOCK, "NORMED": True, "NORM": delta_rule.NORM}
        scan = {**chunks, "D_V": 128, "WIDTH": delta_chunks.WIDTH, "STAGES": delta_chunks.SCAN_STAGES}
        step = {**_DELTA, "D_V": 128, "WIDTH": delta_rule.CHANNELS, "NORMED": True, "NORM": delta_rule.NORM}
        plain = dict.fromkeys(("rows", "weight", "bias", "out", "memory"), f"*{dtype}")
        convolving = {"KEPT": 4, "KEPT_PAD": 4, "TAPS": 4, "WIDTH": causal_conv.CHANNELS, "BIASED": True, "SILU": True}
        found += [
            (delta_chunks._systems, systems, {"num_warps": delta_chunks.SYSTEM_WARPS}),
            (delta_chunks._scan, scan, {"num_warps": delta_chunks.SCAN_WARPS}),
            (delta_rule._step, {**step, "EARLY": True, "types": types}, {"num_warps": delta_rule.WARPS}),
            (
                state_space._scan,
                {**_SPACE, "CHUNK": 64, "PRECISION": precision, "types": spaces},
                {"num_warps": 4, "num_stages": 2},
            ),
            (state_space._step, {**_SPACE, "BIASED": True, "SOFT": True, "EARLY": True, "types": spaces}, four),
            *(
                (
                    causal_conv._convolve,
                    {**convolving, "TOKENS": tokens, "EARLY": True, "types": {**_SLOTS, **plain}},
                    four,
                )
                for tokens in (1, causal_conv.TOKENS)
            ),
        ]
    named = {**dict.fromkeys(("x", "gate", "weight", "out"), "*bf16"), "epsilon": "fp32", "rows": "i32"}
    for size, gated, first, weights in ((5120, False, False, norming.PLUS_ONE), (128, True, False, norming.ROUNDED)):
        width = 1 << (size - 1).bit_length()
        own = {"CHANNELS": size, "SIZE": size, "WIDTH": width, "ROWS": max(1, norms.TILE // width), "GATED": gated}
        found.append((norms._norm, {**own, "FIRST": first, "WEIGHTS": weights, "EARLY": True, "types": named}, four))
    return found
