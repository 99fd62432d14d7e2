"""Whether a verification's weights help the next draft: acceptance under ``lossless`` with ``carried=0`` and with
``carried=0.5``, of ``quest`` at the same number of keys, of ``psa`` at as many as its rule reads.

    python benchmarks/verified_blocks.py [COUNT] [--length 4000] [--tasks span_copy,vt] [--drafts "quest;psa"]

The reference model answers COUNT prompts of each task by 32 tokens, four of them drafted a round. Of each line: how
many drafted tokens stayed, and the share of the keys that the drafts' rows read.
"""

from __future__ import annotations

import argparse

from saccade import LLM, SamplingParams
from saccade.eval.render import render
from saccade.eval.suite.tasks import make

SHARES = (0.0, 0.5)
DRAFTS = "quest(budget=128, dense_layers=0);quest(budget=256, dense_layers=0);psa(epsilon=0.3);psa(epsilon=0.1)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=6)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--tasks", default="span_copy,vt")
    parser.add_argument("--drafts", default=DRAFTS)
    given = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    llm = LLM(
        "reference",
        dtype="bfloat16",
        max_model_len=given.length + 300,
        max_requests=1,
        device="cpu",
        enable_prefix_caching=False,
    )
    with llm:
        for task in given.tasks.split(","):
            prompts = [render(llm.tokenizer, [], make(task, given.length, n).turns[0]).ids for n in range(given.count)]
            for draft in given.drafts.split(";"):
                for share in SHARES:
                    policy = f"lossless(draft={draft}, tokens=4, lookup=0, carried={share})"
                    accepted, drafted, keys, causal = 0, 0, 0.0, 0.0
                    for ids in prompts:
                        said = llm.generate(ids, params, policy=policy)[0].report["speculation"]
                        accepted, drafted = accepted + said["accepted"], drafted + said["drafted"]
                        keys += said["draft"]["keys_attended"]
                        causal += said["draft"]["keys_causal"]
                    print(
                        f"{task}, {draft}, carried {share}: {accepted} of {drafted} stayed = "
                        f"{accepted / drafted:.2f}; {keys / causal:.3f} of the keys",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
