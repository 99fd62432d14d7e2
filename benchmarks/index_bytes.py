"""Bytes that one layer's decode step reads and writes, by LFPS and by Quest: which can be the faster over the same
memory, whatever it runs on.

    python benchmarks/index_bytes.py [--contexts 32768 131072] [--heads 32 --kv-heads 8 --head-dim 128] [--again 0.15]

bfloat16; the share of keys that are LFPS's candidates is the paper's (Table 4, a = 0.2), in tables planted as those of
``saccade bench ops`` with ``@`` are; lines of 64 bytes that a scan opens and a gain changes are counted in them. Quest
reads a fiftieth of the keys in blocks of 16. Every list is counted as if no other had its keys. ``codes``: blocks are
ruled out by 4-bit codes first, and ``--again`` of them scored by their bounds; else all by bounds, as its paper does.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from saccade.bench.decode import planted_tables
from saccade.methods.lfps.tables import BLOCK, ScoreTables

CANDIDATES = {4096: 0.06, 8192: 0.046, 16384: 0.041, 32768: 0.034, 65536: 0.02, 131072: 0.017}
SINKS, LOCAL, SHARE, PAGE = 4, 6, 0.02, 16
WIDTH, ENTRY, LINE = 2, 4, 64  # bytes of a channel, of a table's entry, and of a cache line


def lines_of(places: Tensor) -> int:
    """Cache lines that hold the table entries ``places`` of one unit."""
    return len((places // BLOCK).unique())


def lfps(context: int, lists: int, dim: int) -> dict[str, float]:
    """By part: ``choosing`` reads upper bounds and opens lines of both tables, ``learning`` reads and writes lines."""
    keys = context - SINKS
    none = torch.zeros(lists, keys)
    tables = planted_tables(ScoreTables.of(none, none, SINKS, context - 1), keys, CANDIDATES[context], 0)
    opened = touched = read = 0
    for vertical, slash in zip(tables.vertical, tables.slash):
        columns, distances = (table.nonzero()[:, 0] for table in (vertical, slash))
        candidates = torch.cat([columns, context - 1 - SINKS - distances]).unique()
        candidates = candidates[candidates >= 0]
        opened += lines_of(columns) + lines_of(distances)
        touched += lines_of(candidates) + lines_of(context - 1 - SINKS - candidates)
        read += len(candidates)
    bounds = 2 * lists * -(-keys // BLOCK) * ENTRY
    ends = lists * (SINKS + LOCAL)
    best = lists * round(SHARE * keys)
    return {
        "choosing": bounds + LINE * max(opened, touched),
        "keys": (read + ends) * dim * WIDTH,
        "values": (min(read, best) + ends) * dim * WIDTH,
        "learning": 2 * LINE * touched,
    }


def quest(context: int, lists: int, kv_heads: int, dim: int, again: float | None) -> dict[str, float]:
    """By part; ``again``: the share of blocks that codes do not rule out, None without codes."""
    bounds = kv_heads * (context // PAGE) * 2 * dim * WIDTH
    codes = kv_heads * (context // PAGE) * (dim + 8)  # 4 bits a channel of two parts; their range
    keys = lists * (round(SHARE * context) // PAGE * PAGE) * dim * WIDTH
    return {"choosing": bounds if again is None else codes + again * bounds, "keys": keys, "values": keys}


def rows(context: int, heads: int, kv_heads: int, dim: int, again: float) -> dict[str, dict[str, float]]:
    """Bytes by method and part."""
    half = kv_heads * context * dim * WIDTH
    return {
        "dense": {"keys": half, "values": half},
        "LFPS, a list a head": lfps(context, heads, dim),
        "Quest, a list a head": quest(context, heads, kv_heads, dim, None),
        "Quest, a list a head, codes": quest(context, heads, kv_heads, dim, again),
        "LFPS, a list a KV head": lfps(context, kv_heads, dim),
        "Quest, a list a KV head": quest(context, kv_heads, kv_heads, dim, None),
        "Quest, a list a KV head, codes": quest(context, kv_heads, kv_heads, dim, again),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, choices=CANDIDATES, default=[32768, 131072])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--again", type=float, default=0.15, help="of blocks; docs/results/tiers-tables.md")
    options = parser.parse_args()
    print("| keys | MB a layer and step | choosing | keys | values | learning | together |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for context in options.contexts:
        for name, parts in rows(context, options.heads, options.kv_heads, options.head_dim, options.again).items():
            cells = [parts.get(part, 0.0) / 1e6 for part in ("choosing", "keys", "values", "learning")]
            shown = " | ".join(f"{one:.1f}" for one in [*cells, sum(cells)])
            print(f"| {context:,} | {name} | {shown} |")


if __name__ == "__main__":
    main()
