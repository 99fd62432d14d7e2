"""Of what types the arguments are of the kernels that compiled_kernels.py compiles."""

from __future__ import annotations

from saccade.methods.cis import triton_keeping, triton_one_launch
from saccade.methods.flexprefill import triton_blocks as flex_blocks
from saccade.methods.flexprefill import triton_pooled, triton_shares, triton_threshold
from saccade.methods.lfps import (
    triton_row_blocks,
    triton_row_candidates,
    triton_row_choice,
    triton_row_learning,
    triton_row_rest,
)
from saccade.methods.loopserve import triton_choosing, triton_recorded
from saccade.methods.rocketkv import triton_recorded as kept_blocks
from saccade.ops.triton import (
    antidiagonals,
    batched_choice,
    batched_decode,
    batched_guesses,
    batched_labels,
    batched_rank,
    block_pairs,
    block_rows,
    block_summaries,
    block_sums,
    choose,
    decode,
    fp8,
    fp8_tiles,
    line_blocks,
    lines,
    means,
    pages,
    prefill_together,
    products,
    progressive,
    reach,
    row_shares,
    tile_products,
    tile_rows,
)

TYPES = {
    "columns": "*fp32", "slashes": "*fp32", "found": "*i32", "means": "*fp32", "scores": "*fp32", "offsets": "*i64",
    "indices": "*i32", "weights": "*fp32", "positions": "*i64", "gains": "*i64", "marks": "*i8", "upto": "*i32",
    "worth": "*fp64", "fresh": "*i32", "spoilt": "*i32", "goals": "*fp64", "table": "*i32", "words": "*i64",
    "is_column": "*i8", "spans": "*i32", "span_offsets": "*i64", "begins_upto": "*i32", "v_offsets": "*i64",
    "columns_upto": "*i32", "starts": "*i64", "lowest": "*i64", "lse": "*fp32", "rows": "*i64", "row_log": "*fp32",
    "logs": "*fp32", "scale_log2": "fp32", "softcap": "fp32", "ln2": "fp32", "taken": "*i8", "threshold": "fp32",
    "bar": "fp32", "elsewhere": "*i8", "state": "*i64", "best": "*fp64", "sums": "*i64", "listed": "*i64",
}  # fmt: skip
STORED = (
    "q_ptr",
    "k_pool",
    "k_rest",
    "v_pool",
    "keys",
    "values",
    "mean_keys",
    "mean_values",
    "out",
)  # of the storage dtype
FP8 = {"out": "*fp8e4nv", "scale": "*fp32"}
PLACES = dict.fromkeys(("scales", "least", "factors", "minima", "zeros", "more"), "i32")  # in a tile
OTHERS = {
    lines._lines: {"columns": "*i32"},
    means._means: {"out": "*fp32"},
    pages._copy: {"v_from": "i64", "v_to": "i64", "which": "*i64", "where": "*i64", "count": "*i64"},  # keys lie low
    prefill_together._together: {"table": "*i64", "none": "*fp32"},
    reach._add_rows: {"sums": "*fp32", "rows": "i32"},
    reach._reach: {"sums": "*fp32", "found": "*fp32"},
    block_pairs._pairs: {"found": "*i64"},
    choose._count: {"arrived": "*i64"},
    block_summaries._summarize: {"made": "*fp32"},
    block_sums._read_blocks: {"parts": "*fp32", "arrived": "*i64", "rows": "i32"},
    block_sums._weigh_blocks: {"parts": "*fp32", "rows": "i32", "lowest": "i32"},
    triton_shares._decide: {"needed": "*fp32", "by_pooled": "*i8", "scale": "fp32", "tau": "fp32", "rows": "i32"},
    triton_pooled._pool: {"active": "*i1", "shares": "*fp32", "scale": "fp32"},
    triton_threshold._threshold: {"mass": "*fp32", "active": "*i1", "found": "*fp32", "share": "fp32"},
    triton_threshold._mass_above: {"mass": "*fp32", "active": "*i1", "bits": "*i32", "parts": "*fp32"},
    triton_threshold._next_bits: {
        "active": "*i1", "bits": "*i32", "parts": "*fp32", "target": "*fp32", "share": "fp32"
    },
    flex_blocks._choose: {
        **dict.fromkeys(("vertical", "groups", "pooled", "threshold"), "*fp32"), "by_pooled": "*i1",
        "arrived": "*i64", "gamma": "fp32",
    },
    row_shares._add: {"found": "*fp32", "blocks": "*i64"},
    line_blocks._covered: {
        "columns": "*i64",
        "k_ptr": "*bf16",
        "v_ptr": "*bf16",
        "near_blocks": "*i8",
        "lone_offsets": "*i64",
        "lone": "*i32",
    },
    block_rows._split: dict.fromkeys(("counts", "rows", "diagonal_counts", "diagonals"), "*i32"),
    antidiagonals._weigh_rows: dict.fromkeys(("q_scale", "k_scale"), "*fp32"),
    fp8_tiles._centre: {"found": "*fp32"},
    fp8_tiles._pack: {"rows": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "centre": "*fp32"},
    fp8._add_norm: {**FP8, **dict.fromkeys(("hidden", "delta", "weight"), "*bf16"), "epsilon": "fp32"},
    fp8._gated: {**FP8, **dict.fromkeys(("gates", "ups"), "*bf16")},
    fp8._heads: {**FP8, "attended": "*bf16"},
    triton_one_launch._choose: {
        **dict.fromkeys(("tables", "lengths", "counts", "indices", "bounds"), "*i32"),
        **dict.fromkeys(("reals", "cones", "scored", "searches"), "*fp64"), "searching": "*i8", "arrived": "*i64",
        **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
    },
    triton_row_learning._take_in: {"reals": "*fp64", "lengths": "*i32", "limits": "*fp32"},
    triton_row_candidates._scan: {"reals": "*fp64", "lengths": "*i32", "limits": "*fp32", "seen": "*i32"},
    triton_row_candidates._mark: {
        "reals": "*fp64", "lengths": "*i32", "idle": "*i8", "blocks": "*i8", "seen": "*i32", "marks": "*i32",
        "counts": "*i32",
    },
    triton_row_candidates._list: {
        "reals": "*fp64", "scored": "*fp64",
        **dict.fromkeys(("lengths", "marks", "counts", "listed", "sizes", "bounds"), "*i32"),
    },
    triton_row_choice._take: {
        **dict.fromkeys(("logits", "ranks", "taken", "sums"), "*fp32"), "idle": "*i8",
        **dict.fromkeys(("bounds", "known", "counted", "sizes", "lengths", "counts"), "*i32"),
    },
    triton_row_choice._read: {
        "v_pool": "*bf16", **dict.fromkeys(("tables", "lengths", "counts"), "*i32"), "idle": "*i8",
        **dict.fromkeys(("logits", "sums", "parts"), "*fp32"),
    },
    triton_row_rest._bypass: {
        "tables": "*i32", "lengths": "*i32", "reals": "*fp64", "idle": "*i8", "instead": "*fp32", "scale": "fp32",
    },
    triton_row_rest._join: {
        **dict.fromkeys(("tables", "lengths", "marks", "listed"), "*i32"), "reals": "*fp64", "idle": "*i8",
        **dict.fromkeys(("instead", "parts", "total"), "*fp32"), "joined": "*bf16", "scale": "fp32",
    },
    triton_row_blocks._mean_scores: {"pointers": "*i64", "lengths": "*i32", "bounds": "*i32"},
    products._product: {
        **dict.fromkeys(("x", "weight", "other", "bias"), "*bf16"), "scales": "*fp32", "parts": "*fp32",
        "arrived": "*i64", "rows": "i32",
    },
    tile_products._product: {
        **dict.fromkeys(("x", "bias"), "*bf16"), "words": "*i16", "halves": "*fp16", "stored": "*u8", "parts": "*fp32",
        "arrived": "*i64", "chosen": "*i64", "rows": "i32", **PLACES,
    },
    tile_rows.product: {
        **dict.fromkeys(("x", "bias"), "*bf16"), "words": "*i16", "stored": "*u8", "parts": "*fp32", "arrived": "*i64",
        "rows": "i32", **PLACES,
    },
    tile_products._values: {"words": "*i16", "halves": "*fp16", "stored": "*u8", "ids": "*i64", **PLACES},
    triton_keeping._list_and_keep: {
        **dict.fromkeys(("lengths", "bounds", "counts", "indices", "marks", "known", "taken"), "*i32"),
        "reals": "*fp64", "searching": "*i8", "arrived": "*i64",
    },
    triton_choosing._row_logs: {"tables": "*i32", "lengths": "*i32", "now": "*i8"},
    triton_choosing._line_sums: {"tables": "*i32", "lengths": "*i32", "now": "*i8", "sums": "*fp32"},
    triton_choosing._choose_lines: {
        **dict.fromkeys(("bounds", "known", "taken"), "*i32"), "now": "*i8", "sums": "*fp32",
    },
    triton_recorded._remember: {"lengths": "*i32", "now": "*i8", "chosen": "*i8", "scored": "*fp64"},
    triton_recorded._line_lists: {"lengths": "*i32", "chosen": "*i8", "counts": "*i32"},
    kept_blocks._take_in: {
        **dict.fromkeys(("tables", "lengths", "blocks", "bounds"), "*i32"), "queries": "*bf16", "sides": "*i8",
        "factors": "*fp32",
    },
    kept_blocks._score: {
        **dict.fromkeys(("blocks", "lengths"), "*i32"), "queries": "*bf16", "sides": "*i8",
        **dict.fromkeys(("factors", "logits", "sums"), "*fp32"),
    },
    kept_blocks._list_keys: {
        **dict.fromkeys(("lengths", "blocks", "taken", "best", "counts"), "*i32"), "estimated": "*fp64",
    },
    batched_rank._order: {
        **dict.fromkeys(("lengths", "takes", "denses", "always", "order", "counts", "sorts"), "*i32"),
    },
    batched_rank._rank: dict.fromkeys(("sorts", "lengths", "takes", "denses", "order"), "*i32"),
    decode._decode: {
        **dict.fromkeys(("tables", "lengths", "limits", "starts", "counts"), "*i32"),
        **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
    },
    batched_decode._choose_best: dict.fromkeys(("lengths", "takes", "denses", "counts"), "*i32"),
    batched_choice._search_chunks: {
        **dict.fromkeys(("lengths", "takes", "denses", "their"), "*i32"), "left": "*fp32",
    },
    batched_choice._search_left: {
        **dict.fromkeys(("lengths", "takes", "denses", "their", "counts"), "*i32"), "left": "*fp32",
    },
    progressive._read: {
        **dict.fromkeys(("tables", "lengths", "always", "order", "counts", "before", "used"), "*i32"),
        **dict.fromkeys(("epsilons", "guesses", "lefts", "part_out", "part_lse"), "*fp32"),
        **dict.fromkeys(("epsilon", "margin"), "fp32"), **dict.fromkeys(("published", "arrived"), "*i64"),
    },
    batched_labels._estimate: {
        **dict.fromkeys(("tables", "lengths", "denses"), "*i32"), "estimates": "*fp32", "sums": "*fp32",
        "scale": "fp32",
    },
    batched_labels._label: dict.fromkeys(("tables", "lengths"), "*i32"),
    batched_guesses._share: {
        **dict.fromkeys(("lengths", "denses"), "*i32"), **dict.fromkeys(("estimates", "sums"), "*fp32"),
    },
    batched_guesses._in_order: {
        **dict.fromkeys(("order", "counts"), "*i32"), **dict.fromkeys(("estimates", "ordered", "left"), "*fp32"),
    },
}  # fmt: skip
ALIGNED = ("q_head", "q_row", "q_line", "x_row", "weight_row", "other_row")  # strides, multiples of 16
