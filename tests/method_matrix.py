"""The matrix of methods that the invariant tests run over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from saccade.methods.base import Method
from saccade.methods.outside import load_outside
from saccade.methods.registry import METHODS

load_outside()  # the matrix has the methods of saccade-contrib, too


@dataclass(frozen=True)
class MethodCase:
    """One row of the method matrix. ``sparse``: settings that leave out keys at 700 tokens; ``dense``: a setting
    that must equal dense attention at any length; ``budget(m)``: a setting that must be dense up to m tokens, or None
    without a budget; ``boundary``: block sizes or budgets around which lengths are tried; ``units``: settings that
    differ in granularity alone."""

    name: str
    sparse: tuple[dict[str, Any], ...]
    dense: dict[str, Any] | None
    budget: Any = None
    boundary: tuple[int, ...] = (128,)
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    reweights: bool = False  # whether what is read is more than a set of keys
    free: bool = False  # whether what a step reads is settled before it, or without scores

    @property
    def type(self) -> type[Method]:
        return METHODS[self.name]

    def methods(self) -> list[Method]:
        return [self.type(**options) for options in self.sparse]


# A new method adds its row here and runs through every invariant.
MATRIX = (
    MethodCase("dense", ({},), {}, budget=lambda m: {}),
    MethodCase(
        "topk",
        (
            {"k": 48},
            {"k": 0.1, "sinks": 4, "local": 8},
            {"k": 48, "unit": "kv_head", "prefill": True},
            {"k": 33, "prefill": True},
        ),
        {"k": 100_000, "prefill": True},
        budget=lambda m: {"k": m, "prefill": True},
        boundary=(48, 128),
        units={"q_head": {"k": 40, "unit": "q_head"}, "kv_head": {"k": 40, "unit": "kv_head"}},
    ),
    MethodCase(
        "streaming",
        ({"sinks": 4, "window": 60}, {"sinks": 0, "window": 1}),
        {"sinks": 0, "window": 100_000},
        budget=lambda m: {"sinks": 4, "window": max(1, m - 4)},
        boundary=(64,),
    ),
    MethodCase(
        "a_shape",
        ({"sinks": 4, "window": 60}, {"sinks": 0, "window": 1}),
        {"sinks": 0, "window": 100_000},
        budget=lambda m: {"sinks": 4, "window": max(1, m - 4)},
        boundary=(64,),
    ),
    MethodCase(
        "tri_shape",
        ({"sinks": 4, "window": 60, "last": 30}, {"sinks": 0, "window": 1, "last": 1}),
        {"sinks": 0, "window": 100_000, "last": 0},
        budget=lambda m: {"sinks": 4, "window": max(1, m - 4), "last": 2},
        boundary=(64,),
    ),
    MethodCase(
        "flexprefill",
        (
            {"gamma": 0.9, "block_size": 64, "min_budget": 0},
            {"gamma": 0.6, "block_size": 128, "min_budget": 256},
            {"gamma": 0.7, "tau": 1.0, "block_size": 64, "min_budget": 128, "max_budget": 256},
            {"gamma": 0.7, "tau": 0.3, "block_size": 64, "min_budget": 0, "flatten": False},
        ),
        {"gamma": 1.0, "min_budget": 0},
        budget=lambda m: {"gamma": 0.5, "min_budget": m, "block_size": 64},
        boundary=(64, 128, 256),
    ),
    MethodCase(
        "loopserve",
        (
            {"alpha": 0.8},
            {"alpha": 0.6, "samples": 40, "min_rows": 1},
            {"alpha": 0.1, "overlap": "paper", "min_rows": 1},
            {"alpha": 0.7, "samples": 40, "lines": "block", "block_size": 32, "min_rows": 1},
            {"alpha": 0.8, "budget": 40, "first": 0, "n_d": 1},
            {"alpha": 0.8, "budget": 30, "first": 0, "observed": 1, "unit": "q_head", "force": True},
        ),
        {"alpha": 1.0},
        boundary=(64, 256),
    ),
    MethodCase(
        "minference",
        (
            {"vertical": 40, "slash": 30, "keep_columns": 4, "keep_diagonals": 8},
            {"vertical": 0, "slash": 0, "keep_columns": 0, "keep_diagonals": 1, "last_rows": 5},
            {"pattern": "block_sparse", "blocks": 3},
            {"pattern": "block_sparse", "blocks": 1, "block_size": 128},
        ),
        {"vertical": 100_000},
        budget=lambda m: {"vertical": m, "slash": 1, "keep_columns": 0, "keep_diagonals": 1},
        boundary=(40, 64, 128, 192),
    ),
    MethodCase(
        "xattention",
        (
            {"threshold": 0.7, "block_size": 64},
            {"threshold": 0.5, "stride": 16, "block_size": 128},
            {"threshold": 0.0, "stride": 4, "block_size": 32},
            {"threshold": 0.6, "block_size": 64, "products": "fp8"},
        ),
        {"threshold": 1.0},
        boundary=(16, 64, 128, 192, 256),
    ),
    MethodCase(
        "sampled_rows",
        (
            {"threshold": 0.1, "gamma": 0.5, "block_size": 64},
            {"threshold": 1.0, "gamma": 0.0, "rows": 3, "block_size": 32, "window_blocks": 1},
            {"threshold": 0.4, "gamma": 0.0, "rows": 4},
        ),
        {"threshold": 0.0},
        boundary=(32, 64, 128, 192, 256),
    ),
    MethodCase(
        "infllm",
        (
            {"sinks": 16, "window": 64, "budget": 64, "block_size": 32},
            {"sinks": 0, "window": 1, "budget": 128, "representatives": 1, "block_size": 64},
        ),
        {"window": 100_000},
        budget=lambda m: {"sinks": 0, "window": m, "budget": 0, "block_size": 32},
        boundary=(32, 64, 96, 128),
    ),
    MethodCase(
        "flashprefill",
        (
            {"alpha": 0.9, "sink_blocks": 1, "window_blocks": 1, "last_blocks": 0, "block_size": 64},
            {"alpha": 1.0, "sink_blocks": 0, "window_blocks": 2, "last_blocks": 1, "block_size": 32, "unit": "kv_head"},
        ),
        {"alpha": 0.0},
        boundary=(32, 64, 128, 192),
    ),
    MethodCase(
        "quest",
        (
            {"budget": 64, "dense_layers": 0},
            {"budget": 96, "block_size": 32, "dense_layers": 0, "unit": "layer", "current": "competes"},
            {"budget": 32, "dense_layers": 0, "unit": "q_head"},
        ),
        {"budget": 100_000},
        budget=lambda m: {"budget": m, "dense_layers": 0},
        boundary=(16, 32, 48, 64, 96, 128),
        units={unit: {"budget": 64, "dense_layers": 0, "unit": unit} for unit in ("q_head", "kv_head")},
    ),
    MethodCase(
        "arkvale",
        (
            {"budget": 128, "block_size": 16},
            {"budget": 320, "block_size": 64, "sinks": 1, "window": 1, "unit": "kv_head"},
            {"budget": 64, "sinks": 0, "window": 1, "unit": "q_head"},
        ),
        {"budget": 100_000},
        budget=lambda m: {"budget": m},
        boundary=(16, 32, 64, 128, 160, 320),
        units={unit: {"budget": 192, "unit": unit} for unit in ("q_head", "kv_head")},
    ),
    MethodCase(
        "locks",
        ({"budget": 64}, {"budget": 160, "block_size": 32, "sinks": 2, "combine": "max"}),
        {"budget": 100_000},
        budget=lambda m: {"budget": m},
        boundary=(16, 32, 64, 128, 160, 320),
    ),
    MethodCase(
        "topp",
        (
            {"dense_upto": 0, "p": 0.8},
            {"dense_upto": 0, "p": 0.5, "sinks": 4, "local": 8, "prefill": True},
            {"dense_upto": 0, "p": 0.0, "unit": "kv_head", "prefill": True},
        ),
        {"dense_upto": 0, "p": 1.0, "prefill": True},
        budget=lambda m: {"dense_upto": 0, "p": 0.5, "local": m, "prefill": True},
        boundary=(12, 64, 128),
        units={unit: {"dense_upto": 0, "p": 0.7, "unit": unit} for unit in ("q_head", "kv_head")},
    ),
    MethodCase(
        "twilight",
        (
            {"dense_upto": 0, "p": 0.8, "base": 96, "dense_layers": 0},
            {"dense_upto": 0, "p": 0.5, "base": 0.3, "bits": 2, "block_size": 32, "dense_layers": 0, "unit": "q_head"},
        ),
        {"dense_upto": 0, "p": 1.0, "base": 100_000},
        budget=lambda m: {"dense_upto": 0, "p": 1.0, "base": m, "dense_layers": 0},
        boundary=(16, 32, 48, 96),
        units={
            unit: {"dense_upto": 0, "p": 0.7, "base": 96, "dense_layers": 0, "unit": unit}
            for unit in ("q_head", "kv_head")
        },
    ),
    MethodCase(
        "snapkv",
        (
            {"capacity": 60, "window": 16},
            {"capacity": 40, "window": 1, "kernel": 1, "unit": "q_head"},
        ),
        {"capacity": 100_000},
        budget=lambda m: {"capacity": m, "window": 8},
        boundary=(16, 60, 64),
        units={unit: {"capacity": 60, "window": 16, "unit": unit} for unit in ("q_head", "kv_head")},
        free=True,
    ),
    MethodCase(
        "rocketkv",
        (
            {"capacity": 120, "window": 16, "kernel": 9, "keys": 40},
            {"capacity": 90, "window": 8, "keys": 24, "block_size": 5, "channels": 0.25, "unit": "q_head"},
            {"budget": 64},
        ),
        {"capacity": 100_000, "keys": 100_000},
        budget=lambda m: {"capacity": m, "window": 8, "keys": m},
        boundary=(16, 60, 64),
        units={u: {"capacity": 90, "window": 16, "keys": 40, "unit": u} for u in ("q_head", "kv_head")},
    ),
    MethodCase(
        "adakv",
        ({"capacity": 60, "window": 16}, {"capacity": 40, "window": 7, "safeguard": 0.0, "unit": "q_head"}),
        {"capacity": 100_000},
        budget=lambda m: {"capacity": m, "window": 8},
        boundary=(16, 60, 64),
        free=True,
    ),
    MethodCase(
        "h2o",
        ({"budget": 60}, {"budget": 0.2, "heavy": 0.8, "unit": "q_head"}, {"budget": 30, "heavy": 1.0}),
        {"budget": 100_000},
        budget=lambda m: {"budget": m},
        boundary=(30, 60, 128),
        units={unit: {"budget": 60, "unit": unit} for unit in ("q_head", "kv_head")},
        free=True,
    ),
    MethodCase(
        "double_sparsity",
        (
            {"dense_upto": 0, "k": 48, "source": "prompt", "dense_layers": 0},
            {
                "dense_upto": 0,
                "k": 0.1,
                "source": "prompt",
                "dense_layers": 0,
                "bits": 16,
                "unit": "q_head",
                "sinks": 2,
                "local": 5,
            },
        ),
        {"dense_upto": 0, "k": 100_000, "source": "prompt"},
        budget=lambda m: {"dense_upto": 0, "k": m, "source": "prompt", "dense_layers": 0},
        boundary=(48, 64),
        units={
            unit: {"dense_upto": 0, "k": 40, "source": "prompt", "dense_layers": 0, "unit": unit}
            for unit in ("q_head", "kv_head")
        },
    ),
    MethodCase(
        "hshare",
        (
            {"heavy": 30, "sinks": 4, "local": 8, "source": "prompt", "rows": 8},
            {"heavy": 50, "sinks": 0, "local": 1, "source": "exact", "every": 1, "head_share": 1.0, "unit": "q_head"},
        ),
        {"heavy": 100_000, "source": "exact"},
        budget=lambda m: {"heavy": m, "sinks": 0, "local": 1, "source": "exact"},
        boundary=(42, 51, 64),
    ),
    MethodCase(
        "random",
        ({"k": 48}, {"k": 0.1, "seed": 3}),
        {"k": 100_000},
        budget=lambda m: {"k": m},
        boundary=(48, 128),
        free=True,
    ),
    MethodCase(
        "magicpig",
        (
            {"dense_upto": 0, "bits": 4, "tables": 20, "local": 8, "dense_every": 0},
            {"dense_upto": 0, "bits": 6, "tables": 30, "sinks": 0, "local": 1, "dense_every": 0, "seed": 3},
        ),
        {"dense_upto": 0, "local": 100_000},
        budget=lambda m: {"dense_upto": 0, "sinks": 0, "local": m, "dense_every": 0},
        boundary=(8, 12, 64),
        reweights=True,
    ),
    MethodCase(
        "vattention",
        (
            {"epsilon": 0.3, "sinks": 4, "local": 20, "heavy": 16, "block_size": 8},
            {"epsilon": 0.5, "sinks": 0, "local": 1, "heavy": 8, "base": 0.2, "block_size": 8, "seed": 3, "follow": 2},
            {"epsilon": 0.4, "sinks": 0, "local": 1, "heavy": 8, "block_size": 8, "certify": True},
        ),
        {"epsilon": 0.0},
        budget=lambda m: {"sinks": 0, "local": m, "block_size": 8},
        boundary=(8, 12, 64),
        reweights=True,
    ),
    MethodCase(
        "infinigen",
        (
            {"dense_upto": 0, "skew": "off", "query": "own", "dense_layers": 0},
            {
                "dense_upto": 0,
                "alpha": 0.5,
                "cap": 0.05,
                "skew": "off",
                "query": "own",
                "dense_layers": 0,
                "unit": "q_head",
            },
        ),
        {"dense_upto": 0, "alpha": 1e6, "cap": 1.0, "skew": "off", "query": "own", "dense_layers": 0},
        boundary=(64,),
        units={
            unit: {"dense_upto": 0, "skew": "off", "query": "own", "dense_layers": 0, "unit": unit}
            for unit in ("q_head", "kv_head")
        },
    ),
    MethodCase(
        "cis",
        (
            {"k": 30, "sinks": 4, "local": 8},
            {"k": 0.1, "sinks": 0, "local": 1, "s": 4, "r": 2, "m": 7},
            {"k": 21, "sinks": 9, "local": 20, "unit": "kv_head"},
        ),
        {"k": 100_000},
        budget=lambda m: {"k": m, "sinks": 0, "local": 1},
        boundary=(42, 50, 64, 128),
        units={unit: {"k": 40, "sinks": 4, "local": 8, "unit": unit} for unit in ("q_head", "kv_head")},
    ),
    MethodCase(
        "lfps",
        (
            {"k": 48, "blocks": 3, "epsilon": 1.0, "rest": None},
            {
                "k": 0.1,
                "least": 1,
                "blocks": 2,
                "a": 0.5,
                "gate": "off_for_c0",
                "epsilon": 1.0,
                "rest": None,
                "unit": "kv_head",
            },
            {"k": 33, "a": None, "gate": "off", "epsilon": 1.0, "rest": None, "sinks": 0, "local": 1},
            {
                "k": 40,
                "blocks": 0,
                "slash_shift_on_read": False,
                "bypass_shift": False,
                "read_local": False,
                "epsilon": 1.0,
                "rest": None,
            },
        ),
        {"k": 100_000, "epsilon": 1.0, "rest": None},
        budget=lambda m: {"k": max(1, m - 4), "epsilon": 1.0, "rest": None},
        boundary=(4, 10, 48, 64, 128),
        units={
            "q_head": {"k": 40, "epsilon": 1.0, "rest": None},
            "kv_head": {"k": 40, "epsilon": 1.0, "rest": None, "unit": "kv_head"},
        },
    ),
    MethodCase(
        "psa",
        (
            {"epsilon": 0.5, "microbatch": 1, "rank": "cuboid"},
            {"epsilon": 0.9, "block_size": 16, "unit": "layer", "stop": "mean", "rank": "cuboid"},
            {"epsilon": 0.0, "block_size": 64, "microbatch": 2, "rank": "cuboid"},
            {"epsilon": 0.6, "block_size": 16, "microbatch": 1, "rank": "minmax"},
            {"epsilon": 0.6, "block_size": 16, "microbatch": 1, "rank": "mean", "unit": "layer"},
            {"epsilon": 0.6, "block_size": 16, "microbatch": 1},
        ),
        {"epsilon": 1.0},
        boundary=(16, 32, 64, 128, 160, 192),
    ),
)
