"""Of the kernels of latents: what compiled_kernels.py compiles."""

from __future__ import annotations

from typing import Any

from saccade.ops.triton import batched_decode, block_summaries, latent_scores, latents, latents_wide, prefill

_NUMBERS = dict.fromkeys(("tables", "lengths", "limits", "counts", "indices"), "*i32")
_PARTS = dict.fromkeys(("part_out", "part_lse", "means"), "*fp32")
_TYPES = {**_NUMBERS, **_PARTS, "pointers": "*i64", "k_new": "*bf16", "v_new": "*bf16", "far": "i64", "made": "*bf16"}
_ROWS = {"D": 576, "V": 512, "V_PAD": 512, "PAGE": 32, "EARLY": True, "PRECISION": "tf32", "types": _TYPES}


def cases() -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """(kernel, constants with ``types`` of pointers, launch options)."""
    found: list[tuple[Any, dict[str, Any], dict[str, int]]] = []
    reading = {**_ROWS, "REST_PAD": 64, "HEADS": 128, "UNITS": 1, "SPACED": True, "COUNTED": True, "CAPPED": False}
    for heads, keys, warps, stages in ((16, 32, 4, 3), (32, 32, 8, 2), (64, 64, 8, 2)):
        own = {**reading, "PER": heads, "PER_PAD": heads, "KEYS": keys, "ROWS": 1, "MANY": True, "FAR": False}
        launch = {"num_warps": warps, "num_stages": stages}
        found += [(latents._latents, {**own, "SIZE": size}, launch) for size in (0, 32)]
    single = {**reading, "dtype": "fp32", "PRECISION": "tf32x3", "PER": 16, "PER_PAD": 16, "KEYS": 16, "FAR": True}
    found.append((latents._latents, {**single, "ROWS": 1, "MANY": False, "SIZE": 1}, {"num_warps": 4, "num_stages": 2}))
    if latents_wide.gluon is not None:
        wide = {**reading, "PER": 40, "PER_PAD": latents_wide.HEADS, "KEYS": latents_wide.KEYS}
        kinds = ((0, 1, False, True), (32, 1, False, True), (1, 1, True, False), (0, 3, False, True))
        found += [
            (
                latents_wide.latents,
                {**wide, "SIZE": size, "ROWS": rows, "FAR": far, "MANY": many},
                {"num_warps": latents_wide.WARPS},
            )
            for size, rows, far, many in kinds
        ]
    scoring = {"SIZE": 32, "FIRST": 1, "LAST": 1, "AFTER_FULL": False, "TILE": latent_scores.TILE}
    averaging = {"HEADS": 128, "HEADS_PAD": 128, "CHANNELS": latent_scores.CHANNELS}
    storing = {"KV_HEADS": 1, "ROWS": 1, "JOINED": True, "SIZE": 32, "D_PAD": block_summaries.CHANNELS}
    parts = {"CUBOID": True, "MEAN": False, "MOMENTS": False}
    found += [
        (latent_scores._mean, {**_ROWS, **averaging}, {"num_warps": 4}),
        (latent_scores._score, {**_ROWS, **scoring, "WIDE": latent_scores.WIDE}, {"num_warps": latent_scores.WARPS}),
        (batched_decode._append, {**_ROWS, **storing, **parts}, {"num_warps": 2}),
        (block_summaries._summarize, {**_ROWS, **storing, **parts, "HEADS": 1}, {"num_warps": 4}),
    ]
    keys = {"D": 192, "D_PAD": 128, "REST": 64, "V": 128, "V_PAD": 128, "PAGE": 32, "PRECISION": "tf32", "LN2": 0.69}
    own = {"HEADS": 16, "KV_HEADS": 16, "UNITS": 16, "CAPPED": False, "SIZE": 128, "TILE": 0, "LOG_SIZE": 7.0}
    for mode, config in ((0, prefill.FILLED), (1, prefill.Config()), (2, prefill.FILLED_BLOCKS)):
        boxes = {"k_pool": (config.keys, 128), "k_rest": (config.keys, 64), "v_pool": (config.keys, 128)}
        tile = {"ROWS": config.rows, "KEYS": config.keys, "STAGES": config.stages, "COPIED": config.copy, "MODE": mode}
        constants = {**keys, **own, **tile, **({"tiles": boxes} if config.copy else {})}
        found.append((prefill._prefill, constants, {"num_warps": config.warps}))
    return found
