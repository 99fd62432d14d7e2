"""From which length policies pay: prefill and decode steps beside dense attention's, by turns, over one text.

    python benchmarks/auto_lengths.py qwen2.5-coder --lengths 8192,16384,32000 -p "sampled_rows+psa" -p lfps

A row a length and policy: seconds of the prefill and of a step behind it, each over dense attention's next to it, the
best of ``--repeats`` runs. These are the times that policy ``auto`` goes by (engine/settings/pays.py), at more lengths.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path

from saccade import LLM
from saccade.engine.settings import pays
from saccade.methods.policy import Policy

POLICIES = ("sampled_rows(threshold=0.0005)+psa", "flashprefill(alpha=0.05)+lfps(k=0.1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="4096,8192,16384,32000")
    parser.add_argument("-p", "--policy", action="append")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no more lengths or policies after so long")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("-o", "--out", type=Path, help="JSON file, written after every row")
    given = parser.parse_args()
    began = time.monotonic()
    options = {} if given.threads is None else {"threads": given.threads}
    llm = LLM(given.model, dtype=given.dtype, device=given.device, enable_prefix_caching=False, **options)
    engine = llm.engine
    most = min(llm.max_model_len, engine.checks.most_tokens) - pays.ANSWER - 1
    lengths = sorted({min(most, int(one)) for one in given.lengths.split(",")})
    ids = pays._text(engine, lengths[-1])
    rows = []
    print(
        "| length | policy | prefill, s | of dense's | step, ms | of dense's |\n|---|---|---|---|---|---|", flush=True
    )
    for length in lengths:
        known: dict[str, tuple[float, float]] = {}
        for text in ("dense", *(given.policy or POLICIES)):
            if time.monotonic() - began > given.seconds:
                break
            policy = Policy.parse(text)
            pays._run(engine, ids[:length], policy)  # what is done once
            runs = [pays._run(engine, ids[:length], policy)[:2] for _ in range(given.repeats)]
            known[text] = prefill, step = min(one[0] for one in runs), min(one[1] for one in runs)
            first, later = prefill / known["dense"][0], step / known["dense"][1]
            rows.append({"length": length, "policy": text, "prefill": prefill, "step": step, "of": [first, later]})
            print(
                f"| {length} | `{text}` | {prefill:.3f} | {first:.2f} | {1000 * step:.2f} | {later:.2f} |", flush=True
            )
            if given.out is not None:
                about = {"model": Path(given.model).name, "device": str(llm.model.device), "dtype": given.dtype}
                when = datetime.date.today().isoformat()
                given.out.write_text(json.dumps({**about, "date": when, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
