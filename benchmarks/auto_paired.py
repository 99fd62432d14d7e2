"""What ``auto`` costs beside dense attention: prefill and decode of real text, by turns, a row a length.

python benchmarks/auto_paired.py smollm2 --lengths 100,1000,4000,8000
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from saccade import LLM, SamplingParams
from saccade.prose import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="100,1000,4000,8000")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("-f", "--file", type=Path, help="UTF-8 text; generated prose by default")
    parser.add_argument("-o", "--out", type=Path, help="JSON file")
    given = parser.parse_args()
    text = generate(80_000, seed=3) if given.file is None else given.file.read_text(encoding="utf-8")
    llm = LLM(given.model, dtype=given.dtype, device=given.device, threads=given.threads)
    ids = llm.encode(text)
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    rows = []
    for wanted in map(int, given.lengths.split(",")):
        length = min(wanted, llm.max_model_len - given.tokens - 1, len(ids))
        for policy in ("dense", given.policy):
            llm.generate([ids[:length]], params, policy=policy)  # what is done once
        ratios: dict[str, list[float]] = {"first": [], "total": [], "cpu": []}
        became = ""
        for turn in range(given.pairs):
            order = ("dense", given.policy) if turn % 2 == 0 else (given.policy, "dense")
            reports, spent = {}, {}
            for one in order:
                began = time.process_time()
                reports[one] = llm.generate([ids[:length]], params, policy=one)[0].report
                spent[one] = time.process_time() - began
            dense, own = (reports[one] for one in ("dense", given.policy))
            ratios["first"].append(own["first_token_seconds"] / dense["first_token_seconds"])
            ratios["total"].append(own["total_seconds"] / dense["total_seconds"])
            ratios["cpu"].append(spent[given.policy] / spent["dense"])
            became = reports[given.policy]["policy"]
        row = {"length": length, "became": became, **{name: statistics.median(all) for name, all in ratios.items()}}
        rows.append(row | {"ratios": ratios})
        print(
            f"{length} tokens: {became}; time to first token {row['first']:.3f}, whole {row['total']:.3f} of dense's, "
            f"of its processor time {row['cpu']:.3f}",
            flush=True,
        )
    if given.out is not None:
        given.out.write_text(
            json.dumps({"model": given.model, "device": str(llm.model.device), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
