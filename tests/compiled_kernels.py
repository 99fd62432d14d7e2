"""Compile prefill's kernels, and decode's largest, for a Hopper GPU, on any machine: python tests/compiled_kernels.py

The interpreter runs kernels as Python: what the compiler refuses, or what does not fit a multiprocessor's shared
memory, shows only here or on a GPU. Prints each kernel's shared memory in bytes.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import torch
import triton
from compiled_keeping import cases as keeping_cases
from compiled_latents import cases as latent_cases
from compiled_types import ALIGNED, OTHERS, STORED, TYPES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.language import target_info

from saccade.methods.cis import triton_keeping, triton_one_launch
from saccade.methods.cis.recorded import MOST_STEPS
from saccade.methods.flexprefill import triton_blocks as flex_blocks
from saccade.methods.flexprefill import triton_pooled, triton_shares, triton_threshold
from saccade.methods.lfps import (
    triton_row_blocks,
    triton_row_candidates,
    triton_row_choice,
    triton_row_learning,
    triton_row_rest,
)
from saccade.methods.loopserve import triton_blocks, triton_choosing, triton_recorded, triton_rounds
from saccade.methods.rocketkv import triton_recorded as kept_blocks
from saccade.ops.tile_weights import FORMATS, TILE
from saccade.ops.triton import (
    antidiagonals,
    batched_best,
    batched_choice,
    batched_decode,
    batched_guesses,
    batched_labels,
    batched_rank,
    best_parts,
    block_pairs,
    block_rows,
    block_summaries,
    block_sums,
    choose,
    decode,
    fp8,
    fp8_tiles,
    heaviest,
    line_blocks,
    lines,
    means,
    pages,
    prefill,
    prefill_together,
    products,
    progressive,
    reach,
    row_shares,
    row_weights,
    tile_products,
    tile_rows,
)

SHARED = 232_448  # bytes that one program may have on Hopper
E4M3 = {"LARGEST": 448.0, "LEAST": 1e-20}
LADDER = {"LADDER": triton_rounds.LADDER, "STEPS": triton_rounds.STEPS}
HEADS = {"HEADS": 32, "KV_HEADS": 8, "UNITS": 32, "CAPPED": False, "PAGE": 32, "LN2": 0.69}


def cases() -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """(kernel, constants, launch options)."""
    found: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
        (block_pairs._pairs, {"SIZE": 128, "SPAN": block_pairs.SPAN}, {"num_warps": 4}),
        (heaviest._heaviest, {"SPAN": 4096}, {"num_warps": 8}),
        (reach._add_rows, {"EACH": 8, "PADDED": 8, "TOGETHER": 16, "KEYS": 16}, {"num_warps": 4}),
        (reach._reach, {"WIDTH": 1024, "SHARES": False}, {"num_warps": 1}),
        (block_rows._split, {"PER_UNIT": 4, "WIDTH": block_rows.WIDTH}, {"num_warps": 4}),
        (fp8._add_norm, {"CHANNELS": 4096, "WIDTH": 4096, "ADDS": True, **E4M3}, {"num_warps": 4}),
        (fp8._gated, {"INNER": 14336, "WIDTH": 16384, **E4M3}, {"num_warps": 16}),
        (fp8._heads, {"HEADS": 28, "ALL": 32, "HEAD_DIM": 128, "WIDTH": 128, **E4M3}, {"num_warps": 4}),
        (row_shares._add, {"WIDTH": 1024}, {"num_warps": 4}),
        (row_shares._add, {"WIDTH": 8192}, {"num_warps": 8}),
        (
            pages._copy,
            {"LISTS": 1, "PADDED": 1, "PARTS": 2, "PIECES": 512, "TILES": 1, "WIDTH": pages.WORDS},
            {"num_warps": 4},
        ),
        (triton_blocks._cross, {"WIDTH": 1024}, {"num_warps": 4}),
    ]
    for span, lines_span, warps in ((1024, 4096, 16), (128, 1024, 4)):
        own = {"ROWS": 512, "LINES": 8, "SPAN": lines_span, **LADDER, "UNIT": triton_rounds.UNIT}
        found += [
            (triton_rounds._sum_lines, {"SPAN": span, "UNIT": triton_rounds.UNIT}, {"num_warps": 4}),
            (triton_rounds._rounds, own, {"num_warps": warps}),
        ]
    for blocks in (1024, 8192):
        span = min(triton_threshold.SPAN, blocks)
        width = {"WIDTH": blocks, "SCANNED": choose.SCANNED}
        found += [
            (flex_blocks._choose, {**width, "PER_ROW": per_row, "BY_LINE": not per_row}, {"num_warps": warps})
            for per_row, warps in ((False, flex_blocks.warps_for(blocks)), (True, flex_blocks.warps_for(blocks)))
        ]
        found.append(
            (
                triton_threshold._threshold,
                {"SPAN": span, "STAGES": triton_threshold.STAGES},
                {"num_warps": min(triton_threshold.WARPS, span // 128)},
            )
        )
        found.append((choose._count, {**width, "WIDTH": choose.width_of(blocks)}, {"num_warps": 4}))
        found.append((choose._compact, {"WIDTH": choose.width_of(blocks)}, {"num_warps": 4}))
    found += [
        (triton_threshold._mass_above, {"SPAN": 1024, "CHUNK": triton_threshold.CHUNK}, {"num_warps": 4}),
        (triton_threshold._next_bits, {"CHUNKS": 1024}, {"num_warps": 4}),
        *(
            (block_sums._weigh_blocks, {"SIZE": 128, "EACH": block_sums.WEIGHED, "ALIGNED": one}, {"num_warps": 4})
            for one in (False, True)
        ),
    ]
    for dtype, width, precision in (("bf16", 128, "tf32"), ("bf16", 256, "tf32"), ("fp32", 64, "tf32x3")):
        own = {"dtype": dtype, "D": width, "D_PAD": width, "PRECISION": precision, **HEADS}
        grouped = {**own, "GROUP": 4, "SIZE": 128}
        pooling = {name: getattr(triton_pooled, name) for name in ("ROWS", "KEYS", "WIDE")}
        pooling |= {"STAGES": triton_pooled.STAGES, "PRECISION": "tf32x3"}
        deciding = {"WIDTH": 1024, "EACH": triton_shares.EACH, "SPAN": triton_shares.SPAN, "KEYS": triton_shares.KEYS}
        found += [
            (triton_pooled._pool, {**grouped, **pooling}, {"num_warps": triton_pooled.WARPS}),
            (triton_shares._decide, {**grouped, **deciding}, {"num_warps": 4}),
            (triton_shares._decide, {**grouped, **deciding, "WIDTH": 8192}, {"num_warps": 8}),
            (
                block_summaries._summarize,
                {**grouped, "HEADS": 8, "CUBOID": False, "MEAN": True, "MOMENTS": False},
                {"num_warps": 4},
            ),
        ]
        if width == 128:
            reading = {**grouped, "ALIGNED": True, "LOGS": block_sums.LOGS}
            found.append((block_sums._read_blocks, reading, {"num_warps": 8, "maxnreg": 128}))
        best = {"GROUP": 4, "SIZE": 64, "ROWS": 16, "TILE": 64, "SPAN": 2048, "PRECISION": "tf32x3"}
        tile = 64 if width < 256 else 32
        found.append((heaviest._best, {**own, **best}, {"num_warps": 4}))
        rows, warps = (128, 8) if dtype == "bf16" and width == 128 else (32, 4)
        sampled = {"GROUP": 4, "EACH": 8, "SIZE": 128, "ROWS": rows, "SPAN": 64, "STAGES": 2, "COPIED": False}
        found += [(row_shares._weigh, {**own, **sampled, "LISTED": one}, {"num_warps": warps}) for one in (False, True)]
        found += [
            (kernel, {**own, "GROUP": 4, "ROWS": 64, "KEYS": 64}, {"num_warps": 4})
            for kernel in (row_weights._logs, row_weights._weights)
        ]
        found.append(
            (means._means, {**own, "EACH": 4, "LISTS": 8, "ROWS": 16, "TILE": tile, "LOG_SIZE": 4.0}, {"num_warps": 4})
        )
        blocks = {"SIZE": 128, "ROWS": 128 if width < 256 else 64, "KEYS": 64, "MODE": 2, "COPIED": False, "STAGES": 2}
        blocks |= {"REST": 0, "V": width, "V_PAD": width}
        found.append((prefill._prefill, {**own, **blocks, "TILE": tile, "LOG_SIZE": 7.0}, {"num_warps": 8}))
        found.append((prefill_together._together, {**own, **blocks, "NUMBERS": 8}, {"num_warps": 8}))
        found += [
            (
                lines._lines,
                {**own, "TILE": 64, "CONE": cone, "COPIED": not cone},
                {"num_warps": lines.WARPS, "num_stages": lines.STAGES},
            )
            for cone in (False, True)
        ]
    copied = {"dtype": "bf16", "D": 128, "D_PAD": 128, "PRECISION": "tf32", **HEADS, "GROUP": 4, "COPIED": True}
    sampled = {"EACH": 8, "SIZE": 128, "ROWS": 128, "SPAN": 64, "STAGES": 2, "tiles": {"k_pool": (128, 128)}}
    found += [
        *(
            (row_shares._weigh, {**copied, **sampled, "LISTED": listed}, {"num_warps": 8})
            for listed in (False, True)
        ),
        *(
            (
                row_shares._weigh,
                {**copied, **sampled, "LISTED": False, "D": width, "D_PAD": width, "tiles": {"k_pool": (128, width)}},
                {"num_warps": 8},
            )
            for width in (64, 256)
        ),
        (
            antidiagonals._weigh_rows,
            {
                **copied, "STRIDE": 8, "EACH": 16, "ROWS": 128, "KEYS": 128, "STEP": 64, "BAND": 16, "WIDTH": 1024,
                "FP8": False, "tiles": {"q_rows": (1, 1, 128, 64), "k_rows": (128, 64)},
            },
            {"num_warps": 4, "num_stages": 3},
        ),
        (
            antidiagonals._weigh_rows,
            {
                **copied, "dtype": "fp8e4nv", "STRIDE": 8, "EACH": 16, "ROWS": 128, "KEYS": 128, "STEP": 128,
                "BAND": 16, "WIDTH": 1024, "FP8": True, "tiles": {"q_rows": (128, 128), "k_rows": (128, 128)},
            },
            {"num_warps": 4, "num_stages": 3},
        ),
        (fp8_tiles._centre, {**copied, "KEYS": 64}, {"num_warps": 8}),
        *(
            (
                fp8_tiles._pack,
                {
                    **copied, "PAGED": paged, "CENTRED": paged, "STRIDE": stride, "WIDTH": stride * 128,
                    "TILES": 64 // stride or 1, **E4M3,
                },
                {"num_warps": 4 if stride == 8 else 8},
            )
            for paged in (False, True)
            for stride in (8, 128)
        ),
        (
            line_blocks._covered,
            {
                **copied, "SIZE": line_blocks.SIZE, "STAGES": line_blocks.STAGES, "GATHERED": line_blocks.GATHERED,
                "tiles": {"k_keys": (128, 128), "v_keys": (128, 128)},
            },
            {"num_warps": line_blocks.WARPS},
        ),
    ]  # fmt: skip
    decoding = {
        "dtype": "bf16",
        "D": 128,
        "D_PAD": 128,
        "PRECISION": "tf32",
        **HEADS,
        "PER_PAD": 16,
        "EARLY": True,
        "FAR": False,
    }
    sharing = {**decoding, "SPAN": 1024, "WAIT": 2}
    found += [
        (
            triton_one_launch._choose,
            {
                **sharing,
                "KV_HEADS": kv_heads,
                "HELD": held,
                "KEYS": 128 if warps == 16 else 64,
                "TILE": tile,
                "GROUP": 32 // kv_heads,
                "PLACES": MOST_STEPS,
            },
            {"num_warps": warps, "num_stages": 3, "maxnreg": 128},
        )
        for kv_heads, held, warps, tile in ((32, 4096, 8, 64), (8, 1024, 4, 32), (32, 16384, 16, 0), (8, 0, 4, 0))
    ]
    listing = {"PARTS": 4, "KNOWN_WORDS": best_parts.WORDS, "SPAN": batched_best.SPAN}
    found.append((triton_keeping._list_and_keep, {**decoding, **listing}, {"num_warps": 8, "maxnreg": 64}))
    observed = {
        **decoding,
        "TYPE": triton.language.bfloat16,
        "TILE": 64,
        "TILES": 1,
        "KEYS": 64,
        "SPLITS": 16,
        "SPAN": 1024,
        "UNITS": 8,
    }
    found += [
        (kernel, observed, {"num_warps": 4, "num_stages": 3})
        for kernel in (triton_choosing._row_logs, triton_choosing._line_sums, triton_recorded._line_lists)
    ]
    wide = {"dtype": "fp32", "D": 256, "D_PAD": 256, "PRECISION": "tf32x3"}
    chosen = {**observed, **wide, "TYPE": triton.language.float32, "TILE": 32, "TILES": 2, "KEYS": 32}
    stages = {"num_warps": 4, "num_stages": 2}
    found += [(kernel, chosen, stages) for kernel in (triton_choosing._row_logs, triton_choosing._line_sums)]
    for own, row_bytes in (({}, 256), (wide, 1024)):
        for many in (False, True):
            tile, warps, count = batched_decode.score_tiles(many, row_bytes)
            scored = {**decoding, **own, "G_PAD": 16, "UNITS": 8, "SIZE": 16, "FIRST": 1, "LAST": 1, "TILE": tile}
            types = {"lengths": "*i32", "pointers": "*i64", "scores": "*fp32"}
            scored |= {"AFTER_FULL": False, "STAGES": count, "types": types}
            found.append((batched_decode._score, scored, {"num_warps": warps}))
    found.append((triton_recorded._remember, decoding, {"num_warps": 1}))
    found.append((triton_choosing._choose_lines, {**listing, "UNITS": 8, "WORDS": best_parts.WORDS, "EARLY": True}, {}))
    for head_dim, units in ((128, 8), (64, 32), (256, 2)):
        own = {**decoding, "D": head_dim, "D_PAD": head_dim, "UNITS": units, "KV_HEADS": min(units, 8), "EACH_PAD": 16}
        own |= {"SLOTS": kept_blocks.RING, "LEAST": kept_blocks.TINY, "BLOCKS": kept_blocks.BLOCKS, "SPAN": 1024}
        own |= {"PADDED": units, "CAPPED": head_dim == 64}
        found += [
            (kept_blocks._take_in, {**own, "EACH_PAD": max(1, 32 // units)}, {"num_warps": 4}),
            (kept_blocks._score, own, {"num_warps": kept_blocks.WARPS, "num_stages": kept_blocks.STAGES}),
            (kept_blocks._list_keys, own, {"num_warps": 4}),
        ]
    rule = {
        "SIZE": 32, "BLOCKS": 4, "TILE": 64, "GROUP": 4, "FEW": 4, "MICROBATCH": 4, "LEAST": False, "GUESSED": False,
        "MEAN": False,
        **{name: getattr(progressive, name) for name in ("WINDOW", "SHARE", "LONGEST", "NEARLY")},
        "AT_END": progressive.WINDOW_AT_END, "KNOWN": True, "RAGGED": True, "EACH": True,
    }  # fmt: skip
    found += [
        (
            products._product,
            {
                "dtype": "bf16", "ROWS": rows, "SPLITS": splits, "GATED": gated, "BIASED": not gated, "EARLY": True,
                "STAGES": 4 if gated else 6, "SCALED": eighth, "types": {"weight": "*fp8e4nv"} if eighth else {},
                **{name: getattr(products, name) for name in ("OUTPUTS", "CHANNELS", "FETCHED", "LINE")},
            },
            {"num_warps": 4},
        )
        for rows, splits, gated, eighth in (
            (16, 1, True, False), (32, 2, True, False), (16, 2, False, False), (32, 1, False, False),
            (16, 2, False, True),
        )
    ]  # fmt: skip
    for kind in FORMATS.values():
        own = {**tile_products._constants(kind.layout), "TILE": TILE}
        more = {"ROWS": 8, "SPLITS": 2, "BIASED": True, "FULL": True, "EARLY": True}
        plain, launch = {"num_warps": tile_products.PLAIN.warps}, tile_rows.LAUNCH.options(8)
        own_stages = {**own, **more, "STAGES": tile_products.STAGES}
        found += [(tile_products._product, {**own_stages, "GROUPED": grouped}, plain) for grouped in (False, True)]
        kinds = tile_rows.constants(torch.bfloat16, kind.layout.kind)
        found.append((tile_rows.product, {**own, **more, **kinds}, launch))
        found.append((tile_products._values, {**own, "LISTED": True}, {"num_warps": 4}))
    reading = {"num_warps": 4, "num_stages": 2, "maxnreg": 128}
    found += [(progressive._read, {**decoding, **rule, "GUESSED": one}, reading) for one in (False, True)]
    ranking = {**decoding, "FIRST": 2, "LAST": 1, "TILE": batched_labels.TILE, "OPERAND": triton.language.bfloat16}
    for head_dim, kv_heads, bits, size in ((128, 8, 4, 32), (64, 4, 2, 8), (256, 32, 8, 128)):
        members = triton.next_power_of_2(32 // kv_heads)
        own = {"D": head_dim, "KV_HEADS": kv_heads, "BITS": bits, "SIZE": size, "MEMBERS": members}
        parts = max(batched_labels.PARTS, 16 // members)
        own |= {"HALF": head_dim // 2, "PARTS": parts, "CAPPED": head_dim == 64}
        found.append((batched_labels._estimate, {**ranking, **own}, {"num_warps": 4 if head_dim < 256 else 8}))
    found.append((batched_labels._label, {**decoding, "COUNT": 16, "HALF": 8, "BITS": 4}, {"num_warps": 1}))
    guessing = {"UNITS": 8, "HEADS": 32, "EARLY": True}
    shared = {"EACH": 4, "PARTS": 256, "SIZE": 32, "FIRST": 2, "LAST": 1, "SPAN": batched_guesses.SPAN}
    held = {"MICROBATCH": 4, "SPAN": batched_guesses.HELD}
    found += [
        (batched_guesses._share, {**guessing, **shared}, {"num_warps": 4}),
        (batched_guesses._in_order, {**guessing, **held}, {"num_warps": batched_guesses.HELD // 256}),
    ]
    words = {**decoding, "PARTS": 4, "SPAN": 1024, "TABLE": 4096, "SIZE": 8, "TILE": 512, "UNITS": 32, "EACH": 1}
    words |= {
        "TYPE": triton.language.bfloat16,
        "EACH_PAD": 1,
        "WORDS": best_parts.WORDS,
        "CHUNK": 1024,
        "KEYS": 32,
        "PRECISION": "tf32",
        "MOST": 128,
    }
    for kernel, warps in (
        (triton_row_learning._take_in, 8), (triton_row_candidates._scan, 8), (triton_row_candidates._mark, 4),
        (triton_row_candidates._list, 4), (triton_row_choice._take, 8), (triton_row_choice._read, 4),
        (triton_row_rest._bypass, 2), (triton_row_rest._join, 4), (triton_row_blocks._mean_scores, 4),
    ):  # fmt: skip
        found.append((kernel, {**words, "GROUP": 16}, {"num_warps": warps}))
    found += [
        (
            decode._decode,
            {
                **decoding, "PER": per, "ROWS": rows, "SIZE": size, "SPACED": True, "COUNTED": True, "KEYS": 32,
                "RUN": 1 if size == 1 else 32,
                "MANY": True, "D": head_dim, "D_PAD": head_dim, "WINDOW": window,
            },
            {"num_warps": 4, "num_stages": 3, **({} if head_dim > 128 else {"maxnreg": 96})},
        )
        for per, rows, size, head_dim, window in (
            (4, 1, 32, 128, 0), (1, 1, 1, 64, 0), (7, 1, 0, 128, 0), (8, 2, 0, 256, 0), (8, 4, 0, 256, 512)
        )
    ]  # fmt: skip
    ordering = {"UNITS": 8, "SIZE": 16, "FIRST": 1, "LAST": 1, "AFTER_FULL": True, "EARLY": True}
    for everything, blocks in ((True, 6144), (False, 3072), (True, 1 << 16)):
        chunk, warps, looked_up, others, rank_warps = batched_rank.tiles_for(blocks, None if everything else 64)
        wanted = chunk if everything else 64
        own = {**ordering, "ALL": everything, "CHUNK": chunk, "WANTED": wanted}
        sorting = {
            "TAKES": True,
            "LISTED": 64,
            "BITS": chunk.bit_length() - 1,
            "EACH": chunk // (32 * warps),
            "ONE": False,
        }
        looking = {"TILE": min(looked_up, wanted), "OTHERS": others, "HALVES": wanted.bit_length() - 1}
        found += [
            (batched_rank._order, {**own, **sorting}, {"num_warps": warps}),
            (batched_rank._rank, {**own, **looking}, {"num_warps": rank_warps}),
        ]
    listing = {"UNITS": 8, "SIZE": 16, "FIRST": 1, "LAST": 1, "ROOM": 128, "TAKES": True, "EARLY": True}
    found += [
        (batched_decode._choose_best, {**listing, "WIDTH": 8192}, {"num_warps": 8}),
        (batched_choice._search_chunks, {**listing, "CHUNK": batched_choice.CHUNK}, {"num_warps": 4}),
        (batched_choice._search_left, {**listing, "WIDTH": 1024, "LISTED": 128}, {"num_warps": 4}),
    ]
    return found + keeping_cases() + latent_cases()


def coded(found: list[tuple[Any, dict[str, Any], dict[str, int]]]) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Those that read a pool in bfloat16, over int8 and fp8 rows."""
    chosen = []
    for (kernel, constants, options), stored in itertools.product(found, ("*i8", "*u8")):
        pools = [name for name in ("k_pool", "v_pool") if name in kernel.arg_names]
        pools += ["rows"] if constants.get("PAGED") else []
        copied = constants.get("tiles") or (constants.get("COPIED") and kernel.__module__ != fp8_tiles.__name__)
        if pools and not copied and constants.get("dtype") == "bf16":
            types = {**constants.get("types", {}), **dict.fromkeys(pools, stored)}
            chosen.append((kernel, {**constants, "types": types}, options))
    return chosen


def hopper() -> GPUTarget:
    """What readers ask, of a device that need not be there."""
    return GPUTarget("cuda", 90, 32)


hopper.__triton_builtin__ = True  # type: ignore[attr-defined]


def compiled(kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> Any:
    """``kernel`` for Hopper. Raises what the compiler does."""
    names = kernel.arg_names
    dtype = constants.get("dtype", "bf16")
    constant = {param.name for param in kernel.params if param.is_constexpr}
    kinds = {name: "constexpr" if name in constant else TYPES.get(name, "i32") for name in names}
    kinds |= {name: f"*{dtype}" for name in names if name in STORED and name not in constant}
    own = {**OTHERS.get(kernel, {}), **constants.get("types", {})}
    kinds |= {name: kind for name, kind in own.items() if name in kinds}
    for name, box in constants.get("tiles", {}).items():  # by the copy engine
        kinds[name] = f"tensordesc<{dtype}{list(box)}>"
    attributes = {
        (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if kinds[name][0] == "*" or name in ALIGNED
    }
    values = {(names.index(name),): constants[name] for name in constant}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return triton.compile(source(kernel, kinds, values, attributes), target=GPUTarget("cuda", 90, 32), options=options)


def main() -> int:
    failed = 0
    target_info.current_target = hopper  # type: ignore[assignment]
    found = cases()
    for kernel, constants, options in found + coded(found):
        types = constants.get("types", {})
        stored = {types.get(name) for name in ("k_pool", "v_pool", "rows")}
        kind = "fp8 rows" if "*u8" in stored else "int8 rows" if "*i8" in stored else ""
        what = f"{kernel.__name__} {constants.get('dtype', '')} {constants.get('D', '')} {kind}"
        try:
            made = compiled(kernel, constants, options)
        except Exception as error:
            failed += 1
            print(f"{what}: {type(error).__name__}: {str(error)[-300:]}", flush=True)
            continue
        failed += made.metadata.shared > SHARED
        if kind and kernel in (
            decode._decode,
            progressive._read,
        ):  # of 136 or 132 bytes: 16 at once would not be aligned
            wide = re.findall(r"cp\.async.* 0x10\b", made.asm["ptx"])
            failed += bool(wide)
            what += f" ({len(wide)} reads of 16 bytes)"
        print(f"{what}: {made.metadata.shared} of {SHARED} bytes of shared memory", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
