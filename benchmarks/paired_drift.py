"""Differences of KL to dense between methods of a board, token by token.

    python benchmarks/paired_drift.py board rocketkv-locks quest-rocketkv

``board`` is the folder that ``saccade eval board --drift TOKENS`` wrote to; ``A-B`` is A's KL less B's in nats. Both
were forced over the same tokens, so differences are paired, and their 95 % intervals are by stretches of neighbours, as
the board's own are. Every budget and length of the board has a line of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from saccade.eval.board.drifts import load_drift, place_of
from saccade.eval.board.kept import KEPT, RESULTS
from saccade.eval.board.rows import STRETCH
from saccade.eval.results import read_json
from saccade.eval.stats import stretch_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("board", type=Path)
    parser.add_argument("pairs", nargs="+", metavar="A-B")
    parser.add_argument("--tokens", type=int, default=64, help="Tokens that were forced (--drift of the board).")
    args = parser.parse_args()
    kl: dict[tuple[str, int, float], list[float]] = {}
    for place in read_json(args.board / KEPT)["placed"]:
        if place["budget"] is not None:
            found = load_drift(place_of(args.board / RESULTS, place["length"], args.tokens, place["policy"]))
            if found is not None:
                kl[place["name"], place["length"], place["budget"]] = found.kl
    for pair in args.pairs:
        first, _, second = pair.partition("-")
        places = sorted({at[1:] for at in kl if at[0] == first} & {at[1:] for at in kl if at[0] == second})
        if not places:
            names = sorted({at[0] for at in kl})
            parser.error(f"{pair}: no budget of {args.board} has the drift of both; it has {names}")
        for length, budget in places:
            both = zip(kl[first, length, budget], kl[second, length, budget], strict=True)
            gap = stretch_interval([one - other for one, other in both], min(STRETCH, args.tokens))
            said = f"{gap.mean:.4f} [{gap.low:.4f}, {gap.high:.4f}]"
            print(f"{pair}, {length} tokens, {budget:.3%} of the keys: {said}")


if __name__ == "__main__":
    main()
