"""LoopServe's Fig. 6: time to the first token and between tokens, turn by turn of one conversation, dense beside
LoopServe.

    python benchmarks/turn_latencies.py smollm2 -f dracula.txt --length 4096 --length 8192

Each of three turns brings a third of ``--length`` tokens of the text (less, where the model takes no more) and is
answered in ``--answer`` tokens. Policies take turns in each of ``--repeats`` conversations, and the medians are
printed. bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from paper_captures import text_of

from saccade import LLM, SamplingParams

POLICIES = ("dense", "loopserve(alpha=0.955)", "loopserve")
TURNS = 3
Times = list[tuple[float, float]]  # a turn: milliseconds to the first token, and between two


def talk(llm: LLM, ids: list[int], policy: str, answer: int) -> Times:
    """One conversation of ``TURNS`` turns over ``ids``, each third followed by an answer of ``answer`` tokens."""
    share = len(ids) // TURNS
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    took: Times = []
    with llm.session(policy) as session:
        said: list[int] = []
        for turn in range(TURNS):
            said += ids[turn * share : (turn + 1) * share]
            output = session.complete(said, params)
            report = output.report
            first, whole = report["first_token_seconds"], report["total_seconds"]
            took.append((1000 * first, 1000 * (whole - first) / max(1, answer - 1)))
            said += output.outputs[0].token_ids
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--policy", action="append", help="instead of dense and LoopServe")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    lengths, policies = args.length or [4096], args.policy or POLICIES
    with LLM(
        args.model, dtype="bfloat16", threads=args.threads, device=args.device, enable_prefix_caching=False
    ) as llm:
        most = llm.max_model_len - TURNS * args.answer
        text = text_of(args.file, 0.3)
        print(f"{args.model}, {args.threads} threads: ms to the first token / between tokens")
        print(f"| tokens | policy | {' | '.join(f'turn {turn + 1}' for turn in range(TURNS))} |")
        print("|---|---" + "|---:" * TURNS + "|")
        for length in lengths:
            ids = llm.encode(text[: 8 * length])[: min(length, most)]
            talk(llm, ids[:192], policies[-1], 2)
            found: dict[str, list[Times]] = {policy: [] for policy in policies}
            for _ in range(args.repeats):
                for policy in policies:
                    found[policy].append(talk(llm, ids, policy, args.answer))
            for policy, runs in found.items():
                turns = [[statistics.median(part) for part in zip(*times)] for times in zip(*runs)]
                cells = [f"{first:.0f} / {between:.1f}" for first, between in turns]
                print(f"| {len(ids)} | `{policy}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
